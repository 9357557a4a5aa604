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
}

// New makes a library for the test, or skips the test where none can be compiled.
func New(t testing.TB, cfg Config) *Emulator {
	t.Helper()
	if !dynlib.Supported {
		t.Skip("needs the CUDA emulator, which is for Linux on amd64 and arm64")
	}
	e := &Emulator{t: t}
	shared := cuda.Linked && len(cfg.Without) == 0 // one that lacks something can be looked at, if not worked with
	if shared {
		e.Path = cuda.DefaultPath
	} else {
		e.Path = emulator.Write(t, cfg.Without...)
	}
	lib, err := dynlib.Open(e.Path)
	if err != nil {
		t.Fatal(err)
	}
	if lib.Find("emu_reset") == 0 {
		t.Skip("needs a program that is not linked with another CUDA driver")
	}
	for name, f := range map[string]any{
		"emu_set": &e.set, "emu_fail": &e.fail, "emu_fail_work": &e.failWork, "emu_clear_failures": &e.clearFailures,
		"emu_calls": &e.calls, "emu_live": &e.live, "emu_abandoned": &e.abandoned, "emu_settle": &e.settle,
		"emu_reset": &e.reset,
	} {
		dynlib.Bind(lib, name, f)
	}
	if shared && e.reset() != 0 {
		t.Fatal("the CUDA emulator is still in use by a test before")
	}
	cfg.set(e.Set)
	return e
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
