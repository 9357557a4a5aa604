package main

import (
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
	f.Var(&valueFlag{&p.cpu, "FILE"}, "cpuprofile", "write a processor profile to `FILE`, for go tool pprof")
	f.Var(&valueFlag{&p.memory, "FILE"}, "memprofile", "write a profile of the heap's allocations to `FILE`, for go tool pprof")
	f.Var(&valueFlag{&p.trace, "FILE"}, "trace", "write what goroutines did when to `FILE`, for go tool trace")
}

// start creates the files and begins to profile.
func (p *profileFlags) start() error {
	for _, profile := range []struct {
		flag, name  string
		start, stop func(io.Writer) error
	}{
		{"cpuprofile", p.cpu, pprof.StartCPUProfile, func(io.Writer) error { pprof.StopCPUProfile(); return nil }},
		{"trace", p.trace, trace.Start, func(io.Writer) error { trace.Stop(); return nil }},
		{"memprofile", p.memory, func(io.Writer) error { return nil }, func(w io.Writer) error {
			runtime.GC() // the profile is that of the last collection
			return pprof.Lookup("allocs").WriteTo(w, 0)
		}},
	} {
		if profile.name == "" {
			continue
		}
		f, err := os.Create(profile.name)
		if err != nil {
			return fail.Usagef("--%s: %w", profile.flag, err)
		}
		w := &remembering{w: f}
		if err := profile.start(w); err != nil {
			return errors.Join(fail.Usagef("--%s: %w", profile.flag, err), f.Close())
		}
		p.stops = append(p.stops, func() error {
			err := profile.stop(w)
			if err = errors.Join(cmp.Or(w.err, err), f.Close()); err != nil {
				return fail.Environmentf("--%s: %w", profile.flag, err)
			}
			return nil
		})
	}
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

// remembering writes to w until a write fails, and keeps that error: Go's runtime and cobra drop the
// errors of their writers.
type remembering struct {
	w   io.Writer
	err error
}

func (r *remembering) Write(p []byte) (int, error) {
	if r.err == nil {
		_, r.err = r.w.Write(p)
	}
	return len(p), nil
}
