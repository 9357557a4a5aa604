package reservation_test

import (
	"testing"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// TestGrownPromiseIsGoodInOnePiece: an arena charges two small sizes less than one
// large one, and what was promised in two steps can be drawn as one all the same.
func TestGrownPromiseIsGoodInOnePiece(t *testing.T) {
	m, s := arenaOf(t, 1<<20)
	for _, first := range []int64{1, 100, 4000, 4096, 5000, 8192, 10000} {
		for _, then := range []int64{1, 64, 200, 4096, 6000, 9000} {
			r, err := m.TryReserve(reservation.AnyInTier(tier.Host), first, nil)
			if err != nil {
				t.Fatal(err)
			}
			if err := r.TryGrow(then); err != nil {
				t.Fatal(err)
			}
			b, err := r.Alloc(first + then)
			if err != nil {
				t.Errorf("%d bytes, grown by %d, promise %d: %v", first, then, r.Bytes(), err)
			}
			if got, most := r.Bytes(), s.Charge(first)+s.Charge(then)+tier.Page; got > most {
				t.Errorf("%d bytes, grown by %d, promise %d: more than %d", first, then, got, most)
			}
			release(t, b)
			release(t, r)
		}
	}
}
