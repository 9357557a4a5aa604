package convert

import (
	"fmt"
	"testing"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/tier"
)

// TestWorkIsBounded: the moves of all operators are counted, and separately for the most recently
// used ones.
func TestWorkIsBounded(t *testing.T) {
	m := new(Mover)
	m.stats.init()
	s := &m.stats
	perPlan := func(name string) (of WorkStats) {
		for _, w := range m.Work() {
			if w.Plan == name {
				of = w
			}
		}
		return of
	}
	gpu, disk := tier.ID{Kind: tier.GPU}, tier.ID{Kind: tier.Disk}
	down := &events.Event{From: gpu, To: disk, Bytes: 3, Took: time.Millisecond, Reason: ReasonTrigger}
	up := &events.Event{From: disk, To: gpu, Bytes: 2, Took: time.Millisecond, Reason: ReasonWork}
	const operators = 3 * maxOperators
	first := batch.Place{Plan: 1, Name: "kept"}
	again := batch.Place{Name: "again", Operator: "scan"} // of many plans with one name
	for i := range operators {
		at := batch.Place{Plan: uint64(i + 2), Name: fmt.Sprint("q-", i), Operator: "scan"}
		again.Plan = uint64(i + 2)
		s.add(down, 0, again)
		s.add(down, 0, at)
		s.add(up, 0, at)
		s.workLocked(at).Unread += 5
		s.add(down, 0, first) // which is used all the time
	}
	if n := len(m.Work()); n > maxOperators+1 {
		t.Errorf("%d operators are kept", n)
	}
	var sum WorkStats
	sum.ByReason = map[string]int64{}
	for _, of := range m.Work() {
		sum.Down = sum.Down.plus(of.Down)
		sum.Up = sum.Up.plus(of.Up)
		sum.Unread += of.Unread
		for reason, n := range of.ByReason {
			sum.ByReason[reason] += n
		}
	}
	if sum.Down.Bytes != 9*operators || sum.Up.Bytes != 2*operators ||
		sum.Up.Busy != operators*time.Millisecond || sum.Unread != 5*operators ||
		sum.ByReason[ReasonTrigger] != 9*operators || sum.ByReason[ReasonWork] != 2*operators {
		t.Errorf("in all %+v", sum)
	}
	for _, name := range []string{"kept", "again"} {
		if of := perPlan(name); of.Down.Batches != operators {
			t.Errorf("what is used all the time: %+v", of)
		}
	}
	if others := perPlan(OthersPlan); others.Down.Batches < operators-maxOperators {
		t.Errorf("the others: %+v", others)
	}
}
