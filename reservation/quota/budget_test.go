package quota_test

import (
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
)

func TestLimitsThatAreNone(t *testing.T) {
	for _, n := range []int64{0, -1, math.MinInt64} {
		if b, err := quota.NewBudget(n, ""); err == nil {
			t.Errorf("New(%d) gave %v", n, b)
		}
		if err := newBudget(t, 1).SetLimit(n); err == nil {
			t.Errorf("SetLimit(%d) passed", n)
		}
	}
	if d, err := newBudget(t, 1).Wrap(nil); err == nil {
		t.Errorf("Wrap(nil) gave %v", d)
	}
}

func TestExactlyAtTheLimit(t *testing.T) {
	r := newRig(t, 64*kib)
	a := r.alloc(63*kib + 1) // charged as 63.25 KiB
	b := r.alloc(768)
	r.want(64*kib, 0)
	_, err := r.dev.Alloc(r.s, 1)
	mustRefuse(t, err, 256, 64*kib, 64*kib)
	r.free(b)
	_, err = r.dev.Alloc(r.s, 769)
	mustRefuse(t, err, 1024, 64*kib-768, 64*kib)
	b = r.alloc(768)
	r.free(a)
	r.free(b)
	r.want(0, 0)
	r.free(r.alloc(64 * kib))
	r.want(0, 0)
	_, err = r.dev.Alloc(r.s, math.MaxInt64)
	if !errors.Is(err, tier.ErrOutOfBudget) {
		t.Fatalf("a request that overflows: %v", err)
	}
	r.want(0, 0)
}

// TestRefusalNamesTheBudget: a direct refusal has no space to name. It names the budget and the
// call that raises the limit. A device's own refusal names neither a budget nor a space.
func TestRefusalNamesTheBudget(t *testing.T) {
	r := newRig(t, 64*kib, "the tenant's budget")
	a := r.alloc(60 * kib)
	_, err := r.dev.Alloc(r.s, 8*kib)
	want := "no space for 8192 bytes: 4096 available: the tenant's budget has no room for 8192 bytes: " +
		"61440 of 65536 are in use, 4096 remain (Budget.SetLimit raises the limit)"
	if err == nil || err.Error() != want {
		t.Errorf("the refusal is\n%v, want\n%s", err, want)
	}
	r.free(a)
	if err := r.b.SetLimit(1 << 50); err != nil {
		t.Fatal(err)
	}
	_, err = r.dev.Alloc(r.s, 1<<40)
	if err == nil || !strings.HasPrefix(err.Error(), "no space for 1099511627776 bytes: ") {
		t.Errorf("the device's refusal is %v", err)
	}
}

func TestInnerNotCalledWhenOver(t *testing.T) {
	r := newRig(t, 64*kib, "the tenant's budget")
	a := r.alloc(60 * kib)
	calls := r.spy.allocs.Load()
	for _, n := range []int64{4*kib + 1, 64 * kib, 64*kib + 1, math.MaxInt64} {
		_, err := r.dev.Alloc(r.s, n)
		var full *tier.OutOfBudgetError
		if !errors.As(err, &full) || full.Budget != "the tenant's budget" {
			t.Fatalf("Alloc(%d): %v", n, err)
		}
	}
	if n := r.spy.allocs.Load() - calls; n != 0 {
		t.Errorf("the device was asked %d times for what the budget refuses", n)
	}
	if s := r.b.Stats(); s.Refused != 4 {
		t.Errorf("%d refusals are counted", s.Refused)
	}
	r.free(a)
	r.want(0, 0)
}

func TestInnerFailure(t *testing.T) {
	r := newRig(t, 64*kib)
	a := r.alloc(10 * kib)
	r.spy.beforeAlloc = func() error { return errFault }
	if _, err := r.dev.Alloc(r.s, 20*kib); !errors.Is(err, errFault) {
		t.Fatalf("%v", err)
	}
	r.want(10*kib, 0)
	r.spy.beforeAlloc = nil
	r.spy.beforeFree = func() error { return errFault }
	if err := r.dev.Free(r.s, a); !errors.Is(err, errFault) {
		t.Fatalf("%v", err)
	}
	r.want(10*kib, 0)
	r.spy.beforeFree = nil
	r.free(a) // it was left as it was
	r.want(0, 0)
	r.free(r.alloc(64 * kib))
}

func panics(f func()) (p any) {
	defer func() { p = recover() }()
	f()
	return nil
}

func TestInnerPanic(t *testing.T) {
	r := newRig(t, 64*kib)
	a := r.alloc(10 * kib)
	boom := func() error { panic(errFault) }
	r.spy.beforeAlloc, r.spy.beforeFree = boom, boom
	if p := panics(func() { _, _ = r.dev.Alloc(r.s, 20*kib) }); p != errFault {
		t.Errorf("Alloc panicked with %v", p)
	}
	r.want(10*kib, 0)
	if p := panics(func() { _ = r.dev.Free(r.s, a) }); p != errFault {
		t.Errorf("Free panicked with %v", p)
	}
	r.want(10*kib, 0)
	r.spy.beforeAlloc, r.spy.beforeFree, r.spy.beforeRecord = nil, nil, boom
	if p := panics(func() { _ = r.dev.Free(r.s, a) }); p != errFault {
		t.Errorf("Free panicked with %v in recording", p)
	}
	r.want(0, 10*kib) // it is freed, and only the device knows whether it is over
	r.spy.beforeRecord = nil
	if n := r.dev.Reap(); n != 10*kib {
		t.Errorf("Reap credited %d", n)
	}
	r.want(0, 0)
	// A space makes the panic an error, as of any device.
	r.spy.beforeAlloc = boom
	space := newSpace(t, r.dev, 64*kib)
	if b, err := space.DrawNew(kib); err == nil {
		t.Errorf("drawing gave %v", b)
	}
	r.spy.beforeAlloc = nil
	r.want(0, 0)
}

func TestClosingCredits(t *testing.T) {
	r := newRig(t, 64*kib)
	a := r.alloc(10 * kib)
	b := r.alloc(20 * kib)
	g := r.block()
	r.free(b)
	closing := make(chan error)
	go func() { closing <- r.dev.Close() }()
	g.open()
	if err := <-closing; err != nil {
		t.Fatal(err)
	}
	r.want(0, 0)
	if err := r.dev.Free(r.s, a); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("Free after Close: %v", err)
	}
	if _, err := r.dev.Alloc(r.s, 1); !errors.Is(err, tier.ErrClosed) || errors.Is(err, tier.ErrNoSpace) {
		t.Errorf("Alloc after Close: %v", err)
	}
	if err := r.dev.Close(); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("a second Close: %v", err)
	}
	if n := r.dev.Reap(); n != 0 {
		t.Errorf("Reap after Close credited %d", n)
	}
	r.want(0, 0)
	// Behind the budget's back: the bytes stay until the wrapper is closed.
	raw := newSim(t, 64*kib)
	d, s := wrap(t, r.b, raw)
	a, err := d.Alloc(s, kib)
	if err := errors.Join(err, raw.Close()); err != nil {
		t.Fatal(err)
	}
	if err := d.Free(s, a); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("Free on a closed device: %v", err)
	}
	r.want(kib, 0)
	if err := d.Close(); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("Close on a closed device: %v", err)
	}
	r.want(0, 0)
}

// A device that is closed during a call of it is so in the books, and what the call is
// charged until it returns comes back.
func TestClosedDuringACall(t *testing.T) {
	for name, during := range map[string]func(r *rig){
		"Alloc": func(r *rig) {
			a := r.alloc(kib)
			r.spy.afterAlloc = func() {
				r.spy.beforeRecord = r.dev.Close
				if err := r.dev.Free(r.s, a); err != nil { // closes it meanwhile
					r.Error(err)
				}
				if st := r.b.Stats(); st.Reserved != 2*kib || st.Pending != 2*kib || st.Live != 0 || st.Retired != 0 {
					r.Errorf("in the call: %+v", st)
				}
			}
			_, _ = r.dev.Alloc(r.s, 2*kib)
		},
		"Free": func(r *rig) {
			a := r.alloc(2 * kib)
			r.spy.beforeRecord = r.dev.Close
			_ = r.dev.Free(r.s, a)
		},
		"Reap": func(r *rig) {
			g := r.block()
			r.free(r.alloc(2 * kib))
			r.spy.afterOutstanding = func() {
				g.open()
				if err := r.dev.Close(); err != nil {
					r.Error(err)
				}
			}
			if n := r.dev.Reap(); n != 0 {
				r.Errorf("%d bytes are credited again", n)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, 64*kib)
			r.alloc(kib)
			during(r)
			r.want(0, 0)
		})
	}
}

// TestForgetsIdleDevices: a budget outlives its devices, and keeps only those that it charges.
func TestForgetsIdleDevices(t *testing.T) {
	r := newRig(t, 64*kib)
	r.free(r.alloc(kib))
	before := r.spy.reaps.Load()
	r.b.Reap()
	if n := r.spy.reaps.Load() - before; n != 0 {
		t.Errorf("a device without allocations was reaped %d times", n)
	}
}

// TestAllocOfNothing: the device refuses what has no size, and nothing is charged.
func TestAllocOfNothing(t *testing.T) {
	r := newRig(t, 64*kib)
	for _, n := range []int64{0, -1, math.MinInt64} {
		if _, err := r.dev.Alloc(r.s, n); err == nil {
			t.Errorf("Alloc(%d) has no error", n)
		}
	}
	r.want(0, 0)
}

// An address that comes again was freed, though not through the budget: it counts once.
func TestFreedBehindTheBudgetsBack(t *testing.T) {
	r := newRig(t, 64*kib)
	a := r.alloc(2 * kib)
	if err := r.spy.Device.Free(r.s, a); err != nil {
		t.Fatal(err)
	}
	r.sync()
	r.spy.Device.Reap()
	if again := r.alloc(2 * kib); again != a {
		t.Skipf("needs a device that gives an address out again: %#x, then %#x", a, again)
	}
	r.want(2*kib, 0)
}

// TestFreedBehindTheBudgetsBackStaysLive: the device does not count the bytes any more, but only a
// Free through the budget retires them.
func TestFreedBehindTheBudgetsBackStaysLive(t *testing.T) {
	r := newRig(t, 64*kib)
	a := r.alloc(2 * kib)
	if err := r.spy.Device.Free(r.s, a); err != nil {
		t.Fatal(err)
	}
	r.sync()
	if n := r.dev.Reap(); n != 0 {
		t.Errorf("Reap credited %d bytes of a live allocation", n)
	}
	r.want(2*kib, 0)
}

// TestPeak: the peak is the largest sum over all devices, whether or not Stats was called then.
func TestPeak(t *testing.T) {
	r := newRig(t, 64*kib)
	other, s := wrap(t, r.b, newSim(t, 64*kib))
	a := r.alloc(20 * kib)
	b, err := other.Alloc(s, 30*kib)
	if err := errors.Join(err, other.Free(s, b)); err != nil {
		t.Fatal(err)
	}
	r.free(a)
	r.free(r.alloc(40 * kib))
	if st := r.b.Stats(); st.Peak != 50*kib {
		t.Errorf("the peak is %d bytes, want %d", st.Peak, 50*kib)
	}
	r.want(0, 0)
}

// The spaces that share a budget are notified when there is more room, and of nothing else.
func TestSubscribersAreToldOfRoom(t *testing.T) {
	r := newRig(t, 64*kib)
	told := 0
	cancel := tier.QuotaOf(r.dev).Subscribe(func() { told++ })
	want := func(what string, more bool) {
		t.Helper()
		if (told > 0) != more {
			t.Errorf("%s: told %d times", what, told)
		}
		told = 0
	}
	setLimit := func(n int64) {
		t.Helper()
		if err := r.b.SetLimit(n); err != nil {
			t.Fatal(err)
		}
	}
	a := r.alloc(2 * kib)
	want("allocating", false)
	g := r.block()
	r.free(a)
	want("freeing, with the work under way", false)
	g.open()
	r.sync()
	r.dev.Reap()
	want("reaping", true)
	r.dev.Reap()
	want("reaping nothing", false)
	setLimit(65 * kib)
	want("another limit", true)
	cancel()
	setLimit(66 * kib)
	want("nobody", false)
}

func TestSetLimit(t *testing.T) {
	r := newRig(t, 64*kib)
	a := r.alloc(48 * kib)
	if err := r.b.SetLimit(32 * kib); err != nil {
		t.Fatal(err)
	}
	r.want(48*kib, 0) // nothing is revoked
	_, err := r.dev.Alloc(r.s, 1)
	mustRefuse(t, err, 256, 48*kib, 32*kib)
	if n := max(0, r.b.Stats().Limit-r.b.Stats().Reserved); n != 0 {
		t.Errorf("%d bytes remain", n)
	}
	if err := r.b.SetLimit(49 * kib); err != nil {
		t.Fatal(err)
	}
	r.free(r.alloc(kib))
	r.free(a)
	_, err = r.dev.Alloc(r.s, 49*kib+1)
	mustRefuse(t, err, 49*kib+256, 0, 49*kib)
	r.want(0, 0)
}

func TestBudgetMemInfo(t *testing.T) {
	b := newBudget(t, 64*kib)
	small, s1 := wrap(t, b, newSim(t, 16*kib))
	large, s2 := wrap(t, b, newSim(t, 256*kib))
	want := func(d tier.Device, free, total int64) {
		t.Helper()
		if f, n, _ := d.MemInfo(); f != free || n != total {
			t.Errorf("MemInfo: %d of %d, want %d of %d", f, n, free, total)
		}
	}
	want(small, 16*kib, 16*kib)
	want(large, 64*kib, 64*kib)
	a, err := large.Alloc(s2, 60*kib)
	if err != nil {
		t.Fatal(err)
	}
	want(small, 4*kib, 16*kib)
	want(large, 4*kib, 64*kib)
	if _, err := small.Alloc(s1, 4*kib); err != nil {
		t.Fatal(err)
	}
	want(small, 0, 16*kib)
	if err := b.SetLimit(32 * kib); err != nil {
		t.Fatal(err)
	}
	want(large, 0, 32*kib)
	if err := large.Free(s2, a); err != nil {
		t.Fatal(err)
	}
	want(large, 28*kib, 32*kib)
	want(small, 12*kib, 16*kib)
}

// TestWrappedTwice: a device that is under the budget already, at any depth, is not limited twice.
// A device that is wrapped again counts by itself, under the same limit.
func TestWrappedTwice(t *testing.T) {
	b := newBudget(t, 64*kib)
	raw := newSim(t, 64*kib)
	d, s := wrap(t, b, raw)
	outer, err := newBudget(t, 32*kib).Wrap(d) // another budget
	if err != nil {
		t.Fatal(err)
	}
	for _, dev := range []tier.Device{d, quota.Logged(d, discard), outer} {
		if got, err := b.Wrap(dev); err != nil || got != dev {
			t.Errorf("wrapping it again gave %v, %v", got, err)
		}
	}
	if _, err := outer.Alloc(s, 32*kib); err != nil {
		t.Fatal(err)
	}
	if _, err := outer.Alloc(s, 1); !errors.Is(err, tier.ErrOutOfBudget) {
		t.Errorf("the outer budget has more than %d bytes: %v", 32*kib, err)
	}
	if st := b.Stats(); st.Reserved != 32*kib {
		t.Errorf("%+v", st)
	}
	again, err := b.Wrap(raw)
	if err != nil || again == d {
		t.Fatalf("wrapped again it is %v: %v", again, err)
	}
	a, err := again.Alloc(s, 32*kib)
	if err != nil {
		t.Fatal(err)
	}
	_, err = d.Alloc(s, 1)
	mustRefuse(t, err, 256, 64*kib, 64*kib)
	if err := d.Free(s, a); err == nil {
		t.Error("a device has freed what was allocated through another")
	}
	if err := again.Free(s, a); err != nil {
		t.Fatal(err)
	}
	if st := b.Stats(); st.Live != 32*kib || st.Retired != 0 {
		t.Errorf("%+v", st)
	}
}

// TestBytesOfOthers: a budget does not count what others allocate and free on the device.
func TestBytesOfOthers(t *testing.T) {
	raw := newSim(t, 256*kib)
	rs, err := raw.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	older, err := raw.Alloc(rs, 200*kib)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{T: t, b: newBudget(t, 32*kib)}
	r.dev, r.s = wrap(t, r.b, raw)
	r.want(0, 0)
	a, b := r.alloc(16*kib), r.alloc(16*kib)
	if err := r.dev.Free(r.s, older); err == nil {
		t.Error("the budget has freed what was not allocated through it")
	}
	g := r.block()
	r.free(a)
	if err := raw.Free(rs, older); err != nil {
		t.Fatal(err)
	}
	if n := r.dev.Reap(); n != 0 {
		t.Errorf("Reap credited %d bytes that another has freed", n)
	}
	r.want(16*kib, 16*kib)
	g.open()
	r.sync()
	if n := r.dev.Reap(); n != 16*kib {
		t.Errorf("Reap credited %d bytes", n)
	}
	r.free(b)
	r.want(0, 0)
}
