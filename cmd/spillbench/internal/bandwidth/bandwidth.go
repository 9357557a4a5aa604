// Package bandwidth is what spillbench bandwidth does: it times an engine's moves
// along every edge, each next to what the machine can do without the engine.
//
//	Run ── a size ── a number of moves at once ── a pair of spaces
//	                                                      │
//	                                                      ▼
//	     round 0   ours · raw · raw'      is not counted
//	     round 1   ours · raw · raw'      ours ÷ raw  is the efficiency
//	     round 2   raw · ours · raw'      raw ÷ raw'  is the noise
//	     …           └── a turn: there, back, there, back
//
// Ours are moves of whole batches by Mover.Move, with all that belongs to them. Raw depends on the
// edge:
//
//   - Between memories it is memmove between two regions of huge pages that are present.
//   - Between host memory and a GPU that a driver serves it is one asynchronous copy, between
//     memory of the same spaces as the batches'.
//   - With a disk it is direct I/O in requests of 1 MiB, 8 at once, on room in the same state:
//     fresh room was allocated and never written, rewritten room has been written before.
//
// Both carry as many bytes in as many threads. Which of them is first changes from round to round.
// Raw runs twice in each, to show how much two equal things differ here.
//
// One place on a disk may be twice as fast as another. So raw uses the file of the measured volume
// ([Watch]), in room that it holds for as long, while the engine has nothing there. Fresh room is
// made anew for each side, as the volume makes it. Rewritten room is written and read by all sides
// at one place, another in each round. Raw cannot use that file if a load takes several files, or
// if the disk is compressed, slowed down or has faults. It then has files of its own, made for each
// turn as our room is.
//
// Between memories an untimed transfer of the same side in the opposite direction precedes each
// timed one. So both sides find their bytes as near or far. A driver's copies are not the
// processors', so both directions are timed. There an even number of moves is also timed with one
// half in each direction at once. A move may use more processors than one, so its efficiency may be
// above 1.
//
// Run owns the goroutines that it starts, and all it takes: regions are unmapped and files
// closed when it returns, and the files have no names. The package takes no locks.
package bandwidth

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// Bounds of what can be measured. The smallest batch holds a few hundred rows; the
// offsets of text in the largest fit their 32 bits.
const (
	SmallestBatch = 64 << 10
	LargestBatch  = 8 << 30
)

// State is what the room on a disk was before it was written.
type State string

// The states.
const (
	Memory    State = ""          // there is no disk in it
	Fresh     State = "fresh"     // allocated, and never written
	Rewritten State = "rewritten" // written before; what is read always was
)

// LimitOf says what raw is.
type LimitOf string

// What raw is.
const (
	Memmove        LimitOf = "memmove"
	CopyOfDriver   LimitOf = "driver's copy" // one asynchronous copy to or from pinned memory of the same spaces
	RequestsOfDisk LimitOf = "disk I/O"
)

// Config says what is measured. Engine, Sizes, Threads and Pairs are required. The engine
// must be idle, and nothing else may use it while Run does.
type Config struct {
	Engine  *spillway.Engine
	Sizes   []int64 // of a batch, in bytes: multiples of 4096
	Threads []int   // how many batches move at the same time
	Pairs   int     // of ours and raw, for each figure
	// Between are the kinds of spaces that are measured; nil: all.
	Between []tier.Kind
	// OneOfEach measures the first pair of spaces of each pair of kinds only: one GPU and one disk,
	// not each GPU and each disk.
	OneOfEach bool
	Seed      uint64 // of the table that batches are of
	// Spare is how many bytes of memory may be taken beside the engine's, for the table
	// and the regions; 0: as many as are needed.
	Spare int64
	// Files returns the file system of one more raw file, which must be as fast as the
	// volumes' is, where that is not the machine's own; it may be nil, and return nil.
	Files func() disk.FS
	// Watched are the file systems of volumes, for the limit to be measured where batches lie; of
	// those that are missing it is measured on files of its own.
	Watched  map[tier.ID]*Watch
	Progress Progress // may be nil
}

// Progress is called as the measurement advances.
type Progress interface {
	Begin(phase string, steps int64)
	Step()
}

type silent struct{}

func (silent) Begin(string, int64) {}
func (silent) Step()               {}

// Row is one edge at one size, so many moves at a time. Rates are medians in GiB/s, of all
// moves together.
type Row struct {
	From, To   tier.ID
	Bytes      int64 // of each batch
	Threads    int
	State      State
	LimitOf    LimitOf
	GiBPerS    float64
	Limit      float64 // of raw
	Efficiency float64 // median of the pairs' ratios, ours by raw
	Noise      float64 // median of how far raw by raw is from 1
	CV         float64 // coefficient of variation of our rates
	Samples    Samples // what the figures were made of
	// BothWays says that one half of the moves went from From to To, and the other in the opposite
	// direction at the same time. Gain is how many times as fast that was as one half after the
	// other, and LimitGain that of raw.
	BothWays        bool
	Gain, LimitGain float64
	Err             error // why nothing was measured: a *convert.NoConverterError; then the figures are 0
}

// Samples are rates in GiB/s, one a pair in the order in which they were measured: ours, the limit's
// beside it, and the limit's once more, which shows its noise.
type Samples struct{ Ours, Limit, Again []float64 }

// Skip is what was left out because there is no room for it.
type Skip struct {
	Bytes   int64
	Threads int
	Err     error
}

func (s Skip) Error() string {
	return fmt.Sprintf("%d × %s at once: there is no room: %v", s.Threads, size.Format(s.Bytes), s.Err)
}

// Unwrap returns what lacks: a *tier.NoSpaceError, if it is a space that is too small.
func (s Skip) Unwrap() error { return s.Err }

// ErrNoEdges reports that there is no pair of spaces to measure. The error that wraps it names the
// spaces that there are.
var ErrNoEdges = errors.New("there is nothing to measure")

func (c Config) validate() error {
	if c.Engine == nil || len(c.Sizes) == 0 || len(c.Threads) == 0 || c.Pairs < 1 {
		return errors.New("bandwidth: an engine, sizes, threads and pairs are required")
	}
	for _, n := range c.Sizes {
		if n < SmallestBatch || n > LargestBatch || n%tier.Page != 0 {
			return fmt.Errorf("bandwidth: batches of %d bytes: want a multiple of %d from %d to %d",
				n, int64(tier.Page), int64(SmallestBatch), int64(LargestBatch))
		}
	}
	if n := slices.Min(c.Threads); n < 1 {
		return fmt.Errorf("bandwidth: %d moves at once", n)
	}
	return nil
}

// load is a size and how many of it move at a time.
type load struct {
	bytes   int64
	threads int
}

func (l load) total() int64 { return l.bytes * int64(l.threads) }

// Fit returns what Run would leave out. Without any pair of spaces to measure it returns an
// ErrNoEdges.
func Fit(cfg Config) ([]Skip, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if links, missing := cfg.within(linksOf(cfg.Engine)); len(links)+len(missing) == 0 {
		return nil, cfg.noEdges()
	}
	_, skipped, err := cfg.fit()
	return skipped, err
}

// fit splits the requested loads into those with room and those without.
func (c Config) fit() (loads []load, skipped []Skip, err error) {
	for _, bytes := range c.Sizes {
		for _, n := range c.Threads {
			l := load{bytes, n}
			lacks, err := c.lacks(l)
			if err != nil {
				return nil, nil, err
			}
			if lacks != nil {
				skipped = append(skipped, Skip{bytes, n, lacks})
			} else {
				loads = append(loads, l)
			}
		}
	}
	return loads, skipped, nil
}

// lacks says what a load needs more of; nil if it fits.
func (c Config) lacks(l load) (error, error) {
	times := int64(1)
	if anyDriven(c.Engine) {
		times = 2 // what raw copies lies in the same spaces
	}
	for _, s := range c.Engine.Spaces() {
		count := int64(l.threads)
		if s.Kind() != tier.Disk {
			count *= times
		}
		if l.bytes > s.Capacity()/count || s.Charge(l.bytes)*count > s.Available() {
			return &tier.NoSpaceError{Space: s.ID(), Requested: s.Charge(l.bytes) * count, Available: s.Available()}, nil
		}
		v, ok := s.Pool().(*volumes.Volume)
		if !ok {
			continue
		}
		files := disk.OS()
		if w := c.Watched[s.ID()]; w != nil {
			files = w
		}
		u, err := files.Usage(v.Dir())
		switch {
		case errors.Is(err, errors.ErrUnsupported): // then it is noticed when it is taken
		case err != nil:
			return nil, err
		case u.Free/3 < l.total(): // for a spill file of the engine's, and two of ours
			return &tier.NoSpaceError{Space: s.ID(), Requested: 3 * l.total(), Available: u.Free}, nil
		}
	}
	if own := l.bytes + 2*l.total(); c.Spare > 0 && own > c.Spare { // the record, and the regions
		need, have := size.Apart(own, c.Spare)
		return fmt.Errorf("%s of memory are needed beside the engine's, and %s may be taken", need, have), nil
	}
	return nil, nil
}

// Run measures what there is room for, ordered by size, threads and edge, and returns
// what was left out, too. It ends soon after ctx does, with its cause.
func Run(ctx context.Context, cfg Config) (rows []Row, skipped []Skip, err error) {
	if cfg.Progress == nil {
		cfg.Progress = silent{}
	}
	if err := cfg.validate(); err != nil {
		return nil, nil, err
	}
	loads, skipped, err := cfg.fit()
	if err != nil {
		return nil, nil, err
	}
	links, missing := cfg.within(linksOf(cfg.Engine))
	rows = missing
	if len(loads) == 0 || len(links) == 0 {
		return rows, skipped, nil
	}
	most := int64(0)
	for _, l := range loads {
		most = max(most, l.total())
	}
	room, err := newRegions(ctx, cfg.Seed, most)
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, room.close()) }()
	for len(loads) > 0 {
		same := 1 // loads of one size need the table only once
		for same < len(loads) && loads[same].bytes == loads[0].bytes {
			same++
		}
		more, err := cfg.bySize(ctx, loads[:same], links, room)
		if err != nil {
			return nil, nil, err
		}
		rows = append(rows, more...)
		loads = loads[same:]
	}
	return rows, skipped, nil
}

// bySize measures loads of one size.
func (c Config) bySize(ctx context.Context, loads []load, links []link, room *regions) (rows []Row, err error) {
	c.Progress.Begin("making a table of "+size.Format(loads[0].bytes), 0)
	rec, err := record(ctx, c.Seed, loads[0].bytes)
	if err != nil {
		return nil, err
	}
	defer rec.Release()
	runtime.GC() // what making it left must not be collected while something is timed
	for _, l := range loads {
		more, err := c.byLoad(ctx, l, rec, links, room)
		if err != nil {
			return nil, fmt.Errorf("%d × %s at once: %w", l.threads, size.Format(l.bytes), err)
		}
		rows = append(rows, more...)
	}
	return rows, nil
}
