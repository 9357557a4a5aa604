package test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// waiting is the fixture for tests of waiters.
type waiting struct {
	*losable
	ctx   context.Context
	begun chan struct{} // one for each waiter that has begun
}

func (l *losable) waiting(t *testing.T) waiting {
	t.Helper()
	w := waiting{losable: l, begun: make(chan struct{}, 16)}
	var cancel func()
	w.ctx, cancel = context.WithTimeoutCause(t.Context(), 30*time.Second, errors.New("it takes for ever"))
	t.Cleanup(cancel)
	l.begun.Store(&w.begun)
	return w
}

// take reserves bytes of the only space of a tier; all that are free if n is 0.
func (w waiting) take(k tier.Kind, n int64) *reservation.Reservation {
	w.t.Helper()
	s := w.eng.Reservations().Spaces().InTier(k)[0]
	if n == 0 {
		n = s.State().Available / tier.Page * tier.Page
	}
	r, err := w.eng.Reserve(w.ctx, reservation.Specific(s.ID()), n)
	if err != nil {
		w.t.Fatal(err)
	}
	return r
}

// start calls f and returns when it waits for room.
func (w waiting) start(f func() error) (result chan error) {
	w.t.Helper()
	result = make(chan error, 1)
	go func() { result <- f() }()
	select {
	case <-w.begun:
	case err := <-result:
		w.t.Fatalf("it does not wait: %v", err)
	}
	return result
}

func release(t *testing.T, all ...interface{ Release() error }) {
	t.Helper()
	for _, r := range all {
		if err := r.Release(); err != nil {
			t.Error(err)
		}
	}
}

// TestOversizedWithoutTheLostGPU: what fits no other space of its strategy goes to a slower tier,
// whether it waited when the GPU was lost or came afterwards.
func TestOversizedWithoutTheLostGPU(t *testing.T) {
	w := openLosable(t, 1, 8<<20).waiting(t)
	record := numberedRecord(1, 60_000, wordList(1, 10)) // more than there is host memory
	gpu := w.take(tier.GPU, 0)
	put := func(partition int) error { return w.repo.Put(w.ctx, partition, record, in(tier.GPU, tier.Host)) }
	first := w.start(func() error { return put(0) })
	w.gpus[0].Lose(errFellOff)
	if err := errors.Join(<-first, put(1)); err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		b, _ := w.repo.Peek(i)
		if at := b.Info().Space; at.Kind != tier.Disk {
			t.Errorf("batch %d lies in %s", i, at)
		}
	}
	release(t, gpu)
	w.end(2)
}

// TestOnePieceOfALostGPU: a waiter for room in one piece there goes on waiting for its other
// spaces, in whose lines it has been all the time.
func TestOnePieceOfALostGPU(t *testing.T) {
	const piece = 64 << 10
	w := openLosable(t, 1, 1<<20).waiting(t)
	r := w.take(tier.GPU, 14*piece)
	var holes, held []interface{ Release() error }
	for i := range 14 {
		b, err := r.Alloc(piece)
		if err != nil {
			t.Fatal(err)
		}
		if i%2 == 0 {
			holes = append(holes, b)
		} else {
			held = append(held, b)
		}
	}
	release(t, append(holes, r)...)
	host := w.take(tier.Host, 0)
	record := numberedRecord(1, 5000, wordList(1, 10))
	put := w.start(func() error { return w.repo.Put(w.ctx, 0, record, in(tier.GPU, tier.Host)) })
	w.gpus[0].Lose(errFellOff)
	release(t, host)
	if err := <-put; err != nil {
		t.Fatal(err)
	}
	b, _ := w.repo.Peek(0)
	if at := b.Info().Space; at.Kind != tier.Host {
		t.Errorf("the batch lies in %s", at)
	}
	w.same(b, record)
	release(t, held...)
	w.end(1)
}

// TestWayOutOfALostGPU: a waiter elsewhere for room for a batch from there gets the error.
func TestWayOutOfALostGPU(t *testing.T) {
	w := openLosable(t, 1, 1<<20).waiting(t)
	onHost := reservation.AnyInTier(tier.Host)
	record := numberedRecord(1, 1000, wordList(1, 10))
	moved, acquired, opened := w.put(0, record, in(tier.GPU)), w.put(1, record, in(tier.GPU)), w.put(2, record, in(tier.GPU))
	h, err := w.eng.Mover().Acquire(w.ctx, opened, onAnyGPU)
	if err != nil {
		t.Fatal(err)
	}
	host := w.take(tier.Host, 0)
	all := []chan error{
		w.start(func() error { return w.eng.Mover().Move(w.ctx, moved, onHost) }),
		w.start(func() error { _, err := w.eng.Mover().Acquire(w.ctx, acquired, onHost); return err }),
		w.start(func() error { _, err := w.eng.Mover().Record(w.ctx, h); return err }),
	}
	w.gpus[0].Lose(errFellOff)
	for _, result := range all {
		err := <-result
		isLost(t, "who waits", err)
		if errors.Is(err, context.Canceled) {
			t.Errorf("nobody has cancelled anything: %v", err)
		}
	}
	release(t, host)
	if err := h.Close(); err != nil {
		t.Error(err)
	}
	w.end(3)
}

// TestRoomBesideALostGPU: a dictionary that the host has needs no room there, though the GPU that
// is lost has none.
func TestRoomBesideALostGPU(t *testing.T) {
	w := openLosable(t, 1, 8<<20).waiting(t)
	words := wordList(1, 20_000)
	b := w.put(0, numberedRecord(1, 1000, words), in(tier.Host))
	defer b.Subscribe()() // it stays
	w.gpus[0].Lose(errFellOff)
	free := w.eng.Reservations().Spaces().InTier(tier.Host)[0].State().Available
	host := w.take(tier.Host, (free-200<<10)/tier.Page*tier.Page)
	record := numberedRecord(2, 1000, words)
	put := make(chan error, 1)
	go func() { put <- w.repo.Put(w.ctx, 1, record, in(tier.GPU, tier.Host)) }()
	select {
	case <-w.begun:
		t.Error("it waits for room")
		release(t, host)
		<-put
	case err := <-put:
		if err != nil {
			t.Error(err)
		}
		release(t, host)
	}
	w.end(2)
}

// TestAdoptingFromALostGPU: a table whose shape cannot be read any more is reported lost, and stays
// its owner's.
func TestAdoptingFromALostGPU(t *testing.T) {
	l := openLosable(t, 1, 1<<20)
	l.gpus[0].Lose(errFellOff)
	space := l.eng.Reservations().Spaces().InTier(tier.GPU)[0]
	schema := arrow.NewSchema([]arrow.Field{{Name: "s", Type: arrow.BinaryTypes.String}}, nil)
	column := &convert.DeviceArray{Length: 10, Buffers: []convert.DeviceRange{{}, {Addr: 4096, Length: 44}, {Addr: 8192, Length: convert.Unknown}}}
	_, err := l.eng.Mover().AdoptTable(t.Context(), convert.DeviceTable{
		Space: space, Schema: schema, Rows: 10, Columns: []*convert.DeviceArray{column}, Release: func() { t.Error("its owner has it") },
	})
	isLost(t, "adopting a table", err)
	l.end(0)
}

// TestReadingFromALostGPU: readers of a batch that is open there get the error.
func TestReadingFromALostGPU(t *testing.T) {
	l := openLosable(t, 1, 1<<20)
	b, mover := l.put(0, numberedRecord(1, 1000, wordList(1, 1500)), in(tier.GPU)), l.eng.Mover()
	h, err := mover.Acquire(t.Context(), b, onAnyGPU)
	if err != nil {
		t.Fatal(err)
	}
	l.gpus[0].Lose(errFellOff)
	_, err = mover.Record(t.Context(), h)
	isLost(t, "opening it", err)
	_, err = mover.Columns(t.Context(), h, convert.Selection{Fields: []int{0}})
	isLost(t, "opening a column", err)
	_, err = mover.Digest(t.Context(), h)
	isLost(t, "its digest", err)
	if err := h.Close(); err != nil {
		t.Error(err)
	}
	l.end(1)
}
