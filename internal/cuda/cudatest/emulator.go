package cudatest

import (
	"embed"
	"fmt"
	"strings"
	"sync/atomic"
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
	start         func(flags uint32) int32 // as gorgonia.org/cu does when the program starts; it may refuse
}

// New makes a library for the test. It skips the test where no library can be compiled. A program
// with the tag gorgonia has one library, so New waits there until the test that has it has ended.
// It skips a test that needs functions to be missing, or that has contexts in the library already.
func New(t testing.TB, cfg Config) *Emulator {
	t.Helper()
	if !cuda.Linked {
		return NewApart(t, cfg)
	}
	if len(cfg.Without) > 0 {
		t.Skipf("needs a driver without %v, and a build without the tag gorgonia, which links one with all", cfg.Without)
	}
	again := linked.take(t)
	e := bind(t, cuda.DefaultPath)
	t.Cleanup(func() { // for tests that work with the driver which they find, without New
		e.reset()
		e.start(0)
	})
	switch refused := e.reset() != 0; {
	case refused && again:
		t.Skip("needs two CUDA emulators at once, and a build without the tag gorgonia, which has one")
	case refused:
		t.Fatal("the CUDA emulator is still in use by a test before")
	}
	cfg.set(e.Set)
	e.start(0)
	return e
}

// NewApart is New for a library of the test's own in every build. With the tag gorgonia such a
// library can be looked at, but the program refuses to work with it.
func NewApart(t testing.TB, cfg Config) *Emulator {
	t.Helper()
	if !dynlib.Supported {
		t.Skip("needs the CUDA emulator, which is for Linux on amd64 and arm64")
	}
	e := bind(t, emulator.Write(t, cfg.Without...))
	cfg.set(e.Set)
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

// linked is the one library of a program with the tag gorgonia. One test has it at a time.
var linked = turn{free: make(chan struct{}, 1)}

type turn struct {
	free   chan struct{}          // holds a token while a test has its turn
	holder atomic.Pointer[string] // the name of that test
}

// take gives the turn to t until t ends. It reports whether t, or a test that t is part of, has it
// already.
func (l *turn) take(t testing.TB) (again bool) {
	t.Helper()
	name := t.Name()
	if h := l.holder.Load(); h != nil && strings.HasPrefix(name+"/", *h+"/") {
		return true
	}
	l.free <- struct{}{}
	l.holder.Store(&name)
	t.Cleanup(func() {
		l.holder.Store(nil)
		<-l.free
	})
	return false
}

// Set changes a setting: delay_ns, bytes_per_second, peer, lying_peer, register_limit or capturing
// (which is that another thread records a graph) at any time, plain_access and plain_unmapped (what
// is answered of ordinary memory to questions that are for memory that a program maps itself;
// negative: an error), or unregister_home (host memory is unregistered where it was registered,
// only), devices, memory and version before the library is loaded by others.
func (e *Emulator) Set(name string, value int64) {
	e.t.Helper()
	if code := e.set(name, value); code != 0 {
		e.t.Errorf("the CUDA emulator refuses %s = %d", name, value)
	}
}

// Fail makes calls of symbol fail with code, times of them (negative: all) after so many that
// succeed. An empty symbol means all but the queries whether work is done. A call that gives
// something up does so nevertheless.
func (e *Emulator) Fail(symbol string, after int64, code cuda.Code, times int64) {
	e.t.Helper()
	if e.fail(symbol, after, int32(code), times) != 0 {
		e.t.Errorf("the CUDA emulator takes no more failures")
	}
}

// FailWork makes a piece of work that moves or computes bytes fail after so many that pass. Its
// stream fails, and if sticky the whole context for ever, as with a real device.
func (e *Emulator) FailWork(after int64, code cuda.Code, sticky bool) {
	how := int32(0)
	if sticky {
		how = 1
	}
	e.failWork(after, int32(code), how)
}

// ClearFailures takes back all that was asked to fail and has not.
func (e *Emulator) ClearFailures() { e.clearFailures() }

// Calls returns how often symbol was called; an empty one means the same as in Fail.
func (e *Emulator) Calls(symbol string) int64 { return e.calls(symbol) }

// Settle waits until no stream has work.
func (e *Emulator) Settle() { e.settle() }

// kinds are what is counted.
var kinds = []string{"contexts", "streams", "events", "pools", "modules", "allocations", "registrations", "host allocations", "physical allocations", "address ranges"}

// Live returns how many there are of a kind: contexts, streams, events, pools, modules,
// allocations, registrations, host allocations, physical allocations, address ranges.
func (e *Emulator) Live(kind string) int64 {
	e.t.Helper()
	n := e.live(kind)
	if n < 0 {
		e.t.Fatalf("the CUDA emulator does not count %s", kind)
	}
	return n
}

// Leaks says what there still is, and what was there when its context was given up.
func (e *Emulator) Leaks() (leaks []string) {
	for _, k := range kinds {
		if n := e.live(k); n != 0 {
			leaks = append(leaks, fmt.Sprintf("%d %s left", n, k))
		}
		if n := e.abandoned(k); n != 0 {
			leaks = append(leaks, fmt.Sprintf("%d %s given up with their context", n, k))
		}
	}
	return leaks
}

// set calls put with each setting that is not the emulator's default.
func (c Config) set(put func(name string, value int64)) {
	put("devices", c.devices())
	for _, s := range []struct {
		name  string
		value int64
	}{
		{"memory", c.Memory},
		{"version", int64(c.Version)},
		{"delay_ns", c.Delay.Nanoseconds()},
		{"bytes_per_second", c.BytesPerSecond},
		{"register_limit", c.RegisterLimit},
		{"lying_peer", int64(c.LyingPeer)},
	} {
		if s.value != 0 {
			put(s.name, s.value)
		}
	}
	if c.NoPeer {
		put("peer", 0)
	}
}
