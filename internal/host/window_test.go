package host

import (
	"math/rand/v2"
	"testing"
	"testing/synctest"
)

// walk touches a range of size bytes, step by step, until stop is closed, and says how
// far it has come.
func walk(w *Window, size, step int64, stop <-chan struct{}, at *int64) {
	for *at < size && w.Wait(*at, stop) {
		*at += step
	}
}

// TestWindow: nothing is touched far ahead of what is used, and all that is near is.
func TestWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const step, size = 2 << 20, 4 << 30
		w, stop, done := NewWindow(size), make(chan struct{}), make(chan struct{})
		at := int64(0)
		go func() { walk(w, size, step, stop, &at); close(done) }()
		for _, c := range []struct{ reach, want int64 }{
			{0, minAhead}, {1, minAhead + step}, {minAhead, 2 * minAhead}, {minAhead / 2, 2 * minAhead},
			{100 << 20, 200 << 20}, {maxAhead, 2 * maxAhead}, {1 << 30, 1<<30 + maxAhead},
			{size - step, size}, {size, size},
		} {
			w.Reach(c.reach)
			synctest.Wait()
			if at != c.want {
				t.Errorf("after %d bytes were used, %d are touched; want %d", c.reach, at, c.want)
			}
		}
		close(stop)
		<-done
	})
}

// TestShortRange: before its first use a range has a part of it touched in whole huge pages.
func TestShortRange(t *testing.T) {
	for size, want := range map[int64]int64{1 << 20: 0, 31 << 20: 0, 32 << 20: 2 << 20, 256 << 20: 16 << 20,
		1 << 30: minAhead, 1 << 40: minAhead} {
		if w := NewWindow(size); w.end() != want {
			t.Errorf("of %d bytes %d are touched, want %d", size, w.end(), want)
		}
	}
	w := NewWindow(16 << 20)
	if w.Reach(5); w.end() != 10 {
		t.Errorf("after the use of 5 bytes, up to %d are touched", w.end())
	}
}

// TestWindowStops: a walk that waits ends.
func TestWindowStops(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, stop, done := NewWindow(1<<40), make(chan struct{}), make(chan struct{})
		at := int64(0)
		go func() { walk(w, 1<<40, 1<<20, stop, &at); close(done) }()
		synctest.Wait()
		close(stop)
		<-done
		if at != minAhead {
			t.Errorf("%d bytes are touched", at)
		}
		if NewWindow(1<<40).Wait(0, stop) {
			t.Error("a walk that is to end goes on")
		}
	})
}

// TestWindowUnderRaces: no growth is missed, whoever tells of it.
func TestWindowUnderRaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const size = 1 << 30
		w, done := NewWindow(size), make(chan struct{})
		at := int64(0)
		go func() { walk(w, size, 1<<20, nil, &at); close(done) }()
		for g := range uint64(4) {
			go func() {
				r := rand.New(rand.NewPCG(g, 1))
				for range 100 {
					w.Reach(r.Int64N(size))
				}
				w.Reach(size - maxAhead)
			}()
		}
		<-done // a growth that is missed is a deadlock
	})
}
