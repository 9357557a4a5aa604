package test

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// TestCloseWithOpenTransits: Close does not wait for transits that a program has open, of a batch
// that is in a repository, in an open claim, or in a claim that is being consumed. It reports their
// memory, and they can be ended.
func TestCloseWithOpenTransits(t *testing.T) { synctest.Test(t, testCloseWithOpenTransits) }

func testCloseWithOpenTransits(t *testing.T) {
	eng, _ := openSmall(t, 1<<20, 1<<20)
	repo := scanOf(t, eng)
	rec := arrowgen.Ints(1, 1000, 1)
	defer rec.Release()
	var batches []*batch.Batch
	var held int64
	var transits []*batch.Transit
	var claim *repository.Claim
	for partition := range 3 {
		if err := repo.Put(t.Context(), partition, rec); err != nil {
			t.Fatal(err)
		}
		b, _ := repo.Peek(partition)
		var err error
		if partition > 0 {
			if claim, err = repo.Claim(t.Context(), partition, 1); err != nil {
				t.Fatal(err)
			}
		}
		tr, err := b.TryTransit()
		if err != nil {
			t.Fatal(err)
		}
		batches, transits = append(batches, b), append(transits, tr)
		held += b.Info().Bytes
	}
	consumed := make(chan error, 1)
	go func() { consumed <- claim.Consume() }()
	synctest.Wait()
	if len(consumed) != 0 {
		t.Error("Consume does not wait for the transit")
	}
	closed := make(chan error, 1)
	go func() { closed <- eng.Close() }()
	var leak *spillway.LeakError
	select {
	case err := <-closed:
		if !errors.As(err, &leak) || len(leak.Leaks) != 1 || leak.Leaks[0].Bytes != held {
			t.Errorf("closing with open transits: %v", err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("Close waits for transits that the program has open")
	}
	if err := <-consumed; err != nil {
		t.Errorf("the claim that waited for a transit: %v", err)
	}
	if n := repo.Total(); n != 0 {
		t.Errorf("%d batches are left in the repository", n)
	}
	for i, b := range batches {
		if err := errors.Join(transits[i].Abort(), b.Drop()); err != nil {
			t.Error(err)
		}
	}
	for _, s := range eng.Reservations().Spaces().All() {
		if s.State().Used() != 0 {
			t.Errorf("%d bytes are left in %s", s.State().Used(), s.ID())
		}
	}
}

// TestCloseNamesHolders: handles and records that are open at Close are named with batch,
// plan, operator and owner, and counted with their units.
func TestCloseNamesHolders(t *testing.T) {
	eng, _ := openSmall(t, 1<<20, 1<<20)
	plan, err := eng.Plan("query-17")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := plan.Repository("hash-join", 2)
	if err != nil {
		t.Fatal(err)
	}
	rec := arrowgen.Ints(1, 1000, 1)
	defer rec.Release()
	for i, kind := range []tier.Kind{tier.GPU, tier.Host} {
		if err := repo.Put(t.Context(), 3+i, rec, repository.WithPlacement(reservation.AnyInTier(kind))); err != nil {
			t.Fatal(err)
		}
	}
	b, _ := repo.Peek(3)
	owner := reservation.NewOwner("probe-1")
	inPlace, err := eng.Mover().Acquire(owner.Context(t.Context()), b, reservation.AnyInTier(tier.GPU))
	if err != nil {
		t.Fatal(err)
	}
	if inPlace.Owner() != owner {
		t.Errorf("the handle is of %v, want the owner of the context", inPlace.Owner())
	}
	var drained *spillway.Handle
	for h, err := range repo.Drain(t.Context(), 4, tier.Host) {
		if err != nil {
			t.Fatal(err)
		}
		drained = h
		break
	}
	opened, err := eng.Mover().Record(t.Context(), drained)
	if err != nil {
		t.Fatal(err)
	}
	var leak *spillway.LeakError
	if err := eng.Close(); !errors.As(err, &leak) {
		t.Fatalf("closing with handles and a record: %v", err)
	}
	text := leak.Error()
	for _, want := range []string{
		"in gpu:0 8192 bytes of buffers (kept by 1 open handle)",
		"in host:0 8192 bytes of buffers (kept by 1 open handle and 1 open record)",
		`8192 bytes in gpu:0: handle on batch 1 of plan "query-17", operator hash-join:2, partition 3, owner "probe-1"`,
		`handle on batch 2 of plan "query-17", operator hash-join:2, partition 4`,
		`record on batch 2 of plan "query-17", operator hash-join:2, partition 4`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%q does not say %q", text, want)
		}
	}
	if stacks := strings.Contains(text, "TestCloseNamesHolders"); stacks != invariants.Enabled {
		t.Errorf("the report has stacks: %v, in an invariants build: %v\n%s", stacks, invariants.Enabled, text)
	}
	opened.Release()
	if err := errors.Join(drained.Close(), inPlace.Close()); err != nil {
		t.Error(err)
	}
	for _, s := range eng.Reservations().Spaces().All() {
		if holds := s.Books.Holds(); len(holds) != 0 || s.State().Used() != 0 {
			t.Errorf("%s ends with %d bytes and %v", s.ID(), s.State().Used(), holds)
		}
	}
}
