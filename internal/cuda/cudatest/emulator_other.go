//go:build !linux || !(amd64 || arm64)

package cudatest

import (
	"testing"

	"github.com/spillway-db/spillway/internal/cuda"
)

// Emulator is there so that tests compile; there is none here.
type Emulator struct{ Path string }

// New skips the test.
func New(t testing.TB, cfg Config) *Emulator {
	t.Helper()
	t.Skip("needs the CUDA emulator, which is for Linux on amd64 and arm64")
	return nil
}

func (*Emulator) Set(string, int64)                    {}
func (*Emulator) Fail(string, int64, cuda.Code, int64) {}
func (*Emulator) FailWork(int64, cuda.Code, bool)      {}
func (*Emulator) ClearFailures()                       {}
func (*Emulator) Calls(string) int64                   { return 0 }
func (*Emulator) Settle()                              {}
func (*Emulator) Live(string) int64                    { return 0 }
func (*Emulator) Leaks() []string                      { return nil }
