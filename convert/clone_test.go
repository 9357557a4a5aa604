package convert

import (
	"testing"

	"github.com/spillway-db/spillway/batch"
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
