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
	// generatedTimes is the size of the generated table, in sizes of all memories of the engine. Most
	// of the table is on disk then, and all tiers are in use.
	generatedTimes = 3
	// The bounds of the size of a generated batch, in bytes, which suit any disk.
	smallestGenerated = 64 << 10
	largestGenerated  = 16 << 20
)

// Bounds of flags, far above useful values and far below overflows.
const (
	maxWorkers = 4096
	maxRows    = 1 << 31
)

// inputFlags are the flags of run and compare for the data that moves through the memories, and for the
// number of goroutines that move it.
type inputFlags struct {
	files        []string
	repeat       int
	rowsPerBatch int
	workers      int
	seed         uint64
	again        bool // the command reads the files more than once and so refuses pipes
}

// register adds the flags for the data. In their usage, do is the verb for what the command does with
// it, and memories are those that a generated table exceeds.
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

// defaultWorkers returns twice the number of processors: while half of the workers compute, the others
// wait for room or for a move.
func defaultWorkers() int { return min(maxWorkers, 2*runtime.GOMAXPROCS(0)) }

func (f *inputFlags) registerSeed(fs *pflag.FlagSet) {
	fs.Uint64Var(&f.seed, "seed", 1, "seed of the generated table")
}

func (f *inputFlags) validate() error {
	for _, path := range f.files { // all of them, before the work on the first
		if path == "" {
			return fail.Usagef("an input has no name: want FILE (give it as an argument or with --input)")
		}
		if err := input.Check(path, !f.again); err != nil {
			return err
		}
	}
	return nil
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

// stdinOnce returns an error if a list of files has standard input twice.
func stdinOnce(paths []string) error {
	if first := slices.Index(paths, "-"); first >= 0 && slices.Contains(paths[first+1:], "-") {
		return fail.Usagef("standard input can be read once (give - once, and files)")
	}
	return nil
}

// generated is a table as a job.Divided.
type generated struct{ *gen.Table }

func (g generated) Part(number, of int64) job.Source { return g.Table.Part(number, of) }

// reading returns the options to read a file in batches of a number of rows; 0: as in the file.
func (m *machine) reading(rowsPerBatch int64) input.Options {
	return input.Options{RowsPerBatch: rowsPerBatch, MaxAlloc: m.plan.Heap, Room: m.plan.Admit}
}

// table returns the configuration of a generated table that exceeds memory bytes. Its batches have
// about batchBytes, within the bounds.
func (f *inputFlags) table(memory, batchBytes int64) gen.Config {
	rows := int64(f.rowsPerBatch)
	if rows == 0 {
		rows = min(max(batchBytes, smallestGenerated), largestGenerated) / gen.RowBytes
	}
	return gen.Config{Seed: f.seed, Rows: generatedTimes * memory / gen.RowBytes, RowsPerBatch: rows}
}
