package replay

import (
	"cmp"
	"maps"
	"math/bits"
	"slices"
	"time"

	"github.com/spillway-db/spillway/internal/trace"
	"github.com/spillway-db/spillway/tier"
)

// Edge is a way from one space to another; the zero From is outside.
type Edge struct{ From, To tier.ID }

func compareEdges(a, b Edge) int {
	return cmp.Or(cmp.Compare(a.From.Kind, b.From.Kind), cmp.Compare(a.From.Ordinal, b.From.Ordinal),
		cmp.Compare(a.To.Kind, b.To.Kind), cmp.Compare(a.To.Ordinal, b.To.Ordinal))
}

// path is what the moves of an edge share with those of others: the slower of the two spaces.
func (e Edge) path() tier.ID {
	if e.From.Kind > e.To.Kind {
		return e.From
	}
	return e.To
}

// costs is what moves of an edge took, in seconds a byte: of the path's time, which moves share
// that are under way at once. Sizes are apart by powers of two, because small batches take more a
// byte.
type costs [65]samples[float64]

func (c *costs) add(bytes int64, seconds float64) {
	c[bits.Len64(uint64(bytes))].add(seconds / float64(bytes))
}

// next returns what the next move takes, by one that was about as large.
func (c *costs) next(bytes int64) time.Duration {
	at := bits.Len64(uint64(bytes))
	for d := range len(c) {
		for _, i := range [...]int{at - d, at + d} {
			if i >= 0 && i < len(c) && len(c[i].all) > 0 {
				return time.Duration(c[i].next() * float64(bytes) * 1e9)
			}
		}
	}
	return time.Duration(float64(bytes) / unknownSpeed * 1e9)
}

// speed is how many bytes a second moves make on average; 0 if none was measured. c may be nil.
func (c *costs) speed() int64 {
	if c == nil {
		return 0
	}
	n, seconds := 0, 0.0
	for i := range c {
		for _, s := range c[i].all {
			n++
			seconds += s
		}
	}
	if n == 0 {
		return 0
	}
	return int64(float64(n) / seconds)
}

// costsOf returns the costs of the edges that were used.
func costsOf(t *trace.Trace) map[Edge]*costs {
	type change struct {
		at   time.Duration
		move int // index of the event
		ends bool
	}
	paths := make(map[tier.ID][]change)
	for i := range t.Events {
		if e := &t.Events[i]; e.Kind == trace.Moved && e.Bytes > 0 && !e.Copy {
			p := Edge{e.From, e.Space}.path()
			paths[p] = append(paths[p], change{e.At - e.Took, i, false}, change{e.At, i, true})
		}
	}
	of := make(map[Edge]*costs)
	for _, all := range paths {
		slices.SortStableFunc(all, func(a, b change) int { return cmp.Compare(a.at, b.at) })
		took := make(map[int]float64) // of those that are under way
		last := time.Duration(0)
		for _, c := range all {
			for m := range took {
				took[m] += (c.at - last).Seconds() / float64(len(took))
			}
			if last = c.at; !c.ends {
				took[c.move] = 0
				continue
			}
			e := &t.Events[c.move]
			k := Edge{e.From, e.Space}
			if of[k] == nil {
				of[k] = new(costs)
			}
			of[k].add(e.Bytes, max(took[c.move], 1e-9))
			delete(took, c.move)
		}
	}
	return of
}

// unknownSpeed is that of an edge where no edge like it was used, in bytes a second.
const unknownSpeed = 1 << 30

// likest returns the costs of the edge that was measured and is most like one that was not: between
// the same tiers, from or to the same slower tier, or the other way round.
func likest(known map[Edge]*costs, k Edge) *costs {
	best, likeness := new(costs), 0
	for _, e := range slices.SortedFunc(maps.Keys(known), compareEdges) {
		like := 0
		if e.path().Kind == k.path().Kind {
			like = 1
			if (e.From.Kind < e.To.Kind) == (k.From.Kind < k.To.Kind) {
				like = 2
			}
			if e.From.Kind == k.From.Kind && e.To.Kind == k.To.Kind {
				like = 3
			}
		}
		if like > likeness {
			best, likeness = known[e], like
		}
	}
	return best
}

// path is the time of what moves share. Each of them gets as much of it.
type path struct {
	w     *world
	moves []*carried
	last  time.Duration // when what is left was worked out
	round int           // of the last plan
}

type carried struct {
	left time.Duration // of the path's own time
	a    *actor
}

// carry lets a move pass: the actor goes on when it has ended.
func (p *path) carry(a *actor, takes time.Duration) {
	if takes > 0 {
		p.advance()
		p.moves = append(p.moves, &carried{takes, a})
		p.plan()
		a.pause()
	}
}

func (p *path) advance() {
	for _, m := range p.moves {
		m.left -= (p.w.now - p.last) / time.Duration(len(p.moves))
	}
	p.last = p.w.now
}

// plan notes when the next move ends.
func (p *path) plan() {
	p.round++
	if len(p.moves) == 0 {
		return
	}
	least := slices.MinFunc(p.moves, func(a, b *carried) int { return cmp.Compare(a.left, b.left) }).left
	round := p.round
	p.w.after(max(0, least)*time.Duration(len(p.moves)), func() {
		if round != p.round {
			return
		}
		p.advance()
		var ended []*actor
		p.moves = slices.DeleteFunc(p.moves, func(m *carried) bool {
			if m.left <= 0 {
				ended = append(ended, m.a)
			}
			return m.left <= 0
		})
		p.plan()
		for _, a := range ended {
			p.w.resume(a)
		}
	})
}
