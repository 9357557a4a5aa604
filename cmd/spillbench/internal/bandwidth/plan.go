package bandwidth

import (
	"slices"

	"github.com/spillway-db/spillway/tier"
)

// Planned is how many bytes a measurement moves.
type Planned struct {
	Ours, Limit int64
	Disk        int64 // of both, along edges with a disk
}

// Plan returns how many bytes Run would move at most, along all edges, with what is not timed. Rounds that are repeated because the disk's room was not in the state that
// was to be measured are not in it; there are as many as pairs at most. What does not fit is left
// out, as Run does.
func Plan(cfg Config) (p Planned, err error) {
	if err := cfg.validate(); err != nil {
		return p, err
	}
	loads, _, err := cfg.fit()
	if err != nil {
		return p, err
	}
	links, _ := cfg.within(linksOf(cfg.Engine))
	for _, l := range loads {
		for _, k := range links {
			ours, limit := cfg.moved(k, l)
			p.Ours, p.Limit = p.Ours+ours, p.Limit+limit
			if limitOf(k.from, k.to) == RequestsOfDisk {
				p.Disk += ours + limit
			}
		}
	}
	return p, nil
}

// moved is Plan for one link and one load. It counts what the loops of byLoad do.
func (c Config) moved(k link, l load) (ours, limit int64) {
	rounds, all := int64(c.Pairs)+1, l.total() // the first warms up
	ours = all                                 // they are brought to where the link begins
	switch {
	case k.from.Kind() == tier.Disk: // toMemory: there and back; both files are written once and read each round
		return ours + 2*rounds*all, 2*all + 2*rounds*all
	case k.to.Kind() == tier.Disk && c.Watched[k.to.ID()] != nil: // inPlace: settled, anew, settled and written and read
		return ours + 2*all + (2+2+2)*rounds*all, (1 + 2) * 2 * rounds * all
	case k.driven() && l.threads%2 == 0 && k.back: // byDriver with bothWays
		return ours + all/2 + (2+2)*rounds*all, all + (2+2)*2*rounds*all
	case k.driven(): // byDriver
		return ours + 2*rounds*all, all + 2*2*rounds*all
	}
	return ours + 4*rounds*all, 4 * 2 * rounds * all // betweenMemories, onFiles
}

// oneOfEach keeps the first link of each pair of kinds.
func oneOfEach(links []link) (kept []link) {
	for _, k := range links {
		same := func(o link) bool { return o.from.Kind() == k.from.Kind() && o.to.Kind() == k.to.Kind() }
		if !slices.ContainsFunc(kept, same) {
			kept = append(kept, k)
		}
	}
	return kept
}
