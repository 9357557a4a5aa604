package repository

import (
	"errors"
	"testing"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/tier"
)

// panicsOnRelease is a program's own form, whose release panics.
type panicsOnRelease struct{ form }

func (panicsOnRelease) Release() error { panic("in Release") }

// TestReleasePanics: whatever ends a batch whose release panics, all others end as well, and
// nothing stays in the repository.
func TestReleasePanics(t *testing.T) {
	for name, end := range map[string]func(r *Repository) error{
		"consume": func(r *Repository) error { return mustClaim(t, r, 3).Consume() },
		"close":   func(r *Repository) error { return r.Close(background) },
		"clear": func(r *Repository) error {
			_, err := r.m.Clear(background)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMover(t, 20, 20, 20)
			r := ensure(t, newPlan(t, m), "join")
			b, err := batch.New(batch.Options{ID: 1 << 40, Payload: panicsOnRelease{form{m.space(tier.Host)}}})
			check(t, err)
			check(t, r.PutBatch(0, b))
			putNumbers(t, r, 0, 2)
			var p *guard.PanicError
			if err := end(r); !errors.As(err, &p) || p.Value != "in Release" {
				t.Errorf("it returned %v", err)
			}
			if n := r.Total(); n != 0 || r.Bytes(tier.Host) != 0 {
				t.Errorf("%d batches of %d bytes are left", n, r.Bytes(tier.Host))
			}
		})
	}
}
