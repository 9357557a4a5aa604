package reservation_test

import (
	"errors"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

var errGone = errors.New("gone")

// losablePool is a pool whose device may be lost.
type losablePool struct {
	heapPool
	devpool.Loss
}

// losable is a manager of two GPUs and host memory, of 100 bytes each.
func losable(t *testing.T) (m *reservation.Manager, spaces []*tier.Space, pools []*losablePool) {
	t.Helper()
	for _, id := range []tier.ID{gpu0, gpu1, host} {
		p := &losablePool{heapPool: heapPool{granule: 1}}
		s, err := tier.NewSpace(tier.SpaceConfig{ID: id, Capacity: 100, Pool: p, Marks: tier.Marks{Limit: 1}})
		if err != nil {
			t.Fatal(err)
		}
		spaces, pools = append(spaces, s), append(pools, p)
	}
	m, err := reservation.NewManager(reservation.Config{Spaces: spaces})
	if err != nil {
		t.Fatal(err)
	}
	return m, spaces, pools
}

// wantLost checks that an error says that a space is lost, and nothing about room.
func wantLost(t *testing.T, what string, err error, at tier.ID) {
	t.Helper()
	var lost *tier.LostError
	if !errors.As(err, &lost) || lost.Space != at || !errors.Is(err, errGone) || errors.Is(err, tier.ErrNoSpace) || errors.Is(err, reservation.ErrExceeded) {
		t.Errorf("%s: %v, want that %s is lost", what, err, at)
	}
}

// TestLostSpacesArePassedBy: by all strategies, in whatever order they name spaces.
func TestLostSpacesArePassedBy(t *testing.T) {
	m, spaces, pools := losable(t)
	held := mustTry(t, m, onGPU0, 50, nil)
	pools[0].Lose(errGone)
	for _, c := range []struct {
		s  reservation.Strategy
		at tier.ID
	}{
		{reservation.AnyInTier(tier.GPU), gpu1},
		{reservation.AnyInTierPreferring(tier.GPU, 0), gpu1},
		{reservation.AnyInTiers(tier.GPU, tier.Host), gpu1},
		{reservation.ToUpgrade(host, tier.GPU), gpu1},
		{reservation.AnyInTiers(tier.Host, tier.GPU), host},
	} {
		for _, n := range []int64{0, 1, 70} {
			r, err := m.Reserve(t.Context(), c.s, n, nil)
			if err != nil {
				t.Fatalf("%s, %d bytes: %v", c.s, n, err)
			}
			if at := r.Space().ID(); at != c.at {
				t.Errorf("%s, %d bytes: in %s", c.s, n, at)
			}
			release(t, r)
		}
		r, err := m.ReserveUpTo(t.Context(), c.s, 0, 10, nil)
		if err != nil || r.Space().ID() != c.at || r.Bytes() != 10 {
			t.Errorf("%s, up to 10 bytes: %d bytes, %v", c.s, r.Bytes(), err)
		}
		release(t, r)
	}
	full := mustTry(t, m, reservation.Specific(gpu1), 100, nil)
	none, err := m.ReserveUpTo(t.Context(), reservation.AnyInTierPreferring(tier.GPU, 0), 0, 10, nil)
	if err != nil || none.Space().ID() != gpu1 || none.Bytes() != 0 {
		t.Errorf("what there is where there is nothing: %v", err)
	}
	release(t, full, none)
	for _, n := range []int64{0, 1, 100, 1000} {
		_, err := m.TryReserve(onGPU0, n, nil)
		wantLost(t, "trying", err, gpu0)
		_, err = m.Reserve(t.Context(), onGPU0, n, nil)
		wantLost(t, "reserving", err, gpu0)
		wantLost(t, "growing", held.Grow(t.Context(), n), gpu0)
	}
	_, err = held.Alloc(10)
	wantLost(t, "drawing", err, gpu0)
	if _, err := m.Reserve(t.Context(), reservation.AnyInTier(tier.GPU), 101, nil); !errors.Is(err, reservation.ErrExceeded) {
		t.Errorf("too much for the one that is left: %v", err)
	}
	release(t, held)
	pools[1].Lose(errGone)
	_, err = m.Reserve(t.Context(), reservation.AnyInTierPreferring(tier.GPU, 1), 1, nil)
	wantLost(t, "with none left", err, gpu1)
	for _, s := range spaces {
		wantUsage(t, s, 0, 0, 0)
	}
}

// TestWaitersOfALostSpace: a waiter without another candidate gets the error, whoever is before it;
// the others go on waiting, and are served.
func TestWaitersOfALostSpace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, spaces, pools := losable(t)
		a, b := mustTry(t, m, onGPU0, 60, nil), mustTry(t, m, onGPU0, 40, nil)
		c, d := mustTry(t, m, reservation.Specific(gpu1), 100, nil), mustTry(t, m, reservation.Specific(host), 100, nil)
		owner := reservation.NewOwner("somebody")
		var lost []*call
		wait := func(f func() (*reservation.Reservation, error)) {
			w := start(f)
			w.waiting(t)
			lost = append(lost, w)
		}
		wait(func() (*reservation.Reservation, error) { return m.Reserve(t.Context(), onGPU0, 100, nil) })
		wait(func() (*reservation.Reservation, error) { return m.ReserveUpTo(t.Context(), onGPU0, 20, 100, nil) })
		wait(func() (*reservation.Reservation, error) { return nil, a.Grow(t.Context(), 40) })
		wait(func() (*reservation.Reservation, error) {
			return m.Reserve(t.Context(), onGPU0, 1, &reservation.Options{Owner: owner})
		})
		any := startReserve(t.Context(), m, reservation.AnyInTier(tier.GPU), 70)
		any.waiting(t)
		down := startReserve(t.Context(), m, reservation.AnyInTiers(tier.GPU, tier.Host), 30)
		down.waiting(t)

		pools[0].Lose(errGone)
		for _, w := range lost {
			wantLost(t, "a waiter", w.failed(t, tier.ErrLost), gpu0)
		}
		any.waiting(t)
		down.waiting(t)
		release(t, a, b) // which is no room
		any.waiting(t)
		down.waiting(t)
		if demand := m.Demand(nil); len(demand) != 2 || demand[0].Space != gpu1 || demand[0].Waiters != 2 || demand[1].Space != host {
			t.Errorf("the demand is %+v", demand)
		}
		release(t, c)
		r := any.served(t)
		if at := r.Space().ID(); at != gpu1 {
			t.Errorf("who wanted any GPU is in %s", at)
		}
		s := down.served(t) // 30 bytes beside it
		if at := s.Space().ID(); at != gpu1 {
			t.Errorf("who wanted a GPU or host memory is in %s", at)
		}
		last := startReserve(t.Context(), m, reservation.AnyInTier(tier.GPU), 50)
		last.waiting(t)
		pools[1].Lose(errGone)
		wantLost(t, "the last waiter", last.failed(t, tier.ErrLost), gpu1)
		release(t, r, s, d)
		if err := m.Close(); err != nil {
			t.Error(err)
		}
		for _, s := range spaces {
			wantUsage(t, s, 0, 0, 0)
		}
	})
}
