package reservation_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// Who is about to be told of a deadlock when room is freed is not told, but served next.
func TestRoomInTheLastMoment(t *testing.T) {
	last := 0 // how often it was asked what is movable when somebody was told
	for _, freed := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			var others reservation.Reservation
			var m *reservation.Manager
			var resume func()
			asked := 0
			m = managerOf(t, reservation.Config{
				Spaces: []*tier.Space{spaceOf(t, "gpu:0", 100)},
				Movable: func(tier.ID) bool { // after the look at the books, and before anybody is told
					if asked++; freed && asked == last {
						resume = m.Stall()
						release(t, others)
					}
					return false
				},
			})
			a, b := newTask(t, m, "a"), newTask(t, m, "b")
			ra, rb := a.hold(gpu0, 20), b.hold(gpu0, 20)
			others = mustTry(t, m, onGPU0, 60)
			ca, cb := a.ask(onGPU0, 60), b.ask(onGPU0, 60)
			if !freed {
				cb.told(t, reservation.RollBack)
				last = asked
				release(t, rb, others)
				release(t, ca.served(t), ra)
				return
			}
			time.Sleep(time.Second)
			cb.waiting(t)
			if resume == nil {
				t.Fatalf("it was asked %d times only, not %d", asked, last)
			}
			resume()
			release(t, ca.served(t), ra)
			release(t, cb.served(t), rb)
		})
	}
}
