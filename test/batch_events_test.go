package test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// TestBatchEvents: puts, uses, hints and drops are events of their batch, in the order of the calls,
// with its space, bytes and origin. Moves come in between.
func TestBatchEvents(t *testing.T) {
	t.Parallel()
	eng, r := telling(t, func(c *spillway.Config) { c.WriteAhead = -1 })
	_, repo := putMany(t, eng, "query", "build", 2)
	b, _ := repo.Peek(0)
	bytes := b.Info().Bytes
	b.Hint(batch.Never)
	b.Hint(batch.Never) // changes nothing
	b.Hint(0)
	b.Hint(batch.Stay)
	if err := eng.Mover().Move(t.Context(), b, reservation.AnyInTier(tier.Host)); err != nil {
		t.Fatal(err)
	}
	first, err := b.Open(t.Context(), tier.ID{}, false) // where it is
	if err != nil {
		t.Fatal(err)
	}
	second, err := b.Open(t.Context(), tier.ID{}, false)
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range []*spillway.Handle{first, second} {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	}
	h, err := eng.Mover().Acquire(t.Context(), b, reservation.AnyInTier(tier.GPU)) // with a move
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Close(); err != nil {
		t.Error(err)
	}
	if err := b.Drop(); err != nil {
		t.Error(err)
	}
	repo.CloseInput()
	for h, err := range repo.Drain(t.Context(), 0, tier.GPU) { // takes the other one
		if err != nil {
			t.Fatal(err)
		}
		if h.Batch() == b {
			t.Error("a batch that was dropped is drained")
		}
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	}
	closeEngine(t, eng)
	lines := make(map[uint64][]string)
	for _, e := range r.of(events.BatchPut, events.BatchUsed, events.BatchHinted, events.BatchDropped, events.MoveEnded) {
		if e.Plan != "query" || e.Operator != "build" || e.At.IsZero() || e.Context == nil {
			t.Errorf("%+v", e)
		}
		if e.Kind == events.MoveEnded {
			lines[e.Batch] = append(lines[e.Batch], fmt.Sprint(e.Kind, " ", e.To))
			continue
		}
		if e.Bytes != bytes {
			t.Errorf("a batch of %d bytes: %s", bytes, e)
		}
		lines[e.Batch] = append(lines[e.Batch], fmt.Sprint(e.Kind, " ", e.To, " ", e.Hint))
	}
	want := []string{
		"batch put gpu:0 0",
		fmt.Sprint("batch hinted gpu:0 ", batch.Never),
		"batch hinted gpu:0 0",
		fmt.Sprint("batch hinted gpu:0 ", batch.Stay),
		"move ended host:0",
		"batch used host:0 0",
		"batch used host:0 0",
		"move ended gpu:0",
		"batch used gpu:0 0",
		"batch dropped gpu:0 0",
	}
	if got := lines[uint64(b.ID())]; !slices.Equal(got, want) {
		t.Errorf("got\n%q, want\n%q", got, want)
	}
	delete(lines, uint64(b.ID()))
	for id, got := range lines {
		if want := []string{
			"batch put gpu:0 0",
			"batch used gpu:0 0",
			"batch dropped gpu:0 0",
		}; !slices.Equal(
			got,
			want,
		) {
			t.Errorf("batch %d: got\n%q, want\n%q", id, got, want)
		}
	}
}

// TestNoBatchWasPut: a batch that is refused for its id has no event. Batches that the engine's Close
// drops have one.
func TestNoBatchWasPut(t *testing.T) {
	t.Parallel()
	eng, r := telling(t, nil)
	_, repo := putMany(t, eng, "query", "build", 2)
	b, _ := repo.Peek(0)
	rec := arrowgen.Ints(1, 100, 1)
	defer rec.Release()
	payload, err := eng.Mover().Ingest(t.Context(), rec, reservation.AnyInTier(tier.GPU))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := batch.New(batch.Options{ID: b.ID(), Payload: payload, Observer: eng.Observer()}); err == nil {
		t.Error("a second batch of an id was made")
	}
	if err := payload.Release(); err != nil {
		t.Error(err)
	}
	closeEngine(t, eng)
	if put, dropped := len(r.of(events.BatchPut)), len(r.of(events.BatchDropped)); put != 2 || dropped != 2 {
		t.Errorf("%d batches were put and %d dropped, want 2 and 2", put, dropped)
	}
}
