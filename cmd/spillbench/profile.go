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

// profileFlags are the files into which Go's runtime writes what the command does. Every command
// has them. They are for `go tool pprof` and `go tool trace`.
type profileFlags struct {
	cpu, memory, trace string

	ends []func() error
}

func (p *profileFlags) register(root *cobra.Command) {
	f := root.PersistentFlags()
	f.StringVar(&p.cpu, "cpuprofile", "", "write where processor time goes to `FILE`, for go tool pprof")
	f.StringVar(&p.memory, "memprofile", "", "write what the heap was allocated for to `FILE`, for go tool pprof")
	f.StringVar(&p.trace, "trace", "", "write what goroutines did when to `FILE`, for go tool trace")
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error {
		for _, name := range []string{"cpuprofile", "memprofile", "trace"} {
			if g := cmd.Flags().Lookup(name); g.Changed && g.Value.String() == "" {
				return fail.Usagef("--%s: want FILE", name)
			}
		}
		return p.start()
	}
}

// start makes the files and begins to write what is written as it happens.
func (p *profileFlags) start() error {
	return errors.Join(
		p.begin("cpuprofile", p.cpu, pprof.StartCPUProfile, func(io.Writer) error { pprof.StopCPUProfile(); return nil }),
		p.begin("trace", p.trace, trace.Start, func(io.Writer) error { trace.Stop(); return nil }),
		p.begin("memprofile", p.memory, func(io.Writer) error { return nil }, func(w io.Writer) error {
			runtime.GC() // the profile is of the last collection
			return pprof.Lookup("allocs").WriteTo(w, 0)
		}))
}

// begin makes one file, if it has a name, and notes how it is finished.
func (p *profileFlags) begin(flag, name string, start, end func(io.Writer) error) error {
	if name == "" {
		return nil
	}
	f, err := os.Create(name)
	if err != nil {
		return fail.Usagef("--%s: %w", flag, err)
	}
	w := &remembering{w: f}
	if err := start(w); err != nil {
		return errors.Join(fail.Usagef("--%s: %w", flag, err), f.Close())
	}
	p.ends = append(p.ends, func() error {
		err := end(w)
		if err = errors.Join(cmp.Or(w.err, err), f.Close()); err != nil {
			return fail.Environmentf("--%s: %w", flag, err)
		}
		return nil
	})
	return nil
}

// remembering keeps the first error of its writer: what Go's runtime writes profiles with drops it.
// It is read when writing has ended.
type remembering struct {
	w   io.Writer
	err error
}

func (r *remembering) Write(p []byte) (int, error) {
	n, err := r.w.Write(p)
	r.err = cmp.Or(r.err, err)
	return n, err
}

// stop finishes the files.
func (p *profileFlags) stop() error {
	var errs []error
	for _, end := range p.ends {
		errs = append(errs, end())
	}
	p.ends = nil
	return errors.Join(errs...)
}
