package convert

import (
	"slices"
	"sync"
	"testing"

	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// What is written ahead is told when it is there, and when it was used or was in vain, to the byte.
func TestAheadIsTold(t *testing.T) {
	var mu sync.Mutex
	var all []events.Event
	m := newMachine(t, machineConfig{copies: true, events: func(e events.Event) {
		mu.Lock()
		defer mu.Unlock()
		switch e.Kind {
		case events.CopyMade, events.CopyUsed, events.CopyDropped, events.AheadUsed, events.AheadWasted:
			all = append(all, e)
		}
	}})
	b := m.put(t, numbered(1, 10_000), tier.Host)
	body := b.Info().Descriptor.Body
	write := func() {
		t.Helper()
		if n, err := m.ahead(t.Context(), b); n != body || err != nil {
			t.Fatal(n, err)
		}
	}
	told := func(what string, want ...events.Kind) {
		t.Helper()
		mu.Lock()
		defer mu.Unlock()
		var kinds []events.Kind
		for _, e := range all {
			kinds = append(kinds, e.Kind)
			if e.Batch != uint64(b.ID()) || e.Bytes != body || e.To.Kind != tier.Disk || e.From.Kind != tier.Host {
				t.Errorf("%s: %+v", what, e)
			}
		}
		if !slices.Equal(kinds, want) {
			t.Errorf("%s: %v, want %v", what, kinds, want)
		}
		all = nil
	}
	write()
	told("written", events.CopyMade)
	m.spaces[tier.Disk].Inside().DropCopies()
	told("dropped", events.AheadWasted, events.CopyDropped)
	write()
	told("written again", events.CopyMade)
	if err := m.mover.Move(t.Context(), b, reservation.AnyInTier(tier.Disk)); err != nil {
		t.Fatal(err)
	}
	told("used", events.AheadUsed, events.CopyUsed)
}
