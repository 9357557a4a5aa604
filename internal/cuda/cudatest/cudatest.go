// Package cudatest is for tests of code that uses CUDA. It compiles the emulator in
// testdata/emulator into a library libcuda.so.1, which the code under test loads by its path.
//
//	Config ──New──▶ Emulator   one library with its own state, Path to load it by
//	                  │        Fail, FailWork: what goes wrong, and when
//	                  └──────▶ Calls, Live, Leaks: calls made, objects that exist
//
// The emulator is written in C because its callers call it as they call the driver. It keeps the
// memory of its devices in host memory, at addresses that no other code can use, and runs each
// stream on a thread. It reports mistakes that the driver reports, and some that crash the driver.
// Its device name shows that it is not a GPU.
//
// Each New writes a library with a state of its own, so tests may run in parallel. The files are in
// the test's temporary directory. Without a C compiler New skips the test. The package takes no
// locks of the module.
//
// A program that uses gorgonia.org/cu is linked with one library, which must be the emulator: its
// tests call NewLinked.
package cudatest

import (
	"cmp"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

// Config configures an emulator. The zero value is one device of 64 MiB under a driver for CUDA
// 12.8.
type Config struct {
	Devices        int           // 0: one; negative: none
	Memory         int64         // bytes of each device; 0: 64 MiB
	Version        int           // in the driver's form, 12080 for 12.8; 0: that
	Delay          time.Duration // before each piece of work
	BytesPerSecond int64         // 0: as fast as memory
	NoPeer         bool          // devices cannot reach each other
	LyingPeer      int           // peer copies that do nothing: 1 to higher-numbered devices, 2 to lower, 3 both
	RegisterLimit  int64         // bytes that may be pinned; 0: no limit
	Without        []string      // functions that the library does not have
}

// each calls set with the number of devices and with the settings that differ from their defaults.
func (c Config) each(set func(name string, value int64)) {
	set("devices", max(0, cmp.Or(int64(c.Devices), 1)))
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
			set(s.name, s.value)
		}
	}
	if c.NoPeer {
		set("peer", 0)
	}
}

// Environ returns variables for a program that the test starts and that loads the library by its
// path. The library reads from them all settings except BytesPerSecond and RegisterLimit.
func (c Config) Environ() (env []string) {
	c.each(func(name string, value int64) {
		env = append(env, fmt.Sprintf("SPILLWAY_EMULATOR_%s=%d", strings.ToUpper(name), value))
	})
	return env
}

// RealVariable names the environment variable that enables tests on a real GPU.
const RealVariable = "SPILLWAY_CUDA"

// Real returns the path of the driver library for a test on a real GPU: empty, for the one that the
// machine has, if the variable is "real", otherwise the variable's value. It skips the test if the
// variable is not set.
func Real(t testing.TB) (path string) {
	t.Helper()
	switch path = os.Getenv(RealVariable); path {
	case "":
		t.Skipf("needs %s to be \"real\", or the path of a driver library, to test on a GPU", RealVariable)
	case "real":
		path = ""
	}
	return path
}
