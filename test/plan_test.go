package test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/tier"
)

// TestPlanCloseReportsLeftovers: closing a plan reports the batches that were not consumed, as
// clearing its manager does: by repository, in the plan's order. Batches in open claims and with
// open handles count. A second Close reports the same.
func TestPlanCloseReportsLeftovers(t *testing.T) {
	eng, err := callbackEngine(t, func(*spillway.Config) {})
	if err != nil {
		t.Fatal(err)
	}
	rec := arrowgen.Ints(1, 1000, 1)
	defer rec.Release()
	scan := repository.Key{Operator: "scan"}
	build, join := repository.Key{Operator: "join"}, repository.Key{Operator: "join", Port: 1}
	for _, clear := range []bool{true, false} {
		plan, err := eng.Plan("query")
		if err != nil {
			t.Fatal(err)
		}
		bytes := map[repository.Key]int64{}
		repos := map[repository.Key]*repository.Repository{}
		for i, k := range []repository.Key{scan, build, join} {
			repo, err := plan.Repository(k.Operator, k.Port)
			if err != nil {
				t.Fatal(err)
			}
			repos[k] = repo
			for partition := range i + 2 {
				if err := repo.Put(t.Context(), partition, rec); err != nil {
					t.Fatal(err)
				}
			}
		}
		for partition := range 2 {
			drainPartition(t.Context(), t, repos[scan], partition)
		}
		drainPartition(t.Context(), t, repos[build], 0)
		for k, repo := range repos {
			for _, kind := range tier.Kinds() {
				bytes[k] += repo.Bytes(kind)
			}
		}
		held, _ := repos[join].Peek(0)
		h, err := held.Open(t.Context(), held.Info().Space, false)
		if err != nil {
			t.Fatal(err)
		}
		claim, err := repos[join].Claim(t.Context(), 1, 1)
		if err != nil {
			t.Fatal(err)
		}
		want := []repository.Leftover{
			{Key: build, Batches: 2, Bytes: bytes[build]}, {Key: join, Batches: 4, Bytes: bytes[join]},
		}
		if clear {
			if err := claim.Restore(); err != nil { // Clear would wait for it
				t.Error(err)
			}
			if got, err := plan.Manager().Clear(t.Context()); err != nil || !slices.Equal(got, want) {
				t.Errorf("Clear reports %+v, %v; want %+v", got, err, want)
			}
			want = nil
		}
		for range 2 {
			if got, err := plan.Close(); err != nil || !slices.Equal(got, want) {
				t.Errorf("Close reports %+v, %v; want %+v", got, err, want)
			}
		}
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	}
	closeClean(t, eng)
}

// drainPartition consumes all batches of a partition.
func drainPartition(ctx context.Context, t *testing.T, repo *repository.Repository, partition int) {
	t.Helper()
	for h, err := range repo.Drain(ctx, partition, tier.Host) {
		if err == nil {
			err = h.Close()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// TestPlanNames: the name of an open plan is taken, and a closed engine has no plans.
func TestPlanNames(t *testing.T) {
	eng, err := callbackEngine(t, func(*spillway.Config) {})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second time, the name is free again
		plan, err := eng.Plan("query")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := eng.Plan("query"); err == nil || !strings.Contains(err.Error(), "open already") {
			t.Errorf("a second plan of that name: %v", err)
		}
		if _, err := plan.Close(); err != nil {
			t.Error(err)
		}
	}
	closeClean(t, eng)
	if _, err := eng.Plan("query"); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("a plan of a closed engine: %v, want %v", err, tier.ErrClosed)
	}
}
