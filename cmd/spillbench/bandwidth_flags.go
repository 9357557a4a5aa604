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
	sizes           sizesFlag // empty: by the extent
	threads         []int     // empty: by the extent
	pairs           int
	seed            uint64
	between         kindsFlag
	quick, thorough bool
}

// extent is how much bandwidth measures.
type extent string

// The extents.
const (
	quick    extent = "quick"    // the default: a number in seconds
	thorough extent = "thorough" // large batches, several at once, all spaces: minutes
	ownSizes extent = "sizes"    // what --sizes says
)

// A quick measurement moves at most so many bytes, ours and the limit's: quickMost in memory and on disk,
// and quickDisk of them to and from the disk. It ends within ten seconds where a disk passes 100 MiB/s,
// with two of them for all else. The default takes 657 MiB of the disk.
const (
	quickMost = 1 << 30
	quickDisk = 800 << 20
)

var (
	quickSizes    = sizesFlag{256 << 10, 2 << 20}
	thoroughSizes = sizesFlag{1 << 20, 16 << 20, 64 << 20, 256 << 20}
)

// register adds the flags that are bandwidth's own.
func (f *bandwidthFlags) register(fs *pflag.FlagSet) {
	fs.BoolVar(&f.quick, "quick", false, "measure two sizes, one move at a time, one space of each kind: at most "+size.Format(quickMost)+" are moved, of them "+size.Format(quickDisk)+" on the disk (default)")
	fs.BoolVar(&f.thorough, "thorough", false, "measure sizes to 256MiB, one and two moves at a time, all spaces: takes minutes, and moves some 280 GiB to and from each disk")
	fs.Var(&f.sizes, "sizes", fmt.Sprintf("`SIZES` of the batches, with commas between, in the place of %s (quick) or %s (thorough, as far as there is room)", &quickSizes, &thoroughSizes))
	fs.IntSliceVar(&f.threads, "threads", nil, "how many batches move at the same time, as `NUMBERS` with commas between, in the place of 1 (quick) or 1,2")
	fs.IntVar(&f.pairs, "pairs", minPairs, "pairs of a move and its limit for each figure")
	fs.Uint64Var(&f.seed, "seed", 1, "seed of the generated table")
	fs.Var(&f.between, "between", "measure only edges between these `KINDS` of spaces, such as gpu,host (default all)")
}

// extent is what the flags ask for.
func (f *bandwidthFlags) extent() extent {
	switch {
	case len(f.sizes) > 0:
		return ownSizes
	case f.thorough:
		return thorough
	}
	return quick
}

// loads are the sizes and numbers of moves that the flags ask for, those of quick not yet cut.
func (f *bandwidthFlags) loads() (sizes sizesFlag, threads []int) {
	sizes, threads = f.sizes, f.threads
	if len(threads) == 0 {
		threads = []int{1, 2}
		if f.extent() == quick {
			threads = []int{1}
		}
	}
	switch f.extent() {
	case quick:
		sizes = quickSizes
	case thorough:
		sizes = thoroughSizes
	}
	return slices.Clone(sizes), threads
}

// cut makes the largest batches of a quick measurement smaller until it moves at most quickMost and
// quickDisk: more kinds of edges, pairs or moves at a time need more. It returns what is moved then.
func (f *bandwidthFlags) cut(cfg *bandwidth.Config) (planned bandwidth.Planned, err error) {
	for {
		planned, err = bandwidth.Plan(*cfg)
		if err != nil {
			return planned, err
		}
		last := len(cfg.Sizes) - 1
		small := planned.Ours+planned.Limit <= quickMost && planned.Disk <= quickDisk
		if f.extent() != quick || small || cfg.Sizes[last] == bandwidth.SmallestBatch {
			cfg.Sizes = slices.Compact(cfg.Sizes)
			return planned, nil
		}
		cfg.Sizes[last] = max(bandwidth.SmallestBatch, cfg.Sizes[last]/2)
		cfg.Sizes[0] = min(cfg.Sizes[0], cfg.Sizes[last])
	}
}

func (f *bandwidthFlags) validate() error {
	switch {
	case f.quick && f.thorough:
		return fail.Usagef("--quick and --thorough exclude each other (give one of them)")
	case f.quick && len(f.sizes) > 0:
		return fail.Usagef("--quick has sizes of its own (leave out --quick or --sizes)")
	}
	if f.pairs < minPairs || f.pairs > maxPairs {
		return fail.Usagef("--pairs %d is out of range (want %d to %d)", f.pairs, minPairs, maxPairs)
	}
	for _, n := range f.threads {
		if n < 1 || n > maxMoves {
			return fail.Usagef("--threads %d is out of range (want 1 to %d)", n, maxMoves)
		}
	}
	for _, n := range f.sizes {
		if n < bandwidth.SmallestBatch || n > bandwidth.LargestBatch || n%tier.Page != 0 {
			return fail.Usagef("--sizes %s is out of range (want multiples of 4KiB from %s to %s)",
				size.Format(n), size.Format(bandwidth.SmallestBatch), size.Format(bandwidth.LargestBatch))
		}
	}
	if sizes, threads := f.loads(); len(sizes)*len(threads) > maxLoads {
		return fail.Usagef("--sizes and --threads name %d combinations (want at most %d)", len(sizes)*len(threads), maxLoads)
	}
	return f.engine.validate()
}

// kindsFlag is the value of --between.
type kindsFlag []tier.Kind

// Set takes kinds of spaces with commas between them, in the place of those before.
func (k *kindsFlag) Set(text string) error {
	var all []tier.Kind
	for part := range strings.SplitSeq(text, ",") {
		kind, err := tier.ParseKind(part)
		if err != nil {
			return errors.New(strings.TrimPrefix(err.Error(), "tier: "))
		}
		all = append(all, kind)
	}
	*k = all
	return nil
}

// String prints what Set takes.
func (k *kindsFlag) String() string {
	var parts []string
	for _, kind := range *k {
		parts = append(parts, kind.String())
	}
	return strings.Join(parts, ",")
}

// Type names the value in a usage text.
func (*kindsFlag) Type() string { return "kinds" }

// sizesFlag is the value of --sizes.
type sizesFlag []int64

// Set takes sizes with commas between them, in the place of those before.
func (s *sizesFlag) Set(text string) error {
	var all []int64
	for part := range strings.SplitSeq(text, ",") {
		n, err := size.Parse(part)
		if err != nil {
			return err
		}
		all = append(all, n)
	}
	*s = all
	return nil
}

// String prints what Set takes.
func (s *sizesFlag) String() string {
	var parts []string
	for _, n := range *s {
		parts = append(parts, size.Format(n))
	}
	return strings.Join(parts, ",")
}

// Type names the value in a usage text.
func (*sizesFlag) Type() string { return "sizes" }
