//go:build linux && (amd64 || arm64)

package nvmltest

import (
	"testing"

	"github.com/ebitengine/purego"
)

// Fake is a library that is loaded until the process ends.
type Fake struct {
	Path string // to open it by, until the test ends

	t           testing.TB
	set         func(name string, value int64) int32
	fail        func(name string, code int32)
	calls       func(name string) int64
	initialized func() int64
}

// New makes a library for the test, which does not have the functions named.
func New(t testing.TB, without ...string) *Fake {
	t.Helper()
	f := &Fake{Path: Source.Write(t, without...), t: t}
	handle, err := purego.Dlopen(f.Path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		t.Fatal(err)
	}
	for name, fn := range map[string]any{"fake_set": &f.set, "fake_fail": &f.fail, "fake_calls": &f.calls, "fake_initialized": &f.initialized} {
		purego.RegisterLibFunc(fn, handle, name)
	}
	return f
}

// Set changes a setting: name_length (bytes that names have at least), node_words and cpu_words
// (that a caller must have room for), devices (how many it says there are).
func (f *Fake) Set(name string, value int64) {
	f.t.Helper()
	if f.set(name, value) != 0 {
		f.t.Errorf("the library refuses %s = %d", name, value)
	}
}

// Fail makes all calls of a function fail with code, until that is 0.
func (f *Fake) Fail(name string, code int32) { f.fail(name, code) }

// Calls returns how often a function was called.
func (f *Fake) Calls(name string) int64 { return f.calls(name) }

// Initialized returns how many initializations of the library are open.
func (f *Fake) Initialized() int64 { return f.initialized() }
