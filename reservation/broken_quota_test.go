package reservation_test

import (
	"errors"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

var errLedger = errors.New("the ledger cannot be read")

// brokenQuota reports room, and charges nothing once it is broken, like the quota of a node with a
// damaged ledger.
type brokenQuota struct {
	room   int64
	broken bool
	panics bool
	told   func()
}

func (q *brokenQuota) Charge(n int64) error {
	if q.panics {
		panic(errLedger)
	}
	if q.broken {
		return errLedger
	}
	if n > q.room {
		return &tier.OutOfBudgetError{Requested: n, Remaining: q.room}
	}
	q.room -= n
	return nil
}

func (q *brokenQuota) Credit(n int64) {
	q.room += n
	q.told()
}

func (q *brokenQuota) Remaining() int64 { return q.room }
func (q *brokenQuota) Limit() int64     { return 100 }

func (q *brokenQuota) Subscribe(f func()) (cancel func()) {
	q.told = f
	return func() {}
}

func brokenSpace(t *testing.T) (*reservation.Manager, *brokenQuota) {
	t.Helper()
	q := &brokenQuota{room: 100}
	s, err := tier.NewSpace(tier.SpaceConfig{
		ID: gpu0, Capacity: 100, Marks: tier.Marks{Limit: 1}, Pool: &heapPool{granule: 1}, Quota: q,
	})
	if err != nil {
		t.Fatal(err)
	}
	return managerOf(t, reservation.Config{Spaces: []*tier.Space{s}}), q
}

// A quota that fails, and reports room, refuses all requests. No caller retries for ever, and the
// error has the reason.
func TestBrokenQuotaRefuses(t *testing.T) {
	m, q := brokenSpace(t)
	r := mustTry(t, m, onGPU0, 20, &reservation.Options{Policy: reservation.Increase(2)})
	q.broken = true
	if _, err := m.TryReserve(onGPU0, 10, nil); !errors.Is(err, tier.ErrNoSpace) {
		t.Errorf("TryReserve: %v", err)
	}
	if err := r.TryGrow(10); !errors.Is(err, tier.ErrNoSpace) {
		t.Errorf("TryGrow: %v", err)
	}
	if _, err := r.Alloc(30); !errors.Is(err, reservation.ErrExceeded) {
		t.Errorf("Alloc: %v", err)
	}
	if _, err := m.Reserve(t.Context(), onGPU0, 10, nil); !errors.Is(err, errLedger) {
		t.Errorf("Reserve: %v", err)
	}
	if _, err := m.ReserveUpTo(t.Context(), onGPU0, 1, 50, nil); !errors.Is(err, errLedger) {
		t.Errorf("ReserveUpTo: %v", err)
	}
	if err := r.Grow(t.Context(), 10); !errors.Is(err, errLedger) {
		t.Errorf("Grow: %v", err)
	}
	wantReservation(t, r, 20, 20)
	q.broken = false
	release(t, mustTry(t, m, onGPU0, 10, nil), r)
}

// If the quota breaks during a wait, the waiter gets the error at the next release, and the release
// does not block.
func TestBrokenQuotaEndsWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, q := brokenSpace(t)
		all := mustTry(t, m, onGPU0, 100, nil)
		first := startReserve(t.Context(), m, onGPU0, 60)
		first.waiting(t)
		second := startReserve(t.Context(), m, onGPU0, 70)
		second.waiting(t)
		q.broken = true
		release(t, all)
		first.failed(t, errLedger)
		second.failed(t, errLedger)
	})
}

// A charge that panics uses no pass: afterwards as many may pass as if there had been none.
func TestPanickingQuotaKeepsNoPass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, q := brokenSpace(t)
		held := mustTry(t, m, onGPU0, 50, nil)
		large := startReserve(t.Context(), m, onGPU0, 60)
		large.waiting(t)
		q.panics = true
		for range 2 * reservation.DefaultBypass {
			func() {
				defer func() {
					if p := recover(); p != errLedger {
						t.Errorf("the panic is %v", p)
					}
				}()
				m.TryReserve(onGPU0, 10, nil)
			}()
		}
		q.panics = false
		if n := passes(t, m, 100); n != reservation.DefaultBypass {
			t.Errorf("%d passed by; want %d", n, reservation.DefaultBypass)
		}
		release(t, held)
		release(t, large.served(t))
	})
}
