package main

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"

	"github.com/spf13/pflag"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/gen"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/input"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/job"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
)

const (
	// generatedTimes is how many times the memories of the engine together the
	// generated table is: most of it is on disk then, and all tiers work.
	generatedTimes = 3
	// A generated batch has a size within bounds that suit any disk.
	smallestGenerated = 64 << 10
	largestGenerated  = 16 << 20
)

// Bounds of flags: far more than is useful, far less than would overflow.
const (
	maxWorkers = 4096
	maxRows    = 1 << 31
)

// inputFlags are the flags of run and compare for the data that goes through the memories, and
// for the number of goroutines that move it.
type inputFlags struct {
	files        []string
	repeat       int
	rowsPerBatch int
	workers      int
	seed         uint64
	again        bool // the command reads the files more than once and so refuses pipes
}

// register registers the flags that say what is put. do is what the command does with
// it, and memories are those that a generated table is larger than.
func (f *inputFlags) register(fs *pflag.FlagSet, do, memories string) {
	fs.StringArrayVar(&f.files, "input", nil, "Parquet, Arrow or CSV `FILE` to "+do+
		" (repeatable); without one a table is generated, three times as large as "+memories)
	intVar(fs, &f.repeat, "repeat", 1, 1, 1_000_000, do+" every batch `N` times, as batches of their own")
	intVar(fs, &f.rowsPerBatch, "rows-per-batch", 0, 0, maxRows,
		"cut the input into batches of `N` rows (default as the files have them)")
}

func (f *inputFlags) registerWorkers(fs *pflag.FlagSet, usage string) {
	intVar(fs, &f.workers, "workers", defaultWorkers(), 1, maxWorkers, usage)
}

// defaultWorkers returns twice the number of processors: half of the workers wait for room or for a move
// while the others compute.
func defaultWorkers() int { return min(maxWorkers, 2*runtime.GOMAXPROCS(0)) }

func (f *inputFlags) registerSeed(fs *pflag.FlagSet) {
	fs.Uint64Var(&f.seed, "seed", 1, "seed of the generated table")
}

func (f *inputFlags) validate() error {
	for _, path := range f.files { // before anything is done with the first of them
		if path == "" {
			return fail.Usagef("an input has no name: want FILE (give it as an argument or with --input)")
		}
		if err := input.Check(path, !f.again); err != nil {
			return err
		}
	}
	return stdinOnce(f.files)
}

// sources returns the inputs, their names, and the number of batches, or 0 if it is not known. A
// generated batch has batchBytes bytes, within the bounds of generated batches.
func (f *inputFlags) sources(m *machine, batchBytes int64) (inputs []job.Input, names []string, batches int64) {
	if len(f.files) == 0 {
		cfg := f.table(m.config.GPUMemoryBytes+m.config.HostMemoryBytes, batchBytes)
		name := fmt.Sprintf(report.Generated+" (seed %d)", f.seed)
		first := sync.OnceValues(func() (*gen.Table, error) { return gen.New(cfg) })
		open := func(context.Context) (job.Source, error) {
			table, err := first()
			if err != nil {
				return nil, err
			}
			return generated{table.Again()}, nil
		}
		batches = (cfg.Rows + cfg.RowsPerBatch - 1) / cfg.RowsPerBatch * int64(f.repeat)
		return []job.Input{{Name: name, Open: open}}, []string{name}, batches
	}
	for _, path := range f.files {
		opt := m.reading(int64(f.rowsPerBatch))
		open := func(ctx context.Context) (job.Source, error) { return input.Open(ctx, path, opt) }
		inputs = append(inputs, job.Input{Name: input.Name(path), Open: open})
		names = append(names, input.Name(path))
	}
	return inputs, names, 0
}

// stdinOnce refuses a list of files with standard input in it twice.
func stdinOnce(paths []string) error {
	if first := slices.Index(paths, "-"); first >= 0 && slices.Contains(paths[first+1:], "-") {
		return fail.Usagef("standard input can be read once (give - once, and files)")
	}
	return nil
}

// generated is a table that several goroutines can make.
type generated struct{ *gen.Table }

func (g generated) Part(number, of int64) job.Source { return g.Table.Part(number, of) }

// reading says how to read a file in batches of so many rows.
func (m *machine) reading(rowsPerBatch int64) input.Options {
	return input.Options{RowsPerBatch: rowsPerBatch, MaxAlloc: m.plan.Heap, Room: m.plan.Admit}
}

// table sizes the generated table by the memories that it is to overflow.
func (f *inputFlags) table(memory, batchBytes int64) gen.Config {
	rows := int64(f.rowsPerBatch)
	if rows == 0 {
		rows = min(max(batchBytes, smallestGenerated), largestGenerated) / gen.RowBytes
	}
	return gen.Config{Seed: f.seed, Rows: generatedTimes * memory / gen.RowBytes, RowsPerBatch: rows}
}
