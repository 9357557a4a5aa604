package test

import (
	"context"
	"runtime"
	"testing"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/tier"
)

// farGPU opens an engine with host memory and a GPU on node 0, and a larger GPU on node 1, and a
// repository with six batches of 200 to 400 KiB in host memory.
func farGPU(t *testing.T, near int64, change ...func(*spillway.Config)) (*spillway.Engine, *spillway.Plan, *repository.Repository) {
	t.Helper()
	node := []int{0, 1}
	cfg := spillway.Config{
		GPUs: []spillway.GPUConfig{
			{Backend: spillway.Sim, Memory: spillway.Bytes(near), Node: &node[0]},
			{Backend: spillway.Sim, Memory: spillway.Bytes(16 * mib), Node: &node[1]},
		},
		Hosts: []spillway.HostConfig{{Memory: spillway.Bytes(8 * mib), Node: 0}},
		Disks: []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(16 * mib)}},
	}
	for _, f := range change {
		f(&cfg)
	}
	eng, err := spillway.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeClean(t, eng) })
	plan, err := eng.Plan("query")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := plan.Repository("scan", 0)
	if err != nil {
		t.Fatal(err)
	}
	for i := range int64(6) {
		rec := numberedRecord(i, 10_000, wordList(1, 100))
		if err := repo.Put(t.Context(), 0, rec, repository.WithPlacement(reservation.AnyInTier(tier.Host))); err != nil {
			t.Fatal(err)
		}
	}
	repo.CloseInput()
	return eng, plan, repo
}

// TestDrainGoesToTheNearestGPU: batches go to the GPU of their node although another has more room,
// to the other when the first is full, and to those of the option In whatever is nearer.
func TestDrainGoesToTheNearestGPU(t *testing.T) {
	near, far := tier.ID{Kind: tier.GPU}, tier.ID{Kind: tier.GPU, Ordinal: 1}
	for name, c := range map[string]struct {
		memory int64
		opts   []repository.TakeOption
		want   map[tier.ID]int
	}{
		"room in both, prefetching": {8 * mib, nil, map[tier.ID]int{near: 6}},
		"no prefetching":            {8 * mib, []repository.TakeOption{repository.ReadAhead(0)}, map[tier.ID]int{near: 6}},
		"the near is small": {
			3 * mib / 4, []repository.TakeOption{repository.ReadAhead(0)}, map[tier.ID]int{near: 1, far: 5},
		},
		"In": {8 * mib, []repository.TakeOption{repository.In(reservation.Specific(far))}, map[tier.ID]int{far: 6}},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, repo := farGPU(t, c.memory)
			got := make(map[tier.ID]int)
			for h, err := range repo.Drain(t.Context(), 0, tier.GPU, c.opts...) {
				if err != nil {
					t.Fatal(err)
				}
				got[h.Space().ID()]++
				if b, more := repo.Peek(0); more && len(c.opts) == 0 {
					for b.Info().Space.Kind != tier.GPU { // until it is prefetched
						runtime.Gosched()
					}
				}
				defer func() {
					if err := h.Close(); err != nil {
						t.Error(err)
					}
				}()
			}
			if len(got) != len(c.want) || got[near] != c.want[near] || got[far] != c.want[far] {
				t.Errorf("the batches are in %v, want %v", got, c.want)
			}
		})
	}
}

// TestReaderMovesTo: with In, a Reader moves the batches to the strategy's spaces before it reads
// them.
func TestReaderMovesTo(t *testing.T) {
	eng, _, repo := farGPU(t, 8*mib)
	far := tier.ID{Kind: tier.GPU, Ordinal: 1}
	rd, err := repo.Reader(t.Context(), 0, repository.In(reservation.Specific(far)))
	if err != nil {
		t.Fatal(err)
	}
	rows := int64(0)
	for rd.Next() {
		rows += rd.RecordBatch().NumRows()
	}
	if rd.Err() != nil || rows != 6*10_001 {
		t.Errorf("%d rows, %v", rows, rd.Err())
	}
	rd.Release()
	moved := int64(0)
	for _, e := range eng.Mover().Stats() {
		if e.To == far {
			moved += e.Batches
		}
	}
	if moved != 6 {
		t.Errorf("%d batches were moved to %s", moved, far)
	}
}

// TestTaskRunsWhereItIsTold: a task runs in the GPU nearest to its inputs, although another has
// more room, unless Task.In or the rules of the admission name other spaces, also in host memory.
func TestTaskRunsWhereItIsTold(t *testing.T) {
	near, far := tier.ID{Kind: tier.GPU}, tier.ID{Kind: tier.GPU, Ordinal: 1}
	host := tier.ID{Kind: tier.Host}
	rules := func(c *spillway.Config) {
		c.Limits.Admission = admission.Rules{Strategy: reservation.Specific(far)}
	}
	for name, c := range map[string]struct {
		memory int64
		in     reservation.Strategy
		change []func(*spillway.Config)
		want   tier.ID
	}{
		"by default the nearest": {memory: 8 * mib, want: near},
		"the near is too small":  {memory: mib / 2, want: far},
		"Task.In a GPU":          {memory: 8 * mib, in: reservation.Specific(far), want: far},
		"Task.In host memory":    {memory: 8 * mib, in: reservation.AnyInTier(tier.Host), want: host},
		"the rules":              {memory: 8 * mib, change: []func(*spillway.Config){rules}, want: far},
		"Task.In over the rules": {memory: 8 * mib, in: reservation.Specific(near), change: []func(*spillway.Config){rules}, want: near},
	} {
		t.Run(name, func(t *testing.T) {
			eng, _, repo := farGPU(t, c.memory, c.change...)
			inputs := []reservation.Strategy{reservation.AnyInTier(tier.Disk), reservation.Specific(near)}
			if name == "by default the nearest" || name == "the near is too small" {
				inputs = nil
			}
			i := 0
			for b := range repo.Batches(0) { // inputs in several memories
				if i < len(inputs) {
					if err := eng.Mover().Move(t.Context(), b, inputs[i]); err != nil {
						t.Fatal(err)
					}
				}
				i++
			}
			claim, err := repo.ClaimAll(t.Context(), 0)
			if err != nil {
				t.Fatal(err)
			}
			task := spillway.Task{
				Operator: "aggregate", Inputs: []*repository.Claim{claim}, In: c.in, Output: 4096, Overhead: spillway.None,
			}
			runs := 0
			err = eng.RunTask(t.Context(), task, func(ctx context.Context, g *spillway.Grant, in []*spillway.Handle) error {
				runs++
				if at := g.Reservation().Space().ID(); at != c.want {
					t.Errorf("the task runs in %s, want %s", at, c.want)
				}
				rows := int64(0)
				for _, h := range in {
					if at := h.Space().ID(); at != c.want {
						t.Errorf("an input is in %s, want %s", at, c.want)
					}
					rec, err := eng.Mover().Record(ctx, h)
					if err != nil {
						return err
					}
					rows += rec.NumRows()
					rec.Release()
				}
				if rows != 6*10_001 {
					t.Errorf("%d rows", rows)
				}
				b, err := g.Reservation().Alloc(4096)
				if err != nil {
					return err
				}
				return b.Release()
			})
			if err != nil || runs != 1 || repo.Total() != 0 {
				t.Errorf("%d runs, %v; %d batches are left", runs, err, repo.Total())
			}
		})
	}
}
