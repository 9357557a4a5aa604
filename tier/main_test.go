package tier_test

import (
	"testing"

	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/sim"
)

const invariantsBuild = invariants.Enabled

// rounds is how often a test that works the locks does so: in an invariants
// build, where each lock looks at the goroutine's stack, a tenth of n.
func rounds(n int) int {
	if invariantsBuild {
		return n / 10
	}
	return n
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// openDevice returns a simulated device, which the test's end closes.
func openDevice(t testing.TB, cfg sim.Config) tier.Device {
	t.Helper()
	d, err := sim.New(cfg)
	ok(t, err)
	t.Cleanup(func() {
		if err := d.Close(); err != nil && err != tier.ErrClosed {
			t.Errorf("closing the device: %v", err)
		}
	})
	return d
}

// mustPanic calls f and returns what it panicked with.
func mustPanic(t testing.TB, f func()) (p any) {
	t.Helper()
	defer func() {
		if p = recover(); p == nil {
			t.Error("no panic")
		}
	}()
	f()
	return nil
}

// promise reserves n bytes.
func promise(t testing.TB, s *tier.Space, n int64) *books.Promise {
	t.Helper()
	p, err := s.Promise(n)
	ok(t, err)
	return p
}

// drawFrom draws a buffer from a promise that has the bytes, as a reservation does.
func drawFrom(s *tier.Space, p *books.Promise, size int64) (*tier.Buffer, error) {
	charge := s.Charge(size)
	if out := p.Draw(charge, 0, false); out.Released || out.Short > 0 {
		panic(out)
	}
	return s.Draw(p, size, nil)
}

// draw draws a buffer from a promise of its own, which is released.
func draw(t testing.TB, s *tier.Space, size int64) *tier.Buffer {
	t.Helper()
	b, err := s.DrawNew(size)
	ok(t, err)
	return b
}
