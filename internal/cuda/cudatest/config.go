package cudatest

import (
	"fmt"
	"time"
)

// Config says what is emulated. The zero value is one device of 64 MiB under a driver for CUDA 12.8.
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

// Environ returns variables for a program that the test starts and that loads the
// library by its path, because it cannot be told otherwise. They hold what they have names for.
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
