package test

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/tier"
)

// TestVictimsOfMany: after thousands of puts and drops in several plans the monitor still moves down
// what the policy names, in its order: the youngest plan first, and the newest batch of a plan first.
// Each batch that is left moves once.
func TestVictimsOfMany(t *testing.T) {
	t.Parallel()
	for seed := range testseed.Each(t, testseed.Rounds(3, 1)) {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { victimsOfMany(t, rand.New(rand.NewPCG(seed, 0))) })
		})
	}
}

func victimsOfMany(t *testing.T, rng *rand.Rand) {
	told := new(heard)
	eng := openMarked(t, 32*mib, func(c *spillway.Config) {
		c.GPUs, c.MovesPerEdge, c.WriteAhead = []spillway.GPUConfig{}, 1, -1
		c.Policy, c.Events = monitor.PlanOrder(), told.add
	})
	host := eng.Spaces()[0]
	rec := arrowgen.Ints(1, 100, 1)
	defer rec.Release()
	type put struct {
		b    *batch.Batch
		plan int
	}
	var plans []*spillway.Plan
	var repos []*spillway.Repository
	for i := range 4 {
		plan, err := eng.Plan(fmt.Sprint("query ", i))
		if err != nil {
			t.Fatal(err)
		}
		repo, err := plan.Repository("scan", 0)
		if err != nil {
			t.Fatal(err)
		}
		plans, repos = append(plans, plan), append(repos, repo)
	}
	var left []put
	partition := 0
	add := func() {
		i := rng.IntN(len(repos))
		if err := repos[i].Put(t.Context(), partition, rec, in(tier.Host)); err != nil {
			t.Fatal(err)
		}
		b, _ := repos[i].Peek(partition)
		left, partition = append(left, put{b, i}), partition+1
	}
	for range testseed.Rounds(3, 1) { // waves, so that what was for many is given back and used again
		for len(left) < 1500 {
			add()
		}
		for len(left) > 200 {
			i := rng.IntN(len(left))
			if err := left[i].b.Drop(); err != nil {
				t.Fatal(err)
			}
			left = slices.Delete(left, i, i+1)
		}
	}
	for len(left) < 700 {
		add()
	}
	slices.SortFunc(left, func(a, b put) int {
		return cmp.Or(cmp.Compare(b.plan, a.plan), cmp.Compare(b.b.ID(), a.b.ID()))
	})
	if err := host.SetMarks(tier.Marks{Limit: 1, Trigger: 0.001, Stop: 0.00001}); err != nil {
		t.Fatal(err)
	}
	time.Sleep(time.Minute)
	moved := told.of(events.MoveBegun)
	for i, e := range moved {
		if i >= len(left) || batch.ID(e.Batch) != left[i].b.ID() {
			t.Fatalf("move %d is of batch %d of %d that are left, not as the policy says", i, e.Batch, len(left))
		}
	}
	if len(moved) != len(left) {
		t.Errorf("%d batches of %d moved", len(moved), len(left))
	}
	for _, plan := range plans {
		if _, err := plan.Close(); err != nil {
			t.Error(err)
		}
	}
	closeClean(t, eng)
}
