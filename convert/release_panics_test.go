package convert

import (
	"context"
	"testing"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// panicsOnRelease is a payload of a program's own, whose release panics when it has freed its
// memory.
type panicsOnRelease struct{ strange }

func (p panicsOnRelease) Release() error {
	_ = p.strange.Release()
	panic("in Release")
}

// TestReleasePanics: a batch arrives although the release of its old form panics, and the caller
// gets its handle.
func TestReleasePanics(t *testing.T) {
	if invariants.Enabled {
		t.Skip("needs a build without -tags invariants, which ends with the panic")
	}
	ways := map[string]func(*Mover, context.Context, *batch.Batch, reservation.Strategy) (*batch.Handle, error){
		"acquire": (*Mover).Acquire,
		"consume": (*Mover).Consume,
		"move": func(m *Mover, ctx context.Context, b *batch.Batch, to reservation.Strategy) (*batch.Handle, error) {
			return nil, m.Move(ctx, b, to, ReasonWork)
		},
	}
	for name, bring := range ways {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, machineConfig{})
			img, err := m.mover.Ingest(t.Context(), numbered(1, 10), reservation.AnyInTier(tier.Host))
			if err != nil {
				t.Fatal(err)
			}
			err = m.registry.Register("strange", batch.GPUImage, func(ctx context.Context, _ batch.Payload, r reservation.Reservation) (batch.Payload, error) {
				return m.registry.convert(ctx, img, batch.GPUImage, r)
			})
			if err != nil {
				t.Fatal(err)
			}
			b, err := batch.New(batch.Options{ID: m.ids.Next(), Payload: panicsOnRelease{strange{m.draw(t, tier.Host, 8192)}}})
			if err != nil {
				t.Fatal(err)
			}
			h, err := bring(m.mover, t.Context(), b, reservation.AnyInTier(tier.GPU))
			if err != nil {
				t.Fatal(err)
			}
			if h != nil {
				if err := h.Close(); err != nil {
					t.Error(err)
				}
			}
			if now := b.Info(); now.State != batch.Released {
				if err := b.Drop(); err != nil {
					t.Error(err)
				}
			}
			if err := img.Release(); err != nil {
				t.Error(err)
			}
			if u := m.spaces[tier.GPU].Usage(); u.Used() != 0 {
				t.Errorf("the GPU has %+v", u)
			}
		})
	}
}

// TestErrandPanics: the room of an errand that panics is given back.
func TestErrandPanics(t *testing.T) {
	m := newMachine(t, machineConfig{})
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic was hidden")
			}
		}()
		_ = m.mover.inRoom(t.Context(), &errand{to: reservation.AnyInTier(tier.GPU), what: &takes{body: 8192},
			do: func(reservation.Reservation) error { panic("in the errand") }})
	}()
	if u := m.spaces[tier.GPU].Usage(); u.Used() != 0 {
		t.Errorf("the GPU has %+v", u)
	}
}

// draw returns memory of n bytes.
func (m *machine) draw(t *testing.T, k tier.Kind, n int64) *tier.Buffer {
	t.Helper()
	r, err := m.reservations.TryReserve(reservation.AnyInTier(k), n)
	if err != nil {
		t.Fatal(err)
	}
	buf, err := r.Alloc(n)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Release(); err != nil {
		t.Fatal(err)
	}
	return buf
}
