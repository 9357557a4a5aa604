package convert

import (
	"context"
	"errors"
	"testing"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// failsOnRelease is a payload of a program's own, whose release fails when it has freed its memory.
type failsOnRelease struct{ strange }

var errRelease = errors.New("the file is gone")

func (p failsOnRelease) Release() error { return errors.Join(p.strange.Release(), errRelease) }

// TestCloneFails: whatever is wrong with a copy, or with the batch meanwhile, Clone returns an
// error and no byte is lost, which the machine looks at when it ends.
func TestCloneFails(t *testing.T) {
	own := func(s strange) batch.Payload { return s }
	copied := func(_ *machine, _ *batch.Batch, r *reservation.Reservation) (batch.Payload, error) {
		buf, err := r.Alloc(8192)
		return strange{buf}, err
	}
	dropped := func(m *machine, b *batch.Batch, r *reservation.Reservation) (batch.Payload, error) {
		p, err := copied(m, b, r)
		return p, errors.Join(err, b.Drop())
	}
	for name, tt := range map[string]struct {
		payload func(strange) batch.Payload
		convert func(*machine, *batch.Batch, *reservation.Reservation) (batch.Payload, error)
		want    error // nil: any
	}{
		"dropped, and its release fails":  {func(s strange) batch.Payload { return failsOnRelease{s} }, dropped, errRelease},
		"dropped, and its release panics": {func(s strange) batch.Payload { return panicsOnRelease{s} }, dropped, nil},
		"the payload itself": {own, func(_ *machine, b *batch.Batch, _ *reservation.Reservation) (batch.Payload, error) {
			return b.Info().Payload, nil
		}, batch.ErrUnmovable},
		"elsewhere": {own, func(m *machine, _ *batch.Batch, _ *reservation.Reservation) (batch.Payload, error) {
			return strange{m.draw(t, tier.Disk, 8192)}, nil
		}, batch.ErrUnmovable},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, machineConfig{})
			var b *batch.Batch
			err := m.registry.Register(Form{"strange", tier.Host}, Form{"strange", tier.Host}, func(_ context.Context, _ batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
				return tt.convert(m, b, r)
			})
			if err != nil {
				t.Fatal(err)
			}
			b, err = batch.New(batch.Options{ID: m.ids.Next(), Payload: tt.payload(strange{m.draw(t, tier.Host, 8192)})})
			if err != nil {
				t.Fatal(err)
			}
			c, err := m.mover.Clone(t.Context(), b, nil)
			if c != nil || err == nil || tt.want != nil && !errors.Is(err, tt.want) {
				t.Errorf("clone %v, error %v", c, err)
			}
			var u *batch.UnmovableError
			if errors.As(err, &u) && u.Batch != b.ID() {
				t.Errorf("the error is about batch %d", u.Batch)
			}
			if b.Info().State != batch.Released {
				if err := b.Drop(); err != nil {
					t.Error(err)
				}
			}
		})
	}
}
