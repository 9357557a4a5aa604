package spillway_test

import (
	"testing"
	"time"

	"github.com/spillway-db/spillway/internal/invariants"
)

const patience = 2 * time.Minute

// hurried says that tests are to try less: because they were told, or because each try
// takes long.
func hurried() bool { return testing.Short() || invariants.Enabled || raced }

// rounds returns how often a test does something: few times if it is hurried.
func rounds(full, few int) int {
	if hurried() {
		return few
	}
	return full
}
