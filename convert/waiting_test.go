package convert

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// A wait for room costs reservations elsewhere nothing: each change of a space calls all its
// subscribers, and records that wait are not among them.
func TestWaitingRecordsSubscribeToNothing(t *testing.T) {
	const waiting = 300
	m := newMachine(t, machineConfig{host: 1 << 20})
	b := m.put(t, numbered(1, 3000), tier.GPU)
	before := make(map[tier.Kind]int)
	for k, s := range m.spaces {
		before[k] = s.Inside().Subscribers()
	}
	all, err := m.reservations.TryReserve(reservation.AnyInTier(tier.Host), m.spaces[tier.Host].Available())
	if err != nil {
		t.Fatal(err)
	}
	h, err := m.mover.Acquire(t.Context(), b, reservation.AnyInTier(tier.GPU))
	if err != nil {
		t.Fatal(err)
	}
	ours := errors.New("ours")
	ctx, cancel := context.WithCancelCause(t.Context())
	begun := make(chan struct{}, waiting)
	defer m.reservations.OnDemand(func() { begun <- struct{}{} })()
	var wg sync.WaitGroup
	for range waiting {
		wg.Go(func() {
			if _, err := m.mover.Record(ctx, h); !errors.Is(err, ours) {
				t.Errorf("it waited for room: %v", err)
			}
		})
	}
	for range waiting {
		<-begun
	}
	for k, s := range m.spaces {
		if n := s.Inside().Subscribers(); n != before[k] {
			t.Errorf("%d subscribe to %s while %d records wait, %d did before", n, s.ID(), waiting, before[k])
		}
	}
	cancel(ours)
	wg.Wait()
	if err := errors.Join(h.Close(), all.Release()); err != nil {
		t.Error(err)
	}
}

// A mover that is closed has ended its subscriptions.
func TestClosedMoverSubscribesToNothing(t *testing.T) {
	m := newMachine(t, machineConfig{})
	gpu := m.spaces[tier.GPU]
	before := gpu.Inside().Subscribers()
	cfg := m.mover.cfg
	cfg.Registry = new(Registry)
	other, err := NewMover(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Close(); err != nil {
		t.Fatal(err)
	}
	if n := gpu.Inside().Subscribers(); n != before {
		t.Errorf("%d subscriptions are left, %d were there before", n, before)
	}
}
