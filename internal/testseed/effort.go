package testseed

import (
	"testing"

	"github.com/spillway-db/spillway/internal/invariants"
)

// Hurried says that tests are to try less: they run in short mode, or in a build in which
// each try takes long.
func Hurried() bool { return testing.Short() || invariants.Enabled || Raced }

// Rounds returns how often a test does something: few times if it is Hurried.
func Rounds(full, few int) int {
	if Hurried() {
		return few
	}
	return full
}
