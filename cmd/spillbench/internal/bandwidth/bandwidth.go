// Package bandwidth implements spillbench bandwidth: it times an engine's moves along every edge,
// each beside a raw limit that the machine reaches without the engine.
//
//	New ──▶ Measurement ── Run ──▶ a size ──▶ a number of threads ──▶ a pair of spaces (link)
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
// The sides take turns, and the order changes from round to round. In memory an untimed transfer in
// the opposite direction precedes each timed one, so that both sides find the caches in the same
// state. On a disk each side allocates its room at the start of its turn, as much as the others and
// after they have freed theirs: one place on a disk may be twice as fast as another, and so the file
// system chooses the same one again. Room that was allocated and never written is fresh; room that
// the turn has written before is rewritten.
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
	"runtime"
	"slices"
	"strings"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/job"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// Bounds of batch sizes. The smallest batch holds a few hundred rows; the offsets of text in the
// largest fit in 32 bits.
const (
	SmallestBatch = 64 << 10
	LargestBatch  = 8 << 30
)

// The states of the room on a disk that a batch is written to or read from.
const (
	fresh     = "fresh"
	rewritten = "rewritten" // also that of reads
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
	// Files returns the file system of one more raw file, which must be as slow as the volumes' are.
	// If Files is nil or returns nil, that is the machine's own.
	Files func() disk.FS
}

func (c *Config) files() disk.FS {
	if c.Files != nil {
		if fs := c.Files(); fs != nil {
			return fs
		}
	}
	return disk.OS()
}

// ErrNoEdges reports that no pair of spaces can be measured.
var ErrNoEdges = errors.New("there is nothing to measure")

// Measurement is what a Config comes to on its engine.
type Measurement struct {
	// Skipped has an error for each size and number of threads that is left out: a *tier.NoSpaceError
	// if a space is too small.
	Skipped []error
	// Ours and Limit are how many bytes Run will move at most, with those that are not timed; Disk is
	// the part of both that edges with a disk have. Rounds that Run must repeat are not counted.
	Ours, Limit, Disk int64

	cfg     Config
	loads   []load
	links   []link
	missing []report.BandwidthRow
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
	from, to    *tier.Space
	there, back bool        // whether there is a converter in this direction
	limit       string      // one of the raw limits
	via         *tier.Space // between GPUs: the host space for copies if they cannot reach each other
}

// inSpaces reports whether raw copies between memory of the spaces.
func (k link) inSpaces() bool {
	return k.limit == driverCopy || k.limit == peerCopy || k.from.Kind() == tier.Host && k.to.Kind() == tier.Host
}

// New plans a measurement. The error is an ErrNoEdges if no pair of spaces can be measured.
func New(cfg Config) (*Measurement, error) {
	m := &Measurement{cfg: cfg}
	m.links, m.missing = cfg.edges()
	if len(m.links)+len(m.missing) == 0 {
		var names []string
		for _, s := range cfg.Engine.Spaces() {
			if cfg.includes(s.Kind()) {
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

// edges returns the pairs of spaces with a converter, and a row for each direction without one. Two
// disks are no pair: their limit depends on whether they are one device, which is unknown.
func (c *Config) edges() (links []link, missing []report.BandwidthRow) {
	known, seen := make(map[[2]batch.PayloadType]bool), make(map[[2]tier.Kind]bool)
	for _, e := range c.Engine.Registry().Edges() {
		known[[2]batch.PayloadType{e.From, e.To}] = true
	}
	convertible := func(from, to *tier.Space) bool {
		types := [2]batch.PayloadType{batch.ImageType(from.Kind()), batch.ImageType(to.Kind())}
		if !known[types] {
			why := convert.NoConverterError{From: types[0], To: types[1]}
			missing = append(missing, report.BandwidthRow{From: from.ID().String(), To: to.ID().String(),
				Samples: noSamples(), Error: why.Error()})
		}
		return known[types]
	}
	spaces := c.Engine.Spaces()
	for i, from := range spaces {
		for _, to := range spaces[i+1:] {
			kinds := [2]tier.Kind{from.Kind(), to.Kind()}
			if !c.includes(kinds[0]) || !c.includes(kinds[1]) || kinds[0] == tier.Disk || c.OneOfEach && seen[kinds] {
				continue
			}
			seen[kinds] = true
			k := link{from: from, to: to, there: convertible(from, to), back: convertible(to, from), limit: memmove}
			switch {
			case kinds[1] == tier.Disk:
				k.limit = diskIO
			case kinds[1] == tier.GPU:
				k.limit = peerCopy
				k.via = c.host()
			case kinds[0] == tier.GPU && deviceOf(from).Info().Backend != "sim":
				k.limit = driverCopy
			}
			if k.there || k.back {
				links = append(links, k)
			}
		}
	}
	return links, missing
}

// host returns the first host space.
func (c *Config) host() *tier.Space { return c.Engine.Reservations().Spaces().InTier(tier.Host)[0] }

func (c *Config) includes(k tier.Kind) bool {
	return len(c.Between) == 0 || slices.Contains(c.Between, k)
}

// lacks returns what a load needs more of, or nil if there is room for it.
func (m *Measurement) lacks(l load) error {
	for _, s := range m.cfg.Engine.Spaces() {
		count := int64(l.threads)
		if slices.ContainsFunc(m.links, func(k link) bool {
			return k.inSpaces() && (s == k.from || s == k.to || s == k.via)
		}) {
			count *= 2 // what raw copies is in the space, too
		}
		if l.bytes > s.Capacity()/count || s.Charge(l.bytes)*count > s.Available() {
			return &tier.NoSpaceError{Space: s.ID(), Requested: s.Charge(l.bytes) * count, Available: s.Available()}
		}
		v, ok := s.Pool().(*volumes.Volume)
		if !ok {
			continue
		}
		// The volume's room and a raw file exist together, and need some to spare. Where the free bytes
		// are unknown, allocating finds out.
		if u, err := m.cfg.files().Usage(v.Dir()); err == nil && u.Free/3 < l.total() {
			return &tier.NoSpaceError{Space: s.ID(), Requested: 3 * l.total(), Available: u.Free}
		}
	}
	if own := l.bytes + 2*l.total(); m.cfg.Spare > 0 && own > m.cfg.Spare { // the table, and the regions
		need, have := size.Apart(own, m.cfg.Spare)
		return fmt.Errorf("%s of memory are needed beside the engine's, and %s may be taken", need, have)
	}
	return nil
}

// count adds what measuring one link moves. It mirrors bench.link.
func (m *Measurement) count(k link, l load) {
	rounds, all := int64(m.cfg.Pairs)+1, l.total()
	ours, limit := all+4*rounds*all, 2*4*rounds*all // to where the link begins; four steps a round
	if k.bothWays(l) {
		ours, limit = ours+all/2+2*rounds*all, limit+2*2*rounds*all
	}
	if k.inSpaces() {
		limit += 2 * all // which fills the memory
	}
	ours += all // the comparison, in host memory
	m.Ours, m.Limit = m.Ours+ours, m.Limit+limit
	if k.limit == diskIO {
		m.Disk += ours + limit
	}
}

// Run measures, and returns rows ordered by size, threads and edge. It ends soon after ctx does,
// with the cause of that.
func (m *Measurement) Run(ctx context.Context) (rows []report.BandwidthRow, err error) {
	if len(m.loads) == 0 || len(m.links) == 0 {
		return m.missing, nil
	}
	largest := int64(0)
	for _, l := range m.loads {
		largest = max(largest, l.total())
	}
	room, err := newRegions(ctx, m.cfg.Seed, largest)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, room.close()) }()
	rows = slices.Clone(m.missing)
	for _, l := range m.loads {
		more, err := m.runLoad(ctx, l, room)
		if err != nil {
			return nil, err
		}
		rows = append(rows, more...)
	}
	return rows, nil
}

// runLoad puts the batches of one load, measures every link with them, and drops them.
func (m *Measurement) runLoad(ctx context.Context, l load, room *regions) (rows []report.BandwidthRow, err error) {
	m.cfg.Progress.Begin("making a table of "+size.Format(l.bytes), 0)
	rec, err := record(ctx, m.cfg.Seed, l.bytes)
	if err != nil {
		return nil, err
	}
	defer rec.Release()
	runtime.GC() // so that the garbage of making the table is not collected while something is timed
	b := bench{cfg: &m.cfg, load: l, room: room}
	// The batches are dropped although ctx has ended. If the monitor has begun to move one before it was
	// subscribed to, that waits for the move.
	defer func() {
		for _, x := range b.batches {
			err = errors.Join(err, x.Discard(context.WithoutCancel(ctx)))
		}
	}()
	for range l.threads {
		p, err := m.cfg.Engine.Mover().Ingest(ctx, rec, reservation.AnyInTier(tier.Host))
		if err != nil {
			return nil, err
		}
		x, err := m.cfg.Engine.NewBatch(p)
		if err != nil {
			return nil, err
		}
		b.batches = append(b.batches, x)
		x.Subscribe() // so that the monitor does not move it
	}
	for _, k := range m.links {
		more, err := b.link(ctx, k)
		if err == nil {
			err = b.verify(ctx, rec)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", b.name(k), err)
		}
		rows = append(rows, more...)
	}
	return rows, nil
}
