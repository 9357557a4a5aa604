// Package bandwidth implements spillbench bandwidth: it times an engine's moves along every edge,
// each beside a raw limit that the machine reaches without the engine.
//
//	New ─▶ Measurement ─ Run ─▶ a size ─▶ a number of threads ─▶ a pair of spaces (link)
//	                                                                        │
//	          round 0   ours · raw · raw again    warms up                  ▼
//	          round 1   ours · raw · raw again    ours ÷ raw is the efficiency
//	          round 2   raw · ours · raw again    raw ÷ raw again is the noise
//
// Ours are moves of whole batches by Mover.Move, one batch for each thread. Raw transfers as many
// bytes by as many threads:
//
//   - between a simulated GPU and host memory by memmove between two regions of huge pages;
//   - between two host spaces by memmove between memory of these spaces;
//   - between host memory and a GPU with a driver by one asynchronous copy, also between memory of
//     the two spaces;
//   - between two GPUs by the device's own copy to its peer;
//   - to and from a disk by direct I/O, 8 requests of 1 MiB in flight, on an anonymous file in the
//     spill directory.
//
// The sides take turns, and the order changes from round to round. An untimed transfer in the
// opposite direction precedes each timed one, so that all sides find the caches in the same state.
// Before the first timed write each side has written all its room on the disk, so figures are those
// of rewritten room.
//
// A move may use several processors, so its efficiency can exceed 1.
//
// After its rounds every batch is compared with the table that it was made of.
//
// Run owns the goroutines, mappings and files that it creates, and releases them before it returns.
// The package has no locks. A Measurement belongs to one goroutine.
package bandwidth

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/job"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// Bounds of batch sizes. The smallest batch holds a few hundred rows; the offsets of text in the
// largest fit in 32 bits.
const (
	SmallestBatch = 64 << 10
	LargestBatch  = 8 << 30
)

// The raw limits.
const (
	memmove    = "memmove"
	driverCopy = "driver's copy" // between a GPU and pinned host memory
	peerCopy   = "peer copy"     // between two GPUs
	diskIO     = "disk I/O"
)

// Config configures a measurement. Engine, Sizes, Threads, Pairs and Progress are required.
type Config struct {
	Engine   *spillway.Engine // must be idle, have a host space, and be used by nobody else during Run
	Sizes    []int64          // bytes of a batch: multiples of 4096 from SmallestBatch to LargestBatch
	Threads  []int            // how many batches move at the same time
	Pairs    int              // of ours and raw, for each figure
	Progress job.Progress

	Between []tier.Kind // kinds of spaces whose edges are measured; nil means all
	// OneOfEach measures one pair of spaces of each pair of kinds: one GPU and one disk, not each.
	OneOfEach bool
	Seed      uint64 // of the generated table
	Spare     int64  // bytes of memory that Run may use beside the engine's; 0 means any number
	// Files returns a file system for one more raw file, as slow as those of the volumes; nil means the
	// machine's own.
	Files func() disk.FS
}

// ErrNoEdges reports that no pair of spaces can be measured.
var ErrNoEdges = errors.New("there is nothing to measure")

// Measurement is the plan that New makes of a Config for its engine.
type Measurement struct {
	// Skipped has an error for each size and number of threads that is left out: a *tier.NoSpaceError
	// if a space is too small.
	Skipped []error
	// Ours and Limit are how many bytes Run will move at most, with those that are not timed; Disk is
	// the part of both that edges with a disk have.
	Ours, Limit, Disk int64

	cfg   Config
	loads []load
	links []link
}

// load is a batch size and how many batches move at a time, one by each thread.
type load struct {
	bytes   int64
	threads int
}

func (l load) total() int64 { return l.bytes * int64(l.threads) }

// link is a pair of spaces and the edges between them. from comes first in the order of spaces, so
// only to can be a disk.
type link struct {
	from, to *tier.Space
	limit    string // one of the raw limits
	inSpaces bool   // raw copies between memory of the spaces
}

// bothWays reports whether a load is also measured in both directions at once.
func (k link) bothWays(l load) bool { return k.inSpaces && l.threads%2 == 0 }

// New plans a measurement. The error is an ErrNoEdges if no pair of spaces can be measured.
func New(cfg Config) (*Measurement, error) {
	if cfg.Files == nil {
		cfg.Files = disk.OS
	}
	m := &Measurement{cfg: cfg, links: cfg.edges()}
	if len(m.links) == 0 {
		var names []string
		for _, s := range cfg.Engine.Spaces() {
			if cfg.includes(s) {
				names = append(names, s.ID().String())
			}
		}
		return nil, fmt.Errorf("%w: an edge needs two spaces, not both of them disks, and there is only %s",
			ErrNoEdges, strings.Join(names, ", "))
	}
	for _, bytes := range cfg.Sizes {
		for _, threads := range cfg.Threads {
			l := load{bytes, threads}
			if err := m.lacks(l); err != nil {
				m.Skipped = append(m.Skipped,
					fmt.Errorf("%d × %s at once: there is no room: %w", threads, size.Format(bytes), err))
				continue
			}
			m.loads = append(m.loads, l)
			for _, k := range m.links {
				m.count(k, l)
			}
		}
	}
	return m, nil
}

// edges returns the pairs of spaces. Two disks are no pair: their limit depends on whether they are
// one device, which is unknown.
func (c *Config) edges() (links []link) {
	seen := make(map[[2]tier.Kind]bool)
	spaces := c.Engine.Spaces()
	for i, from := range spaces {
		for _, to := range spaces[i+1:] {
			kinds := [2]tier.Kind{from.Kind(), to.Kind()}
			if !c.includes(from) || !c.includes(to) || kinds[0].IsStorage() || c.OneOfEach && seen[kinds] {
				continue
			}
			seen[kinds] = true
			k := link{from, to, memmove, true}
			switch {
			case kinds[1].IsStorage():
				k.limit, k.inSpaces = diskIO, false
			case kinds[1].IsDevice():
				k.limit = peerCopy
			case kinds[0].IsDevice() && deviceOf(from).Info().Backend != "sim":
				k.limit = driverCopy
			case kinds[0].IsDevice():
				k.inSpaces = false
			}
			links = append(links, k)
		}
	}
	return links
}

// host returns the first host space.
func (c *Config) host() *tier.Space { return c.Engine.Reservations().Spaces().InTier(tier.Host)[0] }

func (c *Config) includes(s *tier.Space) bool {
	return len(c.Between) == 0 || slices.Contains(c.Between, s.Kind())
}

// lacks returns an error if there is no room for a load.
func (m *Measurement) lacks(l load) error {
	for _, s := range m.cfg.Engine.Spaces() {
		count := int64(l.threads)
		for _, k := range m.links { // the memory that raw copies is in the space, too
			if k.inSpaces && (s == k.from || s == k.to) || k.limit == peerCopy && s == m.cfg.host() {
				count = 2 * int64(l.threads)
			}
		}
		if l.bytes > s.Capacity/count || s.Charge(l.bytes)*count > s.State().Available {
			return &tier.NoSpaceError{
				Space: s.ID(), Requested: s.Charge(l.bytes) * count, Available: s.State().Available,
			}
		}
		v, ok := s.Pool.(*volumes.Volume)
		if !ok {
			continue
		}
		// The volume's room and a raw file exist together, and need some to spare. Where the free bytes
		// are unknown, allocating finds out.
		if u, err := m.cfg.Files().Usage(v.Dir()); err == nil && u.Free/3 < l.total() {
			return &tier.NoSpaceError{Space: s.ID(), Requested: 3 * l.total(), Available: u.Free}
		}
	}
	if own := l.bytes + 2*l.total(); m.cfg.Spare > 0 && own > m.cfg.Spare { // the table, and the regions
		need, have := size.Apart(own, m.cfg.Spare)
		return fmt.Errorf("%s of memory are needed beside the engine's, and %s may be taken", need, have)
	}
	return nil
}

// count adds the bytes that measuring one link moves. It mirrors bench.link.
func (m *Measurement) count(k link, l load) {
	rounds, all := int64(m.cfg.Pairs)+1, l.total()
	turns := 4 * rounds * all // of one side
	if k.bothWays(l) {
		turns += 2 * rounds * all
	}
	// Ours also go to where the link begins and, to be compared, to host memory.
	ours, limit := 2*all+turns, 2*turns
	if k.inSpaces {
		limit += all // to try the lanes
	}
	m.Ours, m.Limit = m.Ours+ours, m.Limit+limit
	if k.limit == diskIO {
		m.Disk += ours + limit
	}
}

// Run measures, and returns rows ordered by size, threads and edge. It ends soon after ctx does,
// with the cause of that.
func (m *Measurement) Run(ctx context.Context) (rows []report.BandwidthRow, err error) {
	largest := int64(SmallestBatch)
	for _, l := range m.loads {
		largest = max(largest, l.total())
	}
	room, err := newRegions(ctx, largest)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, room.close()) }()
	for _, l := range m.loads {
		b := bench{cfg: &m.cfg, load: l, room: room}
		more, err := b.run(ctx, m.links)
		if err != nil {
			return nil, err
		}
		rows = append(rows, more...)
	}
	return rows, nil
}
