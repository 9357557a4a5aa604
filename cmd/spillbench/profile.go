package main

import (
	"bufio"
	"cmp"
	"io"
	"os"
	"runtime"
	"runtime/pprof"
	"runtime/trace"

	"github.com/spf13/cobra"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
)

// profile is a profile of Go's runtime, which go tool pprof or go tool trace reads. Every command has
// a flag for each.
type profile struct {
	flag, usage string
	begin, end  func(io.Writer) error

	path string // "": not asked for
	file *os.File
	w    *bufio.Writer // to file; it keeps the first error of a write, which Go's runtime drops
}

// registerProfiles adds the flags.
func registerProfiles(root *cobra.Command) []*profile {
	all := []*profile{
		{flag: "cpuprofile", usage: "write a CPU profile to `FILE`, for go tool pprof (default none)",
			begin: pprof.StartCPUProfile, end: func(io.Writer) error { pprof.StopCPUProfile(); return nil }},
		{flag: "memprofile", usage: "write a profile of heap allocations to `FILE`, for go tool pprof (default none)",
			begin: func(io.Writer) error { return nil }, end: func(w io.Writer) error {
				runtime.GC() // the profile is that of the last collection
				return pprof.Lookup("allocs").WriteTo(w, 0)
			}},
		{flag: "trace", usage: "write an execution trace to `FILE`, for go tool trace (default none)",
			begin: trace.Start, end: func(io.Writer) error { trace.Stop(); return nil }},
	}
	for _, p := range all {
		root.PersistentFlags().Var(&valueFlag{&p.path, "FILE"}, p.flag, p.usage)
	}
	return all
}

// start creates the file, if there is to be one, and begins to profile.
func (p *profile) start() (err error) {
	if p.path == "" {
		return nil
	}
	if p.file, err = os.Create(p.path); err == nil {
		p.w = bufio.NewWriter(p.file)
		err = p.begin(p.w)
	}
	if err != nil {
		return fail.Usagef("--%s: %w", p.flag, err)
	}
	return nil
}

// stop finishes the file.
func (p *profile) stop() error {
	if p.w == nil {
		return nil
	}
	if err := cmp.Or(p.end(p.w), p.w.Flush(), p.file.Close()); err != nil {
		return fail.Environmentf("--%s: %w", p.flag, err)
	}
	return nil
}
