package convert

import (
	"context"
	"errors"
	"runtime"
	"testing"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// movedBeforeLock makes a batch in a space which is moved once, in the moment before it is
// locked: then its clock is read.
func (m *machine) movedBeforeLock(t *testing.T, from tier.ID, move func(*batch.Batch) error) *batch.Batch {
	t.Helper()
	rec := numbered(3, 2000)
	p, err := m.mover.Ingest(t.Context(), rec, reservation.Specific(from))
	if err != nil {
		t.Fatal(err)
	}
	var b *batch.Batch
	moved := false
	b, err = batch.New(batch.Options{ID: m.ids.Next(), Payload: p, Clock: func() int64 {
		if b != nil && !moved {
			moved = true
			if err := move(b); err != nil {
				t.Error(err)
			}
		}
		return 0
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if !moved {
			t.Error("the batch was not moved")
		}
		if err := b.Drop(); err != nil {
			t.Error(err)
		}
	})
	if m.records != nil {
		m.records[b.ID()] = rec
	}
	return b
}

// moveInto moves batches to a space.
func (m *machine) moveInto(t *testing.T, to tier.ID) func(*batch.Batch) error {
	return func(b *batch.Batch) error { return m.mover.Move(t.Context(), b, reservation.Specific(to)) }
}

// TestAcquireLocksInTheSpaceNamed: a batch that leaves for another GPU right before it is
// locked is brought back, for that other GPU is not the one that was asked for.
func TestAcquireLocksInTheSpaceNamed(t *testing.T) {
	m, _ := twoGPUs(t, gpus{}, func(dev tier.Device) tier.Device { return dev })
	here, other := tier.ID{Kind: tier.GPU}, tier.ID{Kind: tier.GPU, Ordinal: 1}
	b := m.movedBeforeLock(t, here, m.moveInto(t, other))
	h, err := m.mover.Acquire(t.Context(), b, reservation.Specific(here))
	if err != nil {
		t.Fatal(err)
	}
	if at := h.Space().ID(); at != here {
		t.Errorf("the handle is in %s, want %s", at, here)
	}
	if err := h.Close(); err != nil {
		t.Error(err)
	}
}

// TestCloneFollowsItsBatch: a batch that is moved while its clone waits for room is cloned
// where it is then, and in the form that it has.
func TestCloneFollowsItsBatch(t *testing.T) {
	follows := func(t *testing.T, m *machine, from tier.ID, move func(*batch.Batch) error) {
		t.Helper()
		b := m.movedBeforeLock(t, from, move)
		c, err := m.mover.Clone(t.Context(), b, nil)
		if err != nil {
			t.Fatal(err)
		}
		if at, want := c.Info().Space, b.Info().Space; at != want || c.Info().Payload.Type() != b.Info().Payload.Type() {
			t.Errorf("the clone is a %s in %s, its batch a %s in %s", c.Info().Payload.Type(), at, b.Info().Payload.Type(), want)
		}
		if m.records != nil {
			m.records[c.ID()] = m.records[b.ID()]
			if err := m.same(t.Context(), c); err != nil {
				t.Error(err)
			}
		}
		if err := c.Drop(); err != nil {
			t.Error(err)
		}
	}
	gpu, host := tier.ID{Kind: tier.GPU}, tier.ID{Kind: tier.Host}
	t.Run("to another tier", func(t *testing.T) {
		m := newMachine(t, machineConfig{})
		follows(t, m, gpu, m.moveInto(t, host))
	})
	t.Run("to another GPU", func(t *testing.T) {
		m, _ := twoGPUs(t, gpus{}, func(dev tier.Device) tier.Device { return dev })
		follows(t, m, gpu, m.moveInto(t, tier.ID{Kind: tier.GPU, Ordinal: 1}))
	})
	t.Run("to another form", func(t *testing.T) {
		m := newMachine(t, machineConfig{codec: CodecS2})
		follows(t, m, host, func(b *batch.Batch) error {
			return m.mover.MoveAs(t.Context(), b, reservation.Specific(host), batch.CompressedImage)
		})
	})
}

// TestMoveOfABatchThatAnotherBrings: a move that has its room when another one brings the batch moves
// nothing, and gives the room back.
func TestMoveOfABatchThatAnotherBrings(t *testing.T) {
	ended := make(chan events.Event, 8)
	m := newMachine(t, machineConfig{events: on(events.MoveEnded, func(e events.Event) { ended <- e })})
	b, gpu := m.put(t, numbered(1, 1000), tier.Host), m.spaces[tier.GPU]
	need := gpu.Charge(b.Info().Descriptor.Body)
	other := make(chan error, 1)
	err := m.registry.Wrap(ImageIn(tier.Host), ImageIn(tier.GPU), func(inner Func) Func {
		return func(ctx context.Context, src batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
			go func() { other <- m.mover.Move(t.Context(), b, toGPU) }()
			for gpu.State().Reserved < 2*need {
				runtime.Gosched()
			}
			return inner(ctx, src, r)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(m.mover.Move(t.Context(), b, toGPU), <-other); err != nil {
		t.Fatal(err)
	}
	if n := len(ended); n != 1 {
		t.Errorf("there were %d moves", n)
	}
	m.whole(t, b, tier.GPU)
}

// TestMoveToAFormThatDoesNotFit: the event of a move whose converter made another batch has the
// error.
func TestMoveToAFormThatDoesNotFit(t *testing.T) {
	ended := make(chan events.Event, 8)
	m := newMachine(t, machineConfig{events: on(events.MoveEnded, func(e events.Event) { ended <- e })})
	b := m.put(t, numbered(1, 1000), tier.Host)
	err := m.registry.Wrap(ImageIn(tier.Host), ImageIn(tier.GPU), func(Func) Func {
		return func(_ context.Context, src batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
			d := *src.(*batch.Image).Descriptor()
			d.Rows--
			buf, err := r.Alloc(d.Body, d.Cuts()...)
			return batch.NewImage(&d, buf, r.Space()), err
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.mover.Move(t.Context(), b, toGPU); !errors.Is(err, batch.ErrUnmovable) {
		t.Errorf("the move ended with %v", err)
	}
	if e := <-ended; e.Err == nil || e.Bytes != 0 {
		t.Errorf("the event is %+v", e)
	}
	m.whole(t, b, tier.Host)
}

// TestEvictionForAWaitThatHasEnded: an eviction whose context ends because the wait of another move
// has become useless ends, too, and does not look at its own batch again.
func TestEvictionForAWaitThatHasEnded(t *testing.T) {
	m := newMachine(t, machineConfig{})
	b := m.put(t, numbered(1, 1000), tier.Host)
	ctx, cancel := context.WithCancelCause(t.Context())
	tries := 0
	err := m.registry.Wrap(ImageIn(tier.Host), ImageIn(tier.Disk), func(inner Func) Func {
		return func(ctx context.Context, src batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
			if tries++; tries > 1 {
				return nil, errors.New("it tries again")
			}
			cancel(errStale)
			return inner(ctx, src, r)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	err = evictOne(ctx, m.mover, b, tier.ID{Kind: tier.Disk}, ReasonDemand)
	if !errors.Is(err, errStale) || tries != 1 {
		t.Errorf("%d tries, %v", tries, err)
	}
	m.whole(t, b, tier.Host)
}
