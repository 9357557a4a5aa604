// Package cudatest is for tests of what uses CUDA: it compiles the emulator of
// testdata/emulator into a library libcuda.so.1 and loads it beside the code under test, which
// is given its path.
//
//	Config ──New──▶ Emulator   one library with its own state, Path to load it by
//	                  │        Fail, FailWork: what goes wrong, and when
//	                  └──────▶ Calls, Live, Leaks: what was called, what there is
//
// The emulator is written in C because it is called as the driver is. It keeps the memory of its
// devices in the host's, at addresses that no other code can use. A thread for each stream does the
// work. It finds mistakes that the driver finds, and some that crash the driver. It is no GPU, and
// its name says so.
//
// Each New writes a library of its own, with a state of its own, so tests may run side by
// side. The files are in the test's temporary directory. Where there is no C compiler
// New skips the test and says so. It takes no locks of the module's.
//
// With the tag gorgonia the program is linked with one library, which must be the emulator. Tests
// take turns with it, also those that run in parallel. New resets it, so each test must have given
// up what it made there. Tests that need two libraries at once, or one that lacks functions, are
// skipped then.
package cudatest

import (
	"fmt"
	"os"
	"testing"
	"time"
)

// Config says what is emulated. The zero value is one device of 64 MiB under a driver for CUDA
// 12.8.
type Config struct {
	Devices        int           // 0: one; negative: none
	Memory         int64         // bytes of each device; 0: 64 MiB
	Version        int           // as the driver counts, 12080 for 12.8; 0: that
	Delay          time.Duration // before each piece of work
	BytesPerSecond int64         // 0: as fast as memory
	NoPeer         bool          // devices cannot reach each other
	LyingPeer      int           // copies to peers succeed and do nothing: 1 to devices of a higher number, 2 of a lower, 3 both
	RegisterLimit  int64         // bytes that may be pinned; 0: no limit
	Without        []string      // functions that the library does not have
}

// devices returns how many there are.
func (c Config) devices() int64 {
	switch {
	case c.Devices < 0:
		return 0
	case c.Devices == 0:
		return 1
	}
	return int64(c.Devices)
}

// Environ returns variables for a program that the test starts and that loads the library by its
// path, because it has no other parameter. They hold what they have names for.
func (c Config) Environ() []string {
	env := []string{fmt.Sprintf("SPILLWAY_EMULATOR_DEVICES=%d", c.devices())}
	if c.Memory > 0 {
		env = append(env, fmt.Sprintf("SPILLWAY_EMULATOR_MEMORY=%d", c.Memory))
	}
	if c.Version > 0 {
		env = append(env, fmt.Sprintf("SPILLWAY_EMULATOR_VERSION=%d", c.Version))
	}
	if c.Delay > 0 {
		env = append(env, fmt.Sprintf("SPILLWAY_EMULATOR_DELAY_NS=%d", c.Delay.Nanoseconds()))
	}
	if c.NoPeer {
		env = append(env, "SPILLWAY_EMULATOR_PEER=0")
	}
	if c.LyingPeer != 0 {
		env = append(env, fmt.Sprintf("SPILLWAY_EMULATOR_LYING_PEER=%d", c.LyingPeer))
	}
	return env
}

// RealVariable is the variable that has tests run on a real GPU, too.
const RealVariable = "SPILLWAY_CUDA"

// Real returns the path of the driver library that such a test loads: empty, for the one that the
// machine has, where the variable is "real", else what the variable says. Where it is not set the
// test is skipped.
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
