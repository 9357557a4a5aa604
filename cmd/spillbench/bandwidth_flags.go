package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/bandwidth"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/tier"
)

// bandwidthFlags are the flags of bandwidth.
type bandwidthFlags struct {
	output          outputFlags
	engine          engineFlags
	sizes           []int64 // nil: those of the extent
	threads         []int   // nil: those of the extent
	pairs           int
	seed            uint64
	between         []tier.Kind
	quick, thorough bool
}

// The extents: how much bandwidth measures.
const (
	quick    = "quick"    // the default: a number in seconds
	thorough = "thorough" // large batches, several at once, all spaces: minutes
	ownSizes = "sizes"    // those of --sizes
)

// A quick measurement moves at most quickMost bytes in memory and on disk, ours and the limit's, and
// quickDisk of them to and from the disk. On a disk of 100 MiB/s it ends within ten seconds, of which
// two are for all else.
const (
	quickMost = 1 << 30
	quickDisk = 800 << 20
)

const (
	// Fewer pairs than eleven do not distinguish a difference from noise.
	minPairs = 11
	maxPairs = 10_000
	maxMoves = 64
	maxLoads = 64
)

var (
	quickSizes    = []int64{256 << 10, 2 << 20}
	thoroughSizes = []int64{1 << 20, 16 << 20, 64 << 20, 256 << 20}
)

// register adds the flags that only bandwidth has.
func (f *bandwidthFlags) register(fs *pflag.FlagSet) {
	fs.BoolVar(&f.quick, "quick", false, "measure two sizes, one move at a time, one pair of spaces of each kind: "+
		"at most "+size.Format(quickMost)+" are moved, of them "+size.Format(quickDisk)+" on the disk (default)")
	fs.BoolVar(&f.thorough, "thorough", false, "measure sizes to 256MiB, one and two moves at a time, all spaces: "+
		"takes minutes, and moves some 280 GiB to and from each disk")
	fs.Func("sizes", "`SIZES` of the batches, with commas between, instead of "+listed(quickSizes, size.Format)+
		" (quick) or "+listed(thoroughSizes, size.Format)+" (thorough, as far as there is room)",
		func(text string) (err error) {
			f.sizes, err = parseList(text, size.Parse)
			return err
		})
	fs.IntSliceVar(&f.threads, "threads", nil,
		"how many batches move at the same time, as `NUMBERS` with commas between, instead of 1 (quick) or 1,2")
	fs.IntVar(&f.pairs, "pairs", minPairs, "pairs of a move and its limit for each figure")
	fs.Uint64Var(&f.seed, "seed", 1, "seed of the generated table")
	fs.Func("between", "measure only edges between these `KINDS` of spaces, such as gpu,host, or gpu,gpu (default all)",
		func(text string) (err error) {
			f.between, err = parseList(text, tier.ParseKind)
			return err
		})
}

// parseList parses values with commas between them.
func parseList[T any](text string, parse func(string) (T, error)) (all []T, err error) {
	for part := range strings.SplitSeq(text, ",") {
		v, err := parse(part)
		if err != nil {
			return nil, errors.New(strings.TrimPrefix(err.Error(), "tier: "))
		}
		all = append(all, v)
	}
	return all, nil
}

// listed formats what parseList parses.
func listed[T any](all []T, format func(T) string) string {
	var parts []string
	for _, v := range all {
		parts = append(parts, format(v))
	}
	return strings.Join(parts, ",")
}

// extent returns what the flags ask for, and its sizes and numbers of moves.
func (f *bandwidthFlags) extent() (name string, sizes []int64, threads []int) {
	name, sizes, threads = quick, quickSizes, []int{1, 2}
	switch {
	case len(f.sizes) > 0:
		name, sizes = ownSizes, f.sizes
	case f.thorough:
		name, sizes = thorough, thoroughSizes
	default:
		threads = threads[:1]
	}
	if len(f.threads) > 0 {
		threads = f.threads
	}
	return name, slices.Clone(sizes), threads
}

func (f *bandwidthFlags) validate() error {
	_, sizes, threads := f.extent()
	loads := len(sizes) * len(threads)
	switch {
	case f.quick && f.thorough:
		return fail.Usagef("--quick and --thorough exclude each other (give one of them)")
	case f.quick && len(f.sizes) > 0:
		return fail.Usagef("--quick has sizes of its own (leave out --quick or --sizes)")
	case f.pairs < minPairs || f.pairs > maxPairs:
		return fail.Usagef("--pairs %d is out of range (want %d to %d)", f.pairs, minPairs, maxPairs)
	case loads > maxLoads:
		return fail.Usagef("--sizes and --threads name %d combinations (want at most %d)", loads, maxLoads)
	}
	for _, n := range threads {
		if n < 1 || n > maxMoves {
			return fail.Usagef("--threads %d is out of range (want 1 to %d)", n, maxMoves)
		}
	}
	for _, n := range sizes {
		if n < bandwidth.SmallestBatch || n > bandwidth.LargestBatch || n%tier.Page != 0 {
			return fail.Usagef("--sizes %s is out of range (want multiples of 4KiB from %s to %s)",
				size.Format(n), size.Format(bandwidth.SmallestBatch), size.Format(bandwidth.LargestBatch))
		}
	}
	return f.engine.validate()
}

// plan plans the measurement. The largest batches of a quick one become smaller until it moves at most
// quickMost and quickDisk: more edges, pairs or moves at a time need more. Sizes and numbers of moves
// that were asked for must fit; of the defaults those that do not are left out.
func (f *bandwidthFlags) plan(cfg *bandwidth.Config) (*bandwidth.Measurement, error) {
	name, sizes, threads := f.extent()
	cfg.Sizes, cfg.Threads = sizes, threads
	for {
		m, err := bandwidth.New(*cfg)
		if errors.Is(err, bandwidth.ErrNoEdges) {
			return nil, &fail.Error{Status: fail.Usage, Fix: "name more kinds of spaces, such as --between gpu,host",
				Err: fmt.Errorf("--between %s: %w", listed(f.between, tier.Kind.String), err)}
		}
		if err != nil {
			return nil, err
		}
		asked := name == ownSizes || len(f.threads) > 0
		if n := len(m.Skipped); n > 0 && (asked || n == len(sizes)*len(threads)) {
			return nil, &fail.Error{Status: fail.Usage, Err: m.Skipped[0], Fix: "choose smaller --sizes or fewer --threads, " +
				"or raise --gpu-memory, --host-memory or the size of --disk"}
		}
		last := &cfg.Sizes[len(cfg.Sizes)-1]
		small := m.Ours+m.Limit <= quickMost && m.Disk <= quickDisk
		if name != quick || small || *last == bandwidth.SmallestBatch {
			return m, nil
		}
		*last = max(bandwidth.SmallestBatch, *last/2)
		if len(cfg.Sizes) > 1 && cfg.Sizes[0] >= *last {
			cfg.Sizes = cfg.Sizes[1:]
		}
	}
}
