package tier_test

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
)

const (
	parkCapacity = 1 << 20
	parkUnit     = 64 // far below what one stripe may hold
)

// parked returns a space in which a promise of n bytes was given back and parked. That its
// listeners were not called shows it.
func parked(t *testing.T, n int64) *tier.Space {
	t.Helper()
	s := newSpace(t, parkCapacity, &fakePool{})
	if !s.Inside().TryReserveAt(3, n) {
		t.Fatal("an empty space has no room")
	}
	told := false
	cancel := s.Inside().Subscribe(func(*tier.Space, bool) { told = true })
	s.Inside().UnreserveAt(3, n)
	cancel()
	if told {
		t.Fatal("the promise was not parked")
	}
	return s
}

func TestParkedBytesAreFreeToWhoAsks(t *testing.T) {
	for name, used := range map[string]func(*tier.Space) int64{
		"used":      (*tier.Space).Used,
		"usage":     func(s *tier.Space) int64 { return s.Usage().Reserved },
		"pressure":  (*tier.Space).PressureBytes,
		"available": func(s *tier.Space) int64 { return s.Limit() - s.Available() },
		"peak":      func(s *tier.Space) int64 { s.ResetPeak(); return s.Usage().Peak },
	} {
		if n := used(parked(t, parkUnit)); n != 0 {
			t.Errorf("%s: %d bytes, though all were given back", name, n)
		}
	}
}

func TestParkedBytesAreNotRefused(t *testing.T) {
	s := parked(t, parkUnit)
	if err := s.Inside().Reserve(s.Limit()); err != nil {
		t.Errorf("with %d bytes parked: %v", parkUnit, err)
	}
	s = parked(t, parkUnit)
	if !s.Inside().TryReserveAt(4, s.Limit()) {
		t.Error("another stripe's bytes were overlooked")
	}
}

func TestParkedBytesAreNoPeak(t *testing.T) {
	s := parked(t, parkUnit)
	for at := range uint32(64) {
		if !s.Inside().TryReserveAt(at, parkUnit) {
			t.Fatal("no room")
		}
		s.Inside().UnreserveAt(at+7, parkUnit)
	}
	if peak := s.Usage().Peak; peak != parkUnit {
		t.Errorf("the peak is %d bytes, and never more than %d were promised at once", peak, parkUnit)
	}
}

// TestNothingIsParked shows when each release must call the listeners.
func TestNothingIsParked(t *testing.T) {
	for name, prepare := range map[string]func(*tier.Space){
		"somebody attends":    func(s *tier.Space) { s.Inside().Attend() },
		"nearly full":         func(s *tier.Space) { ok(t, s.Inside().Reserve(s.Stop())) },
		"others on a device":  func(s *tier.Space) { s.Inside().SetForeign(s.Stop()) },
		"above a lower limit": func(s *tier.Space) { ok(t, s.Inside().Reserve(1000)); ok(t, s.SetLimit(999)) },
	} {
		s := newSpace(t, parkCapacity, &fakePool{})
		if !s.Inside().TryReserveAt(0, parkUnit) {
			t.Fatal("no room")
		}
		prepare(s)
		told := 0
		s.Inside().Subscribe(func(_ *tier.Space, pressed bool) {
			if !pressed {
				told++
			}
		})
		s.Inside().UnreserveAt(0, parkUnit)
		if told != 1 {
			t.Errorf("%s: told %d times of a release", name, told)
		}
	}
	s := newSpace(t, parkCapacity, &fakePool{})
	s.Inside().Attend()
	s.Inside().EndAttend()
	told := false
	if !s.Inside().TryReserveAt(0, parkUnit) {
		t.Fatal("no room")
	}
	s.Inside().Subscribe(func(*tier.Space, bool) { told = true })
	s.Inside().UnreserveAt(0, parkUnit)
	if told {
		t.Error("nobody attends any more, and yet all were told")
	}
}

func TestParkedBytesDoNotOutliveALimit(t *testing.T) {
	s := parked(t, parkUnit)
	ok(t, s.SetLimit(parkUnit-1))
	if s.Inside().TryReserveAt(3, parkUnit) {
		t.Error("what was parked was promised again, above the limit")
	}
}

// TestParkedMeanwhile: what is parked while another begins to wait for room, lowers the limit, or
// takes foreign bytes, is free, and the listeners are called.
func TestParkedMeanwhile(t *testing.T) {
	for name, change := range map[string]func(*tier.Space){
		"somebody attends":  func(s *tier.Space) { s.Inside().Attend() },
		"the limit changes": func(s *tier.Space) { ok(t, s.SetLimit(s.Limit()-1)) },
		"others take more":  func(s *tier.Space) { s.Inside().SetForeign(1) },
	} {
		s := newSpace(t, parkCapacity, &fakePool{})
		if !s.Inside().TryReserveAt(0, parkUnit) {
			t.Fatal("no room")
		}
		told := 0
		s.UnreserveBelow(0, parkUnit, func() int64 {
			change(s)
			s.Inside().Subscribe(func(_ *tier.Space, pressed bool) {
				if !pressed {
					told++
				}
			})
			return s.Stop()
		})
		if told != 1 {
			t.Errorf("%s: told %d times of the release", name, told)
		}
		if !s.Inside().TryReserveAt(0, s.Limit()) {
			t.Errorf("%s: the bytes are not free", name)
		}
	}
}

// TestParkingConcurrently: an attendant that finds no room is woken by what makes room, whatever
// was parked meanwhile; and nothing is lost.
func TestParkingConcurrently(t *testing.T) {
	seed := testseed.One(t)
	s := newSpace(t, parkCapacity, &fakePool{})
	var wake = make(chan struct{}, 1)
	s.Inside().Subscribe(func(_ *tier.Space, pressed bool) {
		if !pressed {
			select {
			case wake <- struct{}{}:
			default:
			}
		}
	})
	rounds := 1000
	if testing.Short() {
		rounds = 100
	}
	var stop atomic.Bool
	var users, looker sync.WaitGroup
	for k := range uint32(4) {
		users.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(k)))
			for !stop.Load() {
				n := parkUnit * (1 + rng.Int64N(4))
				if !s.Inside().TryReserveAt(k, n) {
					continue // all is taken
				}
				if used := s.Used(); used < n || used > parkCapacity {
					t.Errorf("%d bytes are used while %d are held", used, n)
				}
				s.Inside().UnreserveAt(k+rng.Uint32N(2), n)
			}
		})
	}
	looker.Go(func() {
		for !stop.Load() {
			if u := s.Usage(); u.Reserved < 0 || u.Used() > parkCapacity || u.Peak < u.Used() {
				t.Errorf("books: %+v", u)
			}
		}
	})
	for range rounds {
		s.Inside().Attend()
		for !s.Inside().TryReserveAt(9, s.Limit()) { // all there is
			<-wake // hangs if a release called no listener
		}
		s.Inside().UnreserveAt(9, s.Limit())
		s.Inside().EndAttend()
	}
	stop.Store(true)
	users.Wait()
	looker.Wait()
	if u := s.Usage(); u.Used() != 0 {
		t.Errorf("after everything was given back: %+v", u)
	}
}
