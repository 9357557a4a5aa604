package reservation_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// A waiter gets no DeadlockError if there is room for it by then, or if it has given up. At the
// next deadlock it is chosen as if this had not been.
func TestChangesInTheLastMoment(t *testing.T) {
	last := 0 // how often Movable was called before the error
	for _, what := range []string{"nothing", "room", "gone"} {
		synctest.Test(t, func(t *testing.T) {
			var m *reservation.Manager
			var others reservation.Reservation
			ctx, giveUp := context.WithCancel(t.Context())
			resume := func() {}
			asked := 0
			m = managerOf(t, reservation.Config{
				Spaces: []*tier.Space{spaceOf(t, "gpu:0", 100)},
				Movable: func(tier.ID) bool { // after the look at the books, and before the error
					if asked++; asked != last {
						return false
					}
					switch what {
					case "room":
						resume = m.Stall()
						release(t, others)
					case "gone":
						giveUp()
						synctest.Wait()
					}
					return false
				},
			})
			a, b := newTask(t, m, "a"), newTask(t, m, "b")
			ra, rb := a.hold(gpu0, 20), b.hold(gpu0, 20)
			others = mustTry(t, m, onGPU0, 60)
			ca := a.ask(onGPU0, 60)
			cb := startReserve(b.o.Context(ctx), m, onGPU0, 60)
			if what == "nothing" {
				cb.told(t, rollBack)
				last = asked
				release(t, rb, others)
				release(t, ca.served(t), ra)
				return
			}
			cb.waiting(t)
			time.Sleep(time.Second)
			synctest.Wait()
			if asked < last {
				t.Fatalf("it was asked %d times only, not %d", asked, last)
			}
			if what == "gone" {
				cb.failed(t, context.Canceled)
				ca.waiting(t)
				release(t, others)
				release(t, ca.served(t))
			} else {
				cb.waiting(t)
				resume()
				release(t, ca.served(t))
				release(t, cb.served(t))
			}
			others = mustTry(t, m, onGPU0, 60)
			ca = a.ask(onGPU0, 60)
			b.ask(onGPU0, 60).told(t, rollBack)
			release(t, rb, others)
			release(t, ca.served(t), ra)
		})
	}
}
