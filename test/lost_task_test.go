package test

import (
	"context"
	"fmt"
	"testing"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// task runs one on what a partition has.
func (l *losable) task(partition int, f func(*spillway.Grant) error) error {
	l.t.Helper()
	c, err := l.repo.ClaimAll(l.t.Context(), partition)
	if err != nil {
		l.t.Fatal(err)
	}
	return l.eng.RunTask(l.t.Context(), spillway.Task{Operator: "task", Inputs: []*repository.Claim{c}, Output: 100},
		func(_ context.Context, g *spillway.Grant, _ []*spillway.Handle) error { return f(g) })
}

// TestTasksOfALostGPU: a task whose inputs were there, or which has no other GPU to run on, gets
// that error, and not that there is too little room. The inputs are in their places, and those
// elsewhere have not been moved for it.
func TestTasksOfALostGPU(t *testing.T) {
	for gpus := 1; gpus <= 2; gpus++ {
		t.Run(fmt.Sprint(gpus), func(t *testing.T) {
			l := openLosable(t, gpus, 1<<20)
			record := numberedRecord(1, 1000, wordList(1, 10))
			l.put(0, record, in(tier.Host))
			l.put(0, record, repository.WithPlacement(reservation.Specific(lostGPU)))
			b := l.put(1, record, in(tier.Host))
			l.gpus[0].Lose(errFellOff)
			ran := 0
			run := func(g *spillway.Grant) error {
				if ran++; g.Reservation().Space().ID() != otherGPU {
					t.Errorf("a task runs in %s", g.Reservation().Space().ID())
				}
				return nil
			}
			before := written(l.eng)
			isLost(t, "a task on what was there", l.task(0, run))
			if n := written(l.eng) - before; n != 0 {
				t.Errorf("%d bytes were moved for it", n)
			}
			if gpus == 1 {
				isLost(t, "a task without a GPU", l.task(1, run))
				l.same(b, record)
			} else if err := l.task(1, run); err != nil {
				t.Error(err)
			}
			if ran != gpus-1 {
				t.Errorf("%d tasks ran", ran)
			}
			if _, ok := l.repo.Peek(0); !ok {
				t.Error("the input that is lost is not in its place")
			}
			l.end(2)
		})
	}
}
