package testseed

import (
	"testing"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/racemark"
)

// Raced says that the race detector is on, under which all takes ten times as long, and
// memory is Go's.
const Raced = racemark.Enabled

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
