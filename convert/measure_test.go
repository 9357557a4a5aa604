package convert

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

func TestMeasure(t *testing.T) {
	gpu, ram, disk := tier.ID{Kind: tier.GPU}, tier.ID{Kind: tier.Host}, tier.ID{Kind: tier.Disk}
	every := [][2]tier.ID{{gpu, ram}, {gpu, disk}, {ram, gpu}, {ram, disk}, {disk, gpu}, {disk, ram}}
	for name, copies := range map[string]bool{"no copies": false, "copies": true} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, machineConfig{copies: copies})
			if err := m.registry.Unregister(ImageIn(tier.Disk), ImageIn(tier.GPU)); err != nil {
				t.Fatal(err)
			}
			rec := numbered(7, 2000)
			defer rec.Release()
			edges, err := m.mover.Measure(t.Context(), rec, 2)
			if err != nil {
				t.Fatal(err)
			}
			var got [][2]tier.ID
			for _, e := range edges {
				got = append(got, [2]tier.ID{e.From, e.To})
				missing := e.From == disk && e.To == gpu
				switch known := m.mover.Speed(e.From, e.To) > 0; {
				case missing != errors.Is(e.Err, ErrNoConverter) || !missing && e.Err != nil:
					t.Errorf("from %s to %s: %v", e.From, e.To, e.Err)
				case known == missing || missing == (e.Took > 0 && e.Bytes >= LogicalBytes(rec)):
					t.Errorf("from %s to %s: %d bytes in %v; the speed is known: %v", e.From, e.To, e.Bytes, e.Took, known)
				}
			}
			if !slices.Equal(got, every) {
				t.Errorf("measured %v, want %v", got, every)
			}
			for _, e := range m.mover.Stats() {
				if e.Batches != 3 || e.Copies != 0 {
					t.Errorf("%d moves from %s to %s, %d of them to copies; want one and twice one more", e.Batches, e.From, e.To, e.Copies)
				}
			}
		})
	}
}

// What cannot be in one of the spaces is said for its edges, and the others are measured.
func TestMeasureTooLarge(t *testing.T) {
	m := newMachine(t, machineConfig{gpu: 64 << 10})
	rec := numbered(7, int(m.spaces[tier.GPU].Capacity/10))
	defer rec.Release()
	edges, err := m.mover.Measure(t.Context(), rec, 1)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range edges {
		if small := e.From.Kind == tier.GPU || e.To.Kind == tier.GPU; small != errors.Is(e.Err, reservation.ErrExceeded) || !small && e.Err != nil {
			t.Errorf("from %s to %s: %v", e.From, e.To, e.Err)
		}
	}
}

func TestMeasureEnds(t *testing.T) {
	m := newMachine(t, machineConfig{})
	rec := numbered(7, 100)
	defer rec.Release()
	if _, err := m.mover.Measure(t.Context(), rec, 0); err == nil {
		t.Error("measured 0 times")
	}
	stop := errors.New("stop")
	ctx, cancel := context.WithCancelCause(t.Context())
	m.mover.cfg.Events = on(events.MoveEnded, func(events.Event) { cancel(stop) })
	if edges, err := m.mover.Measure(ctx, rec, 1); !errors.Is(err, stop) || edges != nil {
		t.Errorf("cancelled at its first move, Measure returned %v, %v", edges, err)
	}
	if err := m.mover.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := m.mover.Measure(t.Context(), rec, 1); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("once the mover is closed: %v", err)
	}
}
