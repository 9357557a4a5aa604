// Package nvmltest is for tests of code that calls NVIDIA's management library. It compiles a fake
// library, which the code under test loads by its path.
//
//	New ──▶ Fake   Path to open it by; Fail and Set: what goes wrong; Calls, Initialized
//
// The library has two GPUs. The first, at 0000:19:00.0, has MIG instances at indices 0 and 2 of 7.
// The second is at 0000:1a:00.0. Of the 18 NVLinks of each, 0 to 3 are up: to a switch, to a
// processor, to the other GPU, and to something unknown. Each library has a state of its own and is
// safe for concurrent use. The files are in the test's temporary directory. Without a C compiler
// New skips the test.
package nvmltest

import (
	"embed"
	"testing"

	"github.com/spillway-db/spillway/internal/cfake"
	"github.com/spillway-db/spillway/internal/dynlib"
)

//go:embed testdata/nvml
var files embed.FS

// Source is the source of the library.
var Source = cfake.Source{Name: "libnvidia-ml.so.1", Files: files, Dir: "testdata/nvml"}

// Fake is a library that is loaded until the process ends.
type Fake struct {
	Path string // to open it by, until the test ends

	t           testing.TB
	set         func(name string, value int64) int32
	fail        func(name string, code int32)
	calls       func(name string) int64
	initialized func() int64
}

// New makes a library for the test that lacks the functions in without.
func New(t testing.TB, without ...string) *Fake {
	t.Helper()
	if !dynlib.Supported {
		t.Skip("needs a library in C that is for Linux on amd64 and arm64")
	}
	f := &Fake{Path: Source.Write(t, without...), t: t}
	lib, err := dynlib.Open(f.Path)
	if err != nil {
		t.Fatal(err)
	}
	for name, fn := range map[string]any{
		"fake_set": &f.set, "fake_fail": &f.fail, "fake_calls": &f.calls, "fake_initialized": &f.initialized,
	} {
		dynlib.Bind(lib, name, fn)
	}
	return f
}

// Set changes a setting: name_length, the minimum bytes of a name; node_words and cpu_words, the
// words that a caller must provide.
func (f *Fake) Set(name string, value int64) {
	f.t.Helper()
	if f.set(name, value) != 0 {
		f.t.Errorf("the library refuses %s = %d", name, value)
	}
}

// Fail makes all calls of a function fail with code. A code of 0 ends that.
func (f *Fake) Fail(name string, code int32) { f.fail(name, code) }

// Calls returns how often a function was called.
func (f *Fake) Calls(name string) int64 { return f.calls(name) }

// Initialized returns how many initializations of the library are open.
func (f *Fake) Initialized() int64 { return f.initialized() }
