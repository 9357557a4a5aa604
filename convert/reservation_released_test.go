package convert

import (
	"context"
	"errors"
	"testing"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// TestConverterReleasesTheReservation: that is not its own, but the batch arrives, and the caller
// gets the handle and no error.
func TestConverterReleasesTheReservation(t *testing.T) {
	if invariants.Enabled {
		t.Skip("needs a build without -tags invariants, which panics")
	}
	for name, open := range map[string]func(*Mover, context.Context, *batch.Batch, reservation.Strategy) (*batch.Handle, error){
		"acquire": (*Mover).Acquire,
		"consume": (*Mover).Consume,
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, machineConfig{})
			err := m.registry.Register(Form{"strange", tier.Host}, ImageIn(tier.GPU), func(_ context.Context, _ batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
				buf, err := r.Alloc(8192)
				return strange{buf}, errors.Join(err, r.Release())
			})
			if err != nil {
				t.Fatal(err)
			}
			b, err := batch.New(batch.Options{ID: m.ids.Next(), Payload: strange{m.draw(t, tier.Host, 8192)}})
			if err != nil {
				t.Fatal(err)
			}
			h, err := open(m.mover, t.Context(), b, reservation.AnyInTier(tier.GPU))
			if err != nil || h == nil {
				t.Fatalf("handle %v, error %v", h, err)
			}
			if at := h.Space().Kind(); at != tier.GPU {
				t.Errorf("the batch is in a %s", at)
			}
			if err := h.Close(); err != nil {
				t.Error(err)
			}
			if name == "acquire" {
				if err := b.Drop(); err != nil {
					t.Error(err)
				}
			}
		})
	}
}
