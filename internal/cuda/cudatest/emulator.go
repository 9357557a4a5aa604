package cudatest

import (
	"embed"
	"fmt"
	"testing"

	"github.com/spillway-db/spillway/internal/cfake"
	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/dynlib"
)

//go:embed testdata/emulator
var sources embed.FS

var emulator = cfake.Source{Name: "libcuda.so.1", Files: sources, Dir: "testdata/emulator"}

// Emulator is one library. It is safe for concurrent use.
type Emulator struct {
	Path string // to load it by, until the test ends

	t testing.TB

	set           func(name string, value int64) int32
	fail          func(symbol string, after int64, code int32, times int64) int32
	failWork      func(after int64, code, sticky int32)
	clearFailures func()
	calls         func(symbol string) int64
	live          func(kind string) int64
	abandoned     func(kind string) int64
	settle        func()
	reset         func() int32
	start         func(flags uint32) int32 // cuInit, which gorgonia.org/cu calls when the program starts; it may fail
}

// New makes a library for the test, or skips the test if no library can be compiled.
func New(t testing.TB, cfg Config) *Emulator {
	t.Helper()
	if !dynlib.Supported {
		t.Skip("needs the CUDA emulator, which is for Linux on amd64 and arm64")
	}
	e := bind(t, emulator.Write(t, cfg.Without...))
	cfg.each(e.Set)
	return e
}

// NewLinked is New for a program that is linked with the emulator, as one that uses gorgonia.org/cu
// is. Such a program has only one library: NewLinked resets it, so each test must have closed
// everything in it before it ends, and tests must not run in parallel. Config.Without has no effect.
func NewLinked(t testing.TB, cfg Config) *Emulator {
	t.Helper()
	e := bind(t, cuda.DefaultPath)
	t.Cleanup(func() { // for tests that use the driver they find, without the emulator's functions
		e.reset()
		e.start(0)
	})
	if e.reset() != 0 {
		t.Fatal("an earlier test still uses the CUDA emulator")
	}
	cfg.each(e.Set)
	e.start(0)
	return e
}

// bind loads the library at path and finds the functions by which tests control it.
func bind(t testing.TB, path string) *Emulator {
	t.Helper()
	lib, err := dynlib.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	if lib.Find("emu_reset") == 0 {
		t.Skip("needs a program that is not linked with another CUDA driver")
	}
	e := &Emulator{t: t, Path: path}
	for name, f := range map[string]any{
		"emu_set": &e.set, "emu_fail": &e.fail, "emu_fail_work": &e.failWork, "emu_clear_failures": &e.clearFailures,
		"emu_calls": &e.calls, "emu_live": &e.live, "emu_abandoned": &e.abandoned, "emu_settle": &e.settle,
		"emu_reset": &e.reset, "cuInit": &e.start,
	} {
		dynlib.Bind(lib, name, f)
	}
	return e
}

// Set changes a setting. At any time: delay_ns, bytes_per_second, peer, lying_peer, register_limit,
// capturing (another thread records a graph), plain_access and plain_unmapped (the answers about
// ordinary memory to queries for memory that a program maps itself; negative: an error), and
// unregister_home (host memory can be unregistered only where it was registered). Before others
// load the library: devices, memory and version.
func (e *Emulator) Set(name string, value int64) {
	e.t.Helper()
	if code := e.set(name, value); code != 0 {
		e.t.Errorf("the CUDA emulator refuses %s = %d", name, value)
	}
}

// Fail makes calls of symbol fail with code: times of them (negative: all) after the first after
// calls. An empty symbol means all calls except queries of whether work is done. A call that
// releases something does so even if it fails.
func (e *Emulator) Fail(symbol string, after int64, code cuda.Code, times int64) {
	e.t.Helper()
	if e.fail(symbol, after, int32(code), times) != 0 {
		e.t.Errorf("the CUDA emulator takes no more failures")
	}
}

// FailWork makes one piece of work that moves or computes bytes fail, after so many others. Its
// stream fails. If sticky is true, the whole context fails for ever, as with a real device.
func (e *Emulator) FailWork(after int64, code cuda.Code, sticky bool) {
	how := int32(0)
	if sticky {
		how = 1
	}
	e.failWork(after, int32(code), how)
}

// ClearFailures cancels the failures that have not happened yet.
func (e *Emulator) ClearFailures() { e.clearFailures() }

// Calls returns how often symbol was called. An empty symbol means the same as in Fail.
func (e *Emulator) Calls(symbol string) int64 { return e.calls(symbol) }

// Settle waits until no stream has work.
func (e *Emulator) Settle() { e.settle() }

// kinds are the kinds of objects that the emulator counts.
var kinds = []string{
	"contexts", "streams", "events", "pools", "modules", "allocations", "registrations", "host allocations",
	"physical allocations", "address ranges",
}

// Live returns how many objects of a kind exist: contexts, streams, events, pools, modules,
// allocations, registrations, host allocations, physical allocations or address ranges.
func (e *Emulator) Live(kind string) int64 {
	e.t.Helper()
	n := e.live(kind)
	if n < 0 {
		e.t.Fatalf("the CUDA emulator does not count %s", kind)
	}
	return n
}

// Leaks describes the objects that still exist and those that existed when their context was
// destroyed.
func (e *Emulator) Leaks() (leaks []string) {
	for _, k := range kinds {
		if n := e.live(k); n != 0 {
			leaks = append(leaks, fmt.Sprintf("%d %s left", n, k))
		}
		if n := e.abandoned(k); n != 0 {
			leaks = append(leaks, fmt.Sprintf("%d %s destroyed with their context", n, k))
		}
	}
	return leaks
}
