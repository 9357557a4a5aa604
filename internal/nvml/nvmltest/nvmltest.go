// Package nvmltest is for tests of what asks NVIDIA's management library: it compiles a library
// that takes its place, and loads it beside the code under test, which is given its path.
//
//	New ──▶ Fake   Path to open it by; Fail and Set: what goes wrong; Calls, Initialized
//
// It makes up two GPUs. The first, at 0000:19:00.0, has MIG instances in places 0 and 2 of 7; the
// second is at 0000:1a:00.0. Of the 18 NVLinks of each, 0 to 3 are up: to a switch, to a processor,
// to the other GPU, and to something unknown. Each library has a state of its own. It may be called
// by several goroutines; the files are in the test's temporary directory. Where there is no C
// compiler New skips the test.
package nvmltest

import (
	"embed"

	"github.com/spillway-db/spillway/internal/cfake"
)

//go:embed testdata/nvml
var files embed.FS

// Source is what the library is compiled from.
var Source = cfake.Source{Name: "libnvidia-ml.so.1", Files: files, Dir: "testdata/nvml"}
