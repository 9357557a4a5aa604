package test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/arrow/array"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/test/testfs"
	"github.com/spillway-db/spillway/tier"
)

// hiding is an observer that a program puts in the place of the engine's, and which cannot
// refuse a batch.
type hiding struct{ batch.Observer }

// TestBatchesOfAProgramPersist: beside a batch that was put, one that the program has made
// itself, with an id that it picked or with the engine's. After a kill both are there, or the one
// that was not dropped.
func TestBatchesOfAProgramPersist(t *testing.T) {
	t.Parallel()
	persistNeedsLinux(t)
	for name, make := range map[string]struct {
		observer func(*spillway.Engine) batch.Observer // nil: the engine makes the batch
		madeLast bool
		refused  bool
	}{
		"picked before":        {(*spillway.Engine).Observer, false, false},
		"picked after":         {(*spillway.Engine).Observer, true, true},
		"of the engine":        {nil, true, false},
		"hidden from it":       {func(e *spillway.Engine) batch.Observer { return hiding{e.Observer()} }, true, false},
		"hidden and put after": {func(e *spillway.Engine) batch.Observer { return hiding{e.Observer()} }, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			eng := persistentEngine(t, dir)
			defer closePersistent(t, eng)
			plan, err := eng.Plan("query")
			if err != nil {
				t.Fatal(err)
			}
			repo, err := plan.Repository("join", 0)
			if err != nil {
				t.Fatal(err)
			}
			var put, made *batch.Batch
			for _, byHand := range []bool{!make.madeLast, make.madeLast} {
				if !byHand {
					put = putPersisted(t, eng, repo, 3, false)
					continue
				}
				p, err := eng.Mover().Ingest(t.Context(), persistedRecord(6), reservation.AnyInTier(tier.Disk))
				if err != nil {
					t.Fatal(err)
				}
				if make.observer != nil {
					made, err = batch.New(batch.Options{ID: 1, Payload: p, Observer: make.observer(eng)})
					if refused := errors.Is(err, batch.ErrDuplicateID); refused != make.refused || err != nil && !refused {
						t.Fatalf("id 1: %v, refused %v", err, make.refused)
					}
				}
				if made == nil {
					if made, err = eng.NewBatch(p); err != nil {
						t.Fatal(err)
					}
				}
			}
			if hidden := make.observer != nil && name[0] == 'h'; put.ID() == made.ID() && !hidden {
				t.Errorf("both have id %d", put.ID())
			}
			wantPersisted(t, dir, 3, 6)
			if err := put.Drop(); err != nil {
				t.Error(err)
			}
			wantPersisted(t, dir, 6)
			if err := made.Drop(); err != nil {
				t.Error(err)
			}
			wantPersisted(t, dir)
		})
	}
}

// TestBatchesThatTheEngineDoesNotKnow: those are refused, whatever their ids, and stay the
// caller's. What the engine knows by an observer of the program's is taken.
func TestBatchesThatTheEngineDoesNotKnow(t *testing.T) {
	eng, repo := openWith(t, 1<<20, 8<<20)
	other, _ := openSmall(t, 1<<20, 8<<20)
	defer closePersistent(t, other)
	for name, c := range map[string]struct {
		observer batch.Observer
		dropped  bool
		want     error
	}{
		"no observer":      {nil, false, tier.ErrNotSupported},
		"another engine's": {other.Observer(), false, tier.ErrNotSupported},
		"the engine's":     {eng.Observer(), false, nil},
		"hidden":           {hiding{eng.Observer()}, false, nil},
		"dropped":          {eng.Observer(), true, batch.ErrState},
	} {
		p, err := eng.Mover().Ingest(t.Context(), persistedRecord(1), reservation.AnyInTier(tier.Host))
		if err != nil {
			t.Fatal(err)
		}
		b, err := batch.New(batch.Options{ID: 1, Payload: p, Observer: c.observer})
		if err != nil {
			t.Fatal(err)
		}
		if c.dropped {
			err = b.Drop()
		}
		if err := errors.Join(err, repo.PutBatch(0, b)); c.want == nil && err != nil || !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		} else if c.want == tier.ErrNotSupported && !strings.Contains(err.Error(), "Engine.NewBatch") {
			t.Errorf("%s: %v does not say what to do", name, err)
		}
		if n := repo.Len(0); (n == 1) != (c.want == nil) {
			t.Errorf("%s: the repository has %d batches", name, n)
		}
		if !c.dropped {
			if err := b.Drop(); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

// wantPersisted looks at what the next engine finds if this one's process ends now: records of
// these numbers, whole.
func wantPersisted(t *testing.T, dir string, want ...int64) {
	t.Helper()
	copied := t.TempDir()
	testfs.CopyTree(t, copied, dir)
	eng := persistentEngine(t, copied)
	var got []int64
	for _, k := range eng.Persisted() {
		b, err := eng.Adopt(t.Context(), k)
		if err != nil {
			t.Fatal(err)
		}
		rec := recordOf(t, eng, b)
		n := rec.Column(0).(*array.Int64).Value(0)
		if err := convert.Equal(persistedRecord(n), rec); err != nil {
			t.Errorf("record %d: %v", n, err)
		}
		rec.Release()
		if err := b.Drop(); err != nil {
			t.Error(err)
		}
		got = append(got, n)
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("records %v are kept, want %v", got, want)
	}
	closePersistent(t, eng)
	wantNothingIn(t, copied)
}

// TestNewBatchTakesOnlyTheEnginesPayloads: and leaves others to their owner.
func TestNewBatchTakesOnlyTheEnginesPayloads(t *testing.T) {
	one, _ := openSmall(t, 1<<20, 8<<20)
	other, _ := openSmall(t, 1<<20, 8<<20)
	defer closePersistent(t, one)
	defer closePersistent(t, other)
	p, err := one.Mover().Ingest(t.Context(), persistedRecord(1), reservation.AnyInTier(tier.Host))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := other.NewBatch(p); !errors.Is(err, tier.ErrNotSupported) {
		t.Errorf("a payload of another engine: %v", err)
	}
	if _, err := one.NewBatch(nil); !errors.Is(err, batch.ErrState) {
		t.Errorf("no payload: %v", err)
	}
	b, err := one.NewBatch(p)
	if err != nil {
		t.Fatal(err)
	}
	c, err := one.Mover().Clone(t.Context(), b, nil)
	if err != nil {
		t.Fatal(err)
	}
	if b.ID() == c.ID() {
		t.Errorf("a batch and its clone have id %d", b.ID())
	}
	if err := errors.Join(b.Drop(), c.Drop()); err != nil {
		t.Error(err)
	}
}
