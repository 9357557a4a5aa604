package cudatest

import (
	"os"
	"testing"
)

// RealVariable is the variable that has tests run on a real GPU, too.
const RealVariable = "SPILLWAY_CUDA"

// Real returns the path of the driver library that such a test loads: empty, for the one that the machine has, where
// the variable is "real", else what the variable says. Where it is not set the test is skipped.
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
