package admission_test

import (
	"errors"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/tier"
)

// TestLostSpaces: tasks run in the spaces that are left, also those that waited for a space when it
// was lost. With none left all get the error.
func TestLostSpaces(t *testing.T) {
	errGone := errors.New("gone")
	half := admission.Config{Rules: admission.Rules{Threshold: 0.5}}
	lose := func(s *tier.Space) { s.Pool.(pool).Lose(errGone) }
	synctest.Test(t, func(t *testing.T) { // another space will do, with all that it has
		w := newWorld(t, setup{cap: 1000, gpus: 2, Config: half, changed: synctest.Wait})
		if err := w.gpus[1].SetLimit(400); err != nil {
			t.Fatal(err)
		}
		first := w.admit(exactly(100)).runs()
		c := w.admit(exactly(450))
		c.waits()
		lose(w.gpus[0])
		g := c.runs()
		if r := g.Reservation(); r.Space() != w.gpus[1] || r.Bytes() != 400 {
			t.Errorf("it runs in %s with %d bytes", r.Space().ID(), r.Bytes())
		}
		w.end(first)
		d, e := w.admit(exactly(100)), w.admit(exactly(100))
		d.waits()
		e.waits()
		lose(w.gpus[1])
		d.fails(tier.ErrLost)
		e.fails(errGone)
		w.admit(exactly(0)).fails(tier.ErrLost)
		w.end(g)
	})
	synctest.Test(t, func(t *testing.T) { // with a task that waits only for the end of others
		w := newWorld(t, setup{cap: 1000, Config: half})
		first := w.admit(exactly(100)).runs()
		c := w.admit(exactly(600))
		c.waits()
		lose(w.gpus[0])
		c.fails(tier.ErrLost)
		w.end(first)
	})
}
