package repository

import (
	"errors"
	"testing"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/tier"
)

// failsOnRelease is a program's own form, whose release fails, or panics if err is nil.
type failsOnRelease struct {
	form
	err error
}

func (p failsOnRelease) Release() error {
	if p.err == nil {
		panic("in Release")
	}
	return p.err
}

// TestReleaseFails: whatever ends a batch whose release fails or panics gets that error, also if it
// looks like one of a batch that was dropped elsewhere, or is in transit. All others end as well,
// and nothing stays in the repository.
func TestReleaseFails(t *testing.T) {
	for name, end := range map[string]func(*Repository) error{
		"consume": func(r *Repository) error { return mustClaim(t, r, 3).Consume() },
		"close":   func(r *Repository) error { return r.Close(background) },
		"clear": func(r *Repository) error {
			left, err := r.m.Clear(background)
			if len(left) != 1 || left[0].Batches != 3 {
				t.Errorf("it reports %+v", left)
			}
			return err
		},
	} {
		for how, broken := range map[string]error{
			"panics":     nil,
			"dropped":    &batch.StateError{State: batch.Released, Op: "drop", Status: batch.MissingData},
			"in transit": &batch.StateError{State: batch.InTransit, Op: "drop", Status: batch.InvalidState},
		} {
			t.Run(name+" "+how, func(t *testing.T) {
				m := newMover(t, 20, 20, 20)
				r := ensure(t, newPlan(t, m), "join")
				b, err := batch.New(batch.Options{ID: 1 << 40, Payload: failsOnRelease{form{m.space(tier.Host)}, broken}})
				check(t, err)
				check(t, r.PutBatch(0, b))
				putNumbers(t, r, 0, 2)
				err = end(r)
				var p *guard.PanicError
				if broken != nil {
					wantError(t, err, broken)
				} else if !errors.As(err, &p) || p.Value != "in Release" {
					t.Errorf("it returned %v", err)
				}
				if n := r.Total(); n != 0 || r.Bytes(tier.Host) != 0 {
					t.Errorf("%d batches of %d bytes are left", n, r.Bytes(tier.Host))
				}
			})
		}
	}
}
