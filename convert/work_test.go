package convert

import (
	"fmt"
	"testing"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/tier"
)

// TestWorkIsBounded: the moves of all operators are counted, and separately for the most recently
// used ones.
func TestWorkIsBounded(t *testing.T) {
	var w works
	down := &Moved{From: tier.ID{Kind: tier.GPU}, To: tier.ID{Kind: tier.Disk}, Bytes: 3, Reason: ReasonTrigger}
	up := &Moved{From: tier.ID{Kind: tier.Disk}, To: tier.ID{Kind: tier.GPU}, Bytes: 2, Reason: ReasonWork}
	const operators = 3 * maxOperators
	first := batch.Place{Plan: 1, Name: "kept"}
	again := batch.Place{Name: "again", Operator: "scan"} // of many plans with one name
	for i := range operators {
		at := batch.Place{Plan: uint64(i + 2), Name: fmt.Sprint("q-", i), Operator: "scan"}
		again.Plan = uint64(i + 2)
		before := w.of(again).Down.Bytes
		w.of(again).moved(down, 0)
		if now := w.of(again).Down.Bytes; now != before+down.Bytes {
			t.Fatalf("what is counted for a name went from %d to %d", before, now)
		}
		w.of(at).moved(down, time.Millisecond)
		w.of(at).moved(up, time.Millisecond)
		w.of(at).Unread += 5
		w.of(first).moved(down, 0) // which is used all the time
	}
	if len(w.by) > maxOperators+1 {
		t.Errorf("%d operators are kept", len(w.by))
	}
	var sum WorkStats
	sum.ByReason = map[string]int64{}
	for _, of := range w.by {
		sum.Down.plus(of.Down)
		sum.Up.plus(of.Up)
		sum.Unread += of.Unread
		for reason, n := range of.ByReason {
			sum.ByReason[reason] += n
		}
		if of.Plan == "kept" && of.Down.Batches != operators {
			t.Errorf("what is used all the time: %+v", of.WorkStats)
		}
	}
	if sum.Down.Bytes != 9*operators || sum.Up.Bytes != 2*operators ||
		sum.Up.Busy != operators*time.Millisecond || sum.Unread != 5*operators ||
		sum.ByReason[ReasonTrigger] != 9*operators || sum.ByReason[ReasonWork] != 2*operators {
		t.Errorf("in all %+v", sum)
	}
	if others := w.of(batch.Place{Name: OthersPlan}); others.Down.Batches < operators-maxOperators {
		t.Errorf("the others: %+v", others)
	}
}
