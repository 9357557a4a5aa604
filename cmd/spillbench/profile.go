package main

import (
	"bufio"
	"cmp"
	"errors"
	"io"
	"os"
	"runtime"
	"runtime/pprof"
	"runtime/trace"

	"github.com/spf13/cobra"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
)

// profileFlags are the files for the profiles of Go's runtime, which go tool pprof and go tool trace
// read. Every command has them.
type profileFlags struct {
	cpu, memory, trace string

	stops []func() error // finish the files that start began
}

func (p *profileFlags) register(root *cobra.Command) {
	f := root.PersistentFlags()
	f.Var(&valueFlag{&p.cpu, "FILE"}, "cpuprofile", "write a CPU profile to `FILE`, for go tool pprof (default none)")
	f.Var(&valueFlag{&p.memory, "FILE"}, "memprofile",
		"write a profile of heap allocations to `FILE`, for go tool pprof (default none)")
	f.Var(&valueFlag{&p.trace, "FILE"}, "trace", "write an execution trace to `FILE`, for go tool trace (default none)")
}

// start creates the files and begins to profile.
func (p *profileFlags) start() error {
	return cmp.Or(
		p.begin("cpuprofile", p.cpu, pprof.StartCPUProfile, func(io.Writer) error { pprof.StopCPUProfile(); return nil }),
		p.begin("trace", p.trace, trace.Start, func(io.Writer) error { trace.Stop(); return nil }),
		p.begin("memprofile", p.memory, func(io.Writer) error { return nil }, func(w io.Writer) error {
			runtime.GC() // the profile is that of the last collection
			return pprof.Lookup("allocs").WriteTo(w, 0)
		}),
	)
}

// begin creates the file of one profile, unless name is empty, and begins to write it.
func (p *profileFlags) begin(flag, name string, start, stop func(io.Writer) error) error {
	if name == "" {
		return nil
	}
	f, err := os.Create(name)
	if err != nil {
		return fail.Usagef("--%s: %w", flag, err)
	}
	w := bufio.NewWriter(f) // keeps the first error of a write, which Go's runtime drops
	if err := start(w); err != nil {
		return errors.Join(fail.Usagef("--%s: %w", flag, err), f.Close())
	}
	p.stops = append(p.stops, func() error {
		if err := cmp.Or(stop(w), w.Flush(), f.Close()); err != nil {
			return fail.Environmentf("--%s: %w", flag, err)
		}
		return nil
	})
	return nil
}

// stop finishes the files.
func (p *profileFlags) stop() error {
	var errs []error
	for _, stop := range p.stops {
		errs = append(errs, stop())
	}
	return errors.Join(errs...)
}
