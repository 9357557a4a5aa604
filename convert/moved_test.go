package convert

import (
	"testing"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// movedBeforeLock makes a batch in a space which is moved to another space once, in the
// moment before it is locked for a task: then its clock is read.
func (m *machine) movedBeforeLock(t *testing.T, from, to tier.ID) *batch.Batch {
	t.Helper()
	rec := numbered(3, 2000)
	p, err := m.mover.Ingest(t.Context(), rec, reservation.Specific(from))
	if err != nil {
		t.Fatal(err)
	}
	var b *batch.Batch
	moved := false
	b, err = batch.New(batch.Options{ID: m.ids.Next(), Payload: p, Clock: func() int64 {
		if b != nil && !moved && b.State() == batch.TaskCreated {
			moved = true
			if err := m.mover.Move(t.Context(), b, reservation.Specific(to), ReasonWork); err != nil {
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

// TestAcquireLocksInTheSpaceNamed: a batch that leaves for another GPU right before it is
// locked is brought back, for that other GPU is not the one that was asked for.
func TestAcquireLocksInTheSpaceNamed(t *testing.T) {
	m, _ := twoGPUs(t, gpus{}, func(dev tier.Device) tier.Device { return dev })
	here, other := tier.ID{Kind: tier.GPU}, tier.ID{Kind: tier.GPU, Ordinal: 1}
	b := m.movedBeforeLock(t, here, other)
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
// where it is then.
func TestCloneFollowsItsBatch(t *testing.T) {
	m := newMachine(t, machineConfig{})
	b := m.movedBeforeLock(t, m.spaces[tier.GPU].ID(), m.spaces[tier.Host].ID())
	c, err := m.mover.Clone(t.Context(), b, nil)
	if err != nil {
		t.Fatal(err)
	}
	if at, want := c.Info().Space, m.spaces[tier.Host].ID(); at != want || b.Info().Space != want {
		t.Errorf("the clone is in %s, its batch in %s, want %s", at, b.Info().Space, want)
	}
	m.records[c.ID()] = m.records[b.ID()]
	if err := m.same(t.Context(), c); err != nil {
		t.Error(err)
	}
	if err := c.Drop(); err != nil {
		t.Error(err)
	}
}
