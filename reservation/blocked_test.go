package reservation

import (
	"fmt"
	"testing"
	"time"
)

// Waits are counted by the names of their owners, of which there may be any number.
func TestBlockedIsBounded(t *testing.T) {
	m := &Manager{}
	for i := range 3 * mostNames {
		m.blocked.add(NewOwner(fmt.Sprint("task-", i)), time.Millisecond)
	}
	m.blocked.add(NewOwner("task-0"), 5*time.Second)
	m.blocked.add(nil, time.Second)
	var sum time.Duration
	var waits int64
	all := m.Blocked()
	for _, b := range all {
		sum += b.Total
		waits += b.Waits
	}
	if len(all) > mostNames+1 || waits != 3*mostNames+2 || sum != 3*mostNames*time.Millisecond+6*time.Second {
		t.Errorf("%d names, %d waits, %v", len(all), waits, sum)
	}
	if b := all[0]; b.Owner != "task-0" || b.Waits != 2 || b.Longest != 5*time.Second {
		t.Errorf("the longest is %+v", b)
	}
	if b := all[1]; b.Owner != otherOwners {
		t.Errorf("the others are %+v", b)
	}
}
