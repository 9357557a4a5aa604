package admission

import (
	"cmp"
	"fmt"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// Grant is the right to run a task, with the memory that was reserved for it. It is safe for
// concurrent use. It must be ended once, by Done or Release.
type Grant struct {
	a        *Admitter
	r        reservation.Reservation
	e        Estimate
	need     int64
	work     int64 // the part of need for output and overhead, before it was charged
	reserved int64
	alone    bool

	mu         lockrank.Mutex[lockrank.Reservation] // guards all below
	inputsHere bool
	base       int64 // drawn when the inputs were here
	peak       int64 // the most that was drawn, inputs included
	output     int64 // the sum of Produced; None before
	ended      bool
}

// Reservation returns what the task draws from, in the space where it runs. It must not be
// released: the grant does that.
func (g *Grant) Reservation() reservation.Reservation { return g.r }

// Owner returns the task's owner, by which deadlocks between tasks are found. It has one goroutine
// unless SetWorkers changes that. Waits with its Context are the task's.
func (g *Grant) Owner() *reservation.Owner { return g.e.Owner }

// Need returns the estimated need of the task in bytes, as charged; math.MaxInt64 if the sum
// overflows. The reservation is smaller if the space can never have so much.
func (g *Grant) Need() int64 { return g.need }

// Alloc draws a buffer from the reservation and measures how much is drawn then.
func (g *Grant) Alloc(size int64) (*tier.Buffer, error) {
	b, err := g.r.Alloc(size)
	if err == nil {
		g.Peak()
	}
	return b, err
}

func (g *Grant) drawn() int64 { return max(0, g.r.Bytes()-g.r.Unused()) }

// InputsHere records that all inputs are in the space. The bytes drawn so far belong to
// the inputs and do not count for the peak.
func (g *Grant) InputsHere() {
	drawn := g.drawn()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.base, g.peak, g.inputsHere = drawn, drawn, true
}

// Peak returns the most that was drawn at once beside the inputs. It is measured by Alloc and by
// Peak: a caller that draws from the reservation itself calls Peak after a large draw.
func (g *Grant) Peak() int64 {
	drawn := g.drawn()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.peak = max(g.peak, drawn)
	return max(0, g.peak-g.base)
}

// Produced records that the task has made so many bytes of output. The estimator learns the sum,
// unless Done gives another. A task that makes no output calls Produced(0).
func (g *Grant) Produced(bytes int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.output = max(0, g.output) + max(0, bytes)
}

// Done ends a task that has succeeded: the estimator learns from it, and everything is released.
// Buffers that the task has drawn stay until they are freed. A second end changes nothing and
// returns tier.ErrReleased (an invariants build panics).
func (g *Grant) Done(m Measured) error { return g.finish(&m) }

// Release is Done for a task from which nothing is to be learned.
func (g *Grant) Release() error { return g.finish(nil) }

func (g *Grant) finish(m *Measured) error {
	again, err := g.end(m)
	if again && invariants.Enabled {
		panic("admission: a grant was ended twice")
	}
	return err
}

// end releases everything, unless the grant was ended before. If m is not nil, the estimator learns
// from it.
func (g *Grant) end(m *Measured) (again bool, err error) {
	peak, space := g.Peak(), g.r.Space()
	g.mu.Lock()
	again, g.ended = g.ended, true
	g.mu.Unlock()
	if again {
		return true, fmt.Errorf("admission: the grant was %w", tier.ErrReleased)
	}
	err = g.r.Release() // first, so that a waiter that gets the thread finds the room
	g.a.change(func() {
		g.a.stats.Running--
		g.a.running[space]--
	})
	if m != nil && err == nil {
		m.Input, m.Peak = cmp.Or(m.Input, g.e.input()), max(m.Peak, peak)
		g.a.panics.Do("Estimator.Observe", func() { g.a.rules.Estimator.Observe(g.e.Operator, *m) })
	}
	return false, err
}
