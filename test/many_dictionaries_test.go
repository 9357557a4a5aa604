package test

import (
	"testing"

	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/test/testfs"
	"github.com/spillway-db/spillway/tier"
)

// TestPersistedBatchOfManyDictionaries: a batch with hundreds of dictionaries, each a file of its own,
// comes back whole.
func TestPersistedBatchOfManyDictionaries(t *testing.T) {
	t.Parallel()
	persistNeedsLinux(t)
	for _, n := range []int{60, 240} {
		rec := arrowgen.Coded(n)
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
		testfs.CopyTree(t, copied, dir)
		closePersistent(t, eng)
		eng = persistentEngine(t, copied)
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
		rec.Release()
		if err := b.Drop(); err != nil {
			t.Error(err)
		}
		closePersistent(t, eng)
		wantNothingIn(t, copied)
	}
}
