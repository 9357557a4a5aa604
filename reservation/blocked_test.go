package reservation

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/spillway-db/spillway/internal/tally"
)

// Waits are counted by the names of their owners, of which there may be any number.
func TestBlockedIsBounded(t *testing.T) {
	m := &Manager{made: time.Now()}
	m.mu.ring.prev, m.mu.ring.next = &m.mu.ring, &m.mu.ring
	for i := range 3 * tally.Most {
		m.blocked.add(NewOwner(fmt.Sprint("task-", i)), time.Millisecond)
	}
	for range 2 {
		m.blocked.add(NewOwner("task-0"), 5*time.Second)
	}
	m.blocked.add(nil, time.Second)
	var sum time.Duration
	var waits int64
	all := m.Blocked()
	for _, b := range all {
		sum += b.Total
		waits += b.Waits
	}
	if len(all) > tally.Most+1 || waits != 3*tally.Most+3 || sum != 3*tally.Most*time.Millisecond+11*time.Second {
		t.Errorf("%d names, %d waits, %v", len(all), waits, sum)
	}
	if b := all[0]; b.Owner != "task-0" || b.Waits != 2 || b.Longest != 5*time.Second {
		t.Errorf("the longest is %+v", b)
	}
	if b := all[1]; b.Owner != otherOwners {
		t.Errorf("the others are %+v", b)
	}
	if !slices.ContainsFunc(all, func(b Blocked) bool { return b.Owner == fmt.Sprint("task-", 3*tally.Most-1) }) {
		t.Error("the last of the tasks is with the others")
	}
}
