package admission

import (
	"cmp"
	"fmt"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// Grant is the right to run a task, with the memory that was reserved for it. It is safe for
// concurrent use. It must be ended once, by Done or Release.
type Grant struct {
	a     *Admitter
	r     *reservation.Reservation
	e     Estimate
	plan  plan
	work  int64 // the part of the need for output and overhead, before it was charged
	alone bool
	// hasAll reports whether no space could ever give the task more.
	hasAll bool
	ended  atomic.Bool

	mu         lockrank.Mutex[lockrank.Reservation] // guards all below
	inputsHere bool
	base       int64 // drawn when the inputs were here
	peak       int64 // the most that was drawn besides base
	output     int64 // the sum of Produced; None before
}

// Reservation returns the task's reservation, in the space where it runs. It must not be released:
// the grant does that.
func (g *Grant) Reservation() *reservation.Reservation { return g.r }

// Owner returns the task's owner, by which deadlocks between tasks are found. It has one goroutine
// unless SetWorkers changes that. Waits with its Context are the task's.
func (g *Grant) Owner() *reservation.Owner { return g.e.Owner }

// Need returns the estimated need of the task in bytes, as charged unless the space is smaller;
// math.MaxInt64 if the sum overflows. The reservation is smaller if the space can never have so
// much.
func (g *Grant) Need() int64 { return g.plan.need }

// Alloc draws a buffer from the reservation and measures how much is drawn then.
func (g *Grant) Alloc(size int64) (*tier.Buffer, error) {
	b, err := g.r.Alloc(size)
	if err == nil {
		g.Peak()
	}
	return b, err
}

// InputsHere records that all inputs are in the space. The bytes drawn so far belong to
// the inputs and do not count for the peak.
func (g *Grant) InputsHere() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.base, g.peak, g.inputsHere = g.r.Bytes()-g.r.Unused(), 0, true
}

// Peak returns the most that was drawn at once besides the inputs. It is measured by Alloc and by
// Peak: a caller that draws from the reservation itself calls Peak after a large draw.
func (g *Grant) Peak() int64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.peak = max(g.peak, g.r.Bytes()-g.r.Unused()-g.base)
	return g.peak
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
// returns tier.ErrReleased.
func (g *Grant) Done(m Measured) error { return g.end(&m) }

// Release is Done for a task from which nothing is to be learned.
func (g *Grant) Release() error { return g.end(nil) }

func (g *Grant) end(m *Measured) error {
	peak := g.Peak()
	if g.ended.Swap(true) {
		return fmt.Errorf("admission: the grant was %w", tier.ErrReleased)
	}
	err := g.r.Release() // first, so that a waiter that gets the thread finds the room
	g.a.change(func() {
		g.a.stats.Running--
		g.a.running[g.plan.Space]--
	})
	if m != nil && err == nil {
		m.Input, m.Peak = cmp.Or(m.Input, g.e.Input), max(m.Peak, peak)
		g.a.panics.Do("Estimator.Observe", func() { g.a.rules.Estimator.Observe(g.e.Operator, *m) })
	}
	return err
}
