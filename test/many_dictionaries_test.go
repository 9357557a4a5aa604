package test

import (
	"testing"

	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/copytree"
	"github.com/spillway-db/spillway/internal/lookup"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// TestPersistedBatchOfManyDictionaries: to find what a kept batch needs takes about four times as
// many steps if it has four times as many dictionaries, and it comes back whole.
func TestPersistedBatchOfManyDictionaries(t *testing.T) {
	t.Parallel()
	persistNeedsLinux(t)
	found := func(n int) int64 {
		rec := arrowgen.Coded(n)
		defer rec.Release()
		dir, copied := t.TempDir(), t.TempDir()
		eng := persistentEngine(t, dir)
		plan, err := eng.Plan("query")
		if err != nil {
			t.Fatal(err)
		}
		repo, err := plan.Repository("join", 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := repo.Put(t.Context(), 0, rec, repository.WithPlacement(reservation.AnyInTier(tier.Disk))); err != nil {
			t.Fatal(err)
		}
		copytree.Copy(t, copied, dir)
		closePersistent(t, eng)
		before := lookup.Steps()
		eng = persistentEngine(t, copied)
		steps := lookup.Steps() - before
		if len(eng.Persisted()) != 1 {
			t.Fatalf("%d batches are kept", len(eng.Persisted()))
		}
		b, err := eng.Adopt(t.Context(), eng.Persisted()[0])
		if err != nil {
			t.Fatal(err)
		}
		back := recordOf(t, eng, b)
		if err := convert.Equal(rec, back); err != nil {
			t.Error(err)
		}
		back.Release()
		if err := b.Drop(); err != nil {
			t.Error(err)
		}
		closePersistent(t, eng)
		wantNothingIn(t, copied)
		return steps
	}
	const n = 60
	if one, four := found(n), found(4*n); one < n || four > 5*one {
		t.Errorf("%d steps for %d dictionaries, %d for %d", one, n, four, 4*n)
	}
}
