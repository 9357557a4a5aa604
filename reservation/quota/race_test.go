package quota_test

import (
	"errors"
	"testing"

	"github.com/spillway-db/spillway/tier"
)

// TestWhatHappensWhileItReaps: allocations and frees between the call of Outstanding and the credit
// are not credited.
func TestWhatHappensWhileItReaps(t *testing.T) {
	allocAndFree := func(r *rig, _ tier.Stream, _ tier.Addr) { r.free(r.alloc(20 * kib)) }
	for name, c := range map[string]struct {
		held       bool // something is live and something retired at the start
		meanwhile  func(r *rig, other tier.Stream, live tier.Addr)
		live, rest int64 // at the end
	}{
		"an allocation": {true, func(r *rig, other tier.Stream, _ tier.Addr) {
			if _, err := r.dev.Alloc(other, 20*kib); err != nil {
				r.Fatal(err)
			}
		}, 28 * kib, 10 * kib},
		"a free":                     {true, func(r *rig, _ tier.Stream, live tier.Addr) { r.free(live) }, 0, 18 * kib},
		"an allocation and its free": {true, allocAndFree, 8 * kib, 30 * kib},
		"both, and nothing before":   {false, allocAndFree, 0, 20*kib + 256},
		"another reap":               {true, func(r *rig, _ tier.Stream, _ tier.Addr) { r.dev.Reap() }, 8 * kib, 10 * kib},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, 64*kib)
			other, err := r.dev.NewStream()
			if err != nil {
				t.Fatal(err)
			}
			var live tier.Addr
			retired := r.alloc(256)
			if c.held {
				live = r.alloc(8 * kib)
				r.free(retired)
				retired = r.alloc(10 * kib)
			}
			g := r.block()
			r.free(retired)
			r.spy.afterOutstanding = func() { c.meanwhile(r, other, live) }
			if n := r.dev.Reap(); n != 0 {
				t.Errorf("Reap credited %d bytes that the device still has", n)
			}
			r.want(c.live, c.rest)
			if n := r.spy.Device.Outstanding(); n != c.live+c.rest {
				t.Errorf("%d bytes are outstanding, want %d", n, c.live+c.rest)
			}
			g.open()
			if err := errors.Join(r.s.Sync(), other.Sync()); err != nil {
				t.Fatal(err)
			}
			r.dev.Reap()
			r.want(c.live, 0)
		})
	}
}

// TestReapWhileAFreeIsUnderWay: a reap during a call of Free credits neither that free nor bytes
// that the device still has. When the call has returned, the bytes are credited once.
func TestReapWhileAFreeIsUnderWay(t *testing.T) {
	r := newRig(t, 64*kib)
	other, err := r.dev.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	a, err := r.dev.Alloc(other, 8*kib)
	if err != nil {
		t.Fatal(err)
	}
	b := r.alloc(10 * kib)
	g := r.block()
	r.free(b)
	r.spy.beforeRecord = func() error { // behind the free
		r.spy.beforeRecord = nil
		if n := r.dev.Reap(); n != 0 {
			t.Errorf("Reap credited %d bytes", n)
		}
		return nil
	}
	if err := r.dev.Free(other, a); err != nil {
		t.Fatal(err)
	}
	r.want(0, 10*kib)
	g.open()
	r.sync()
	r.dev.Reap()
	r.want(0, 0)
}
