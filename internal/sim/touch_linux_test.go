//go:build linux && !race

package sim_test

import (
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/internal/sim"
)

// TestIdleDeviceTouchesLittle: pages are touched some way ahead of what was used, and no
// further.
func TestIdleDeviceTouchesLittle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, err := sim.Open(sim.Config{Memory: 1 << 30, Touch: true})
		ok(t, err)
		s := stream(t, d)
		for _, c := range []struct{ alloc, want int64 }{{0, 64 << 20}, {1 << 20, 68 << 20}, {79 << 20, 160 << 20}} {
			if c.alloc > 0 {
				alloc(t, d, s, c.alloc)
			}
			synctest.Wait()
			if n := d.Touched(); n != c.want {
				t.Errorf("after %d more bytes: %d are touched; want %d", c.alloc, n, c.want)
			}
		}
		ok(t, d.Close())
	})
}
