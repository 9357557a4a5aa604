package reservation

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// Waits are counted by the names of their owners, of which there may be any number.
func TestBlockedIsBounded(t *testing.T) {
	m := &Manager{}
	m.mu.blocked = make(map[string]Blocked)
	for i := range 3 * maxBlocked {
		m.countBlockedLocked(NewOwner(fmt.Sprint("task-", i)), time.Millisecond)
	}
	for range 2 {
		m.countBlockedLocked(NewOwner("task-0"), 5*time.Second)
	}
	m.countBlockedLocked(nil, time.Second)
	var sum time.Duration
	var waits int64
	all := m.Blocked()
	for _, b := range all {
		sum += b.Total
		waits += b.Waits
	}
	if len(all) > maxBlocked+1 || waits != 3*maxBlocked+3 || sum != 3*maxBlocked*time.Millisecond+11*time.Second {
		t.Errorf("%d names, %d waits, %v", len(all), waits, sum)
	}
	if b := all[0]; b.Owner != "task-0" || b.Waits != 2 || b.Longest != 5*time.Second {
		t.Errorf("the longest is %+v", b)
	}
	if b := all[1]; b.Owner != otherOwners {
		t.Errorf("the others are %+v", b)
	}
	if !slices.ContainsFunc(all, func(b Blocked) bool { return b.Owner == fmt.Sprint("task-", 3*maxBlocked-1) }) {
		t.Error("the last of the tasks is with the others")
	}
}
