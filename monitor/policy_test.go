package monitor

import (
	"cmp"
	"slices"
	"testing"

	"github.com/spillway-db/spillway/batch"
)

func TestPolicyOrder(t *testing.T) {
	place := func(plan uint64, rank int, last bool, seq uint64) batch.Info {
		return batch.Info{Place: batch.Place{Plan: plan, Rank: rank, Last: last, Seq: seq}}
	}
	queued := func(task uint64, i batch.Info) batch.Info {
		i.State, i.Pending, i.Task = batch.TaskCreated, 1, task
		return i
	}
	used := func(at int64) batch.Info { return batch.Info{LastUse: at} }
	sized := func(n int64) batch.Info { return batch.Info{Bytes: n} }
	for _, tt := range []struct {
		name   string
		policy Policy
		want   []batch.Info // in the order in which they should go
	}{
		{"from the output towards the scans", PlanOrder(), []batch.Info{place(1, 5, false, 1), place(1, 3, false, 9), place(1, 0, false, 20)}},
		{"newest first within one repository", PlanOrder(), []batch.Info{place(1, 2, false, 9), place(1, 2, false, 8), place(1, 2, false, 3)}},
		{"the output's own repository last", PlanOrder(), []batch.Info{place(1, 3, false, 1), place(1, 0, false, 0), place(1, 4, true, 9), place(1, 4, true, 2)}},
		{"then the inputs of queued tasks, from the back", PlanOrder(), []batch.Info{
			place(1, 0, false, 50), place(1, 9, true, 51), queued(3, place(1, 1, false, 2)), queued(2, place(1, 7, false, 30)), queued(1, place(2, 1, false, 40)),
		}},
		{"the youngest plan gives first", PlanOrder(), []batch.Info{place(2, 0, false, 1), place(1, 9, false, 9), place(3, 9, true, 1)}},
		{"ranks below zero", PlanOrder(), []batch.Info{place(1, 0, false, 0), place(1, -1, false, 5)}},
		{"least recently used", LRU(), []batch.Info{used(-5), used(0), used(7), used(1 << 60)}},
		{"largest", LargestFirst(), []batch.Info{sized(1 << 40), sized(4096), sized(1), sized(0)}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for i, a := range tt.want {
				for j, b := range tt.want {
					if got, want := sign(tt.policy.Key(a).compare(tt.policy.Key(b))), cmp.Compare(i, j); got != want {
						t.Errorf("%d against %d: %d, want %d", i, j, got, want)
					}
				}
			}
		})
	}
}

func sign(n int) int { return cmp.Compare(n, 0) }

func TestByName(t *testing.T) {
	for _, name := range Names() {
		p, err := ByName(name)
		if err != nil || p.Name() != name {
			t.Errorf("ByName(%q) is %v, %v", name, p, err)
		}
	}
	if p, err := ByName(""); err != nil || p.Name() != "plan-order" {
		t.Errorf("the default is %v, %v", p, err)
	}
	if _, err := ByName("random"); err == nil {
		t.Error("an unknown name is no error")
	}
	if !slices.Contains(Names(), "lru") || !slices.Contains(Names(), "largest-first") {
		t.Errorf("names are %v", Names())
	}
}
