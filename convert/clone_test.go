package convert

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

func TestClone(t *testing.T) { onEachGPUPinnedOrNot(t, clone) }

func clone(t *testing.T, g gpus) {
	for _, k := range tier.Kinds() {
		t.Run(k.String(), func(t *testing.T) {
			m := newMachine(t, machineConfig{gpus: g})
			b := m.put(t, numbered(9, 5000), k)
			c, err := m.mover.Clone(t.Context(), b, nil)
			if err != nil {
				t.Fatal(err)
			}
			if c.ID() == b.ID() || c.Info().Space != b.Info().Space {
				t.Errorf("the clone is %+v of %+v", c.Info(), b.Info())
			}
			m.records[c.ID()] = m.records[b.ID()]
			if err := m.same(t.Context(), c); err != nil {
				t.Error(err)
			}
			if err := c.Drop(); err != nil {
				t.Error(err)
			}
			m.whole(t, b, k) // of its own
		})
	}
}

// TestCloneLeavesTasks: a pending task of the batch is there still after a clone was made, and its
// caller can lock for it.
func TestCloneLeavesTasks(t *testing.T) {
	m := newMachine(t, machineConfig{})
	b := m.put(t, numbered(1, 1000), tier.Host)
	if err := b.TryCreateTask(); err != nil {
		t.Fatal(err)
	}
	c, err := m.mover.Clone(t.Context(), b, nil)
	if err != nil {
		t.Fatal(err)
	}
	if now := b.Info(); now.Pending != 1 || now.State != batch.TaskCreated {
		t.Errorf("after the clone: %d tasks are pending, %s", now.Pending, now.State)
	}
	h, err := b.TryLock(tier.ID{Kind: tier.Host})
	if err != nil {
		t.Fatalf("the task's own lock: %v", err)
	}
	if err := h.Close(); err != nil {
		t.Error(err)
	}
	if err := c.Drop(); err != nil {
		t.Error(err)
	}
}

// TestCloneDoesNotWaitInVain: a clone that waits for room where its batch is no more follows the
// batch, or fails if that was dropped. Another caller has the room that the batch has left.
func TestCloneDoesNotWaitInVain(t *testing.T) {
	for name, tt := range map[string]leaving{
		"moved":                      {leave: func(m *machine, b *batch.Batch) error { return m.moveInto(t, tier.ID{Kind: tier.Host})(b) }},
		"dropped":                    {leave: func(_ *machine, b *batch.Batch) error { return b.Drop() }, want: batch.ErrState},
		"dropped with a handle open": {leave: func(_ *machine, b *batch.Batch) error { return b.Drop() }, open: true, want: batch.ErrState},
	} {
		t.Run(name, func(t *testing.T) { leavesWhileCloned(t, tt) })
	}
}

// leaving is how a batch leaves its space.
type leaving struct {
	leave func(*machine, *batch.Batch) error
	open  bool  // a handle on the batch stays open
	want  error // of its clone
}

func leavesWhileCloned(t *testing.T, tt leaving) {
	m := newMachine(t, machineConfig{})
	p, err := m.mover.Ingest(t.Context(), numbered(9, 5000), reservation.AnyInTier(tier.GPU))
	if err != nil {
		t.Fatal(err)
	}
	b, err := batch.New(batch.Options{ID: m.ids.Next(), Payload: p})
	if err != nil {
		t.Fatal(err)
	}
	gpu := m.spaces[tier.GPU]
	rest, err := m.reservations.TryReserve(
		reservation.AnyInTier(tier.GPU), gpu.State().Available/tier.Page*tier.Page, nil)
	if err != nil {
		t.Fatal(err)
	}
	var h *batch.Handle
	if tt.open {
		if h, err = b.Open(t.Context(), gpu.ID(), false); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeoutCause(t.Context(), 20*time.Second, errors.New("it takes for ever"))
	defer cancel()
	waiting := make(chan struct{}, 16)
	defer m.onWait(func(context.Context, tier.ID, int64) { waiting <- struct{}{} })()
	before, stop := context.WithCancel(ctx)
	defer stop()
	size := b.Info().Bytes
	first := make(chan *reservation.Reservation, 1)
	go func() {
		r, _ := m.reservations.Reserve(before, reservation.AnyInTier(tier.GPU), size, nil)
		first <- r
	}()
	<-waiting
	var c *batch.Batch
	ended := make(chan error, 1)
	go func() {
		var err error
		c, err = m.mover.Clone(ctx, b, nil)
		ended <- err
	}()
	<-waiting
	if err := tt.leave(m, b); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; !errors.Is(err, tt.want) {
		t.Errorf("the clone ended with %v, want %v", err, tt.want)
	} else if c != nil {
		if at := c.Info().Space.Kind; at != tier.Host {
			t.Errorf("the clone is in a %s", at)
		}
		if err := errors.Join(c.Drop(), b.Drop()); err != nil {
			t.Error(err)
		}
	}
	stop()
	r := <-first
	if err := errors.Join(r.Release(), rest.Release()); err != nil {
		t.Error(err)
	}
	if h != nil {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	}
}
