package quota_test

import (
	"errors"
	"math"
	"sync"
	"testing"

	"github.com/spillway-db/spillway/internal/sim"
	"github.com/spillway-db/spillway/tier"
)

func TestAsynchronousFree(t *testing.T) {
	r := newRig(t, 64*kib)
	a, b := r.alloc(40*kib), r.alloc(24*kib)
	first := r.block()
	r.free(a)
	second := r.block()
	r.free(b)
	r.want(0, 64*kib)
	if n := r.dev.Reap(); n != 0 {
		t.Fatalf("Reap credited %d bytes of what the device works on", n)
	}
	_, err := r.dev.Alloc(r.s, 1)
	mustRefuse(t, err, 256, 64*kib, 64*kib)
	e, err := r.dev.Record(r.s) // behind both
	if err != nil {
		t.Fatal(err)
	}
	other, err := r.dev.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	// The first free is finished when the stream waits for the second gate.
	first.open()
	for r.spy.Device.Outstanding() != 24*kib {
		yield()
	}
	// The event behind the free is done after that; nothing else is.
	for got := int64(0); got == 0; yield() {
		if got = r.dev.Reap(); got != 0 && got != 40*kib {
			t.Fatalf("Reap credited %d bytes; the device has finished with %d", got, 40*kib)
		}
	}
	r.want(0, 24*kib)
	c, err := r.dev.Alloc(other, 40*kib)
	if err != nil {
		t.Fatal(err)
	}
	second.open()
	<-e.Done()
	if n := r.dev.Reap(); n != 24*kib {
		t.Fatalf("Reap credited %d bytes, want %d", n, 24*kib)
	}
	if n := r.dev.Reap(); n != 0 {
		t.Fatalf("Reap credited %d bytes twice", n)
	}
	if err := r.dev.Free(other, c); err != nil {
		t.Fatal(err)
	}
	r.want(0, 0)
}

func TestSynchronousFree(t *testing.T) {
	raw := newSim(t, 256*kib)
	b := newBudget(t, 64*kib)
	d, s := wrap(t, b, plain{raw})
	a, err := d.Alloc(s, 64*kib)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Fill(s, a, 1, 64*kib); err != nil {
		t.Fatal(err)
	}
	for range 100 {
		if err := d.Free(s, a); err != nil {
			t.Fatal(err)
		}
		if st := b.Stats(); st.Reserved != 0 || st.Retired != 0 {
			t.Fatalf("after a synchronous free: %+v", st)
		}
		if a, err = d.Alloc(s, 64*kib); err != nil {
			t.Fatal(err)
		}
		if err := d.Fill(s, a, 1, 64*kib); err != nil {
			t.Fatal(err)
		}
	}
	checkBooks(t, b.Stats())
}

func TestBogusFree(t *testing.T) {
	r := newRig(t, 64*kib)
	a := r.alloc(10 * kib)
	for _, at := range []tier.Addr{0, a + 256, a - 1, math.MaxUint64} {
		if err := r.dev.Free(r.s, at); err == nil {
			t.Errorf("Free(%#x) passed", uint64(at))
		}
		r.want(10*kib, 0)
	}
	if err := r.dev.Free(nil, a); err == nil {
		t.Error("Free on no stream passed")
	}
	r.want(10*kib, 0)
	r.free(a)
	r.want(0, 0)
}

func TestDoubleFree(t *testing.T) {
	r := newRig(t, 64*kib)
	a, b := r.alloc(10*kib), r.alloc(20*kib)
	g := r.block()
	r.free(a)
	if err := r.dev.Free(r.s, a); err == nil {
		t.Error("a second free passed while the first is under way")
	}
	r.want(20*kib, 10*kib)
	g.open()
	r.sync()
	r.dev.Reap()
	r.want(20*kib, 0)
	if err := r.dev.Free(r.s, a); err == nil {
		t.Error("a second free passed")
	}
	r.want(20*kib, 0)
	// Many at once: one of them passes.
	var wg sync.WaitGroup
	errs := make([]error, 8)
	for i := range errs {
		s, err := r.dev.NewStream()
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() { errs[i] = r.dev.Free(s, b) })
	}
	wg.Wait()
	passed := 0
	for _, err := range errs {
		if err == nil {
			passed++
		}
	}
	if passed != 1 {
		t.Errorf("%d of %d frees of one allocation passed: %v", passed, len(errs), errs)
	}
	r.want(0, 0)
}

// TestDoubleFreeInACall: an allocation cannot be freed while a call frees it.
func TestDoubleFreeInACall(t *testing.T) {
	r := newRig(t, 64*kib)
	a := r.alloc(16 * kib)
	r.spy.beforeFree = func() error {
		r.spy.beforeFree = nil
		if err := r.dev.Free(r.s, a); err == nil {
			t.Error("a free passed while the first was being made")
		}
		return nil
	}
	r.free(a)
	r.want(0, 0)
}

func TestWrappingNothingOverTheLimit(t *testing.T) {
	r := newRig(t, 64*kib)
	a := r.alloc(64 * kib)
	if err := r.b.SetLimit(kib); err != nil {
		t.Fatal(err)
	}
	d, err := r.b.Wrap(newSim(t, 64*kib))
	if err != nil {
		t.Fatalf("a device with nothing on it: %v", err)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	r.free(a)
}

// While one allocation hangs in the device, which counts it already, what others
// free is credited in full.
func TestConcurrentAdmissionDoesNotHideARelease(t *testing.T) {
	r := newRig(t, 64*kib)
	a, b := r.alloc(20*kib), r.alloc(4*kib)
	inside, goOn := make(chan struct{}), make(chan struct{})
	r.spy.afterAlloc = func() {
		close(inside)
		<-goOn
	}
	other, err := r.dev.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	var c tier.Addr
	var cerr error
	wg.Go(func() { c, cerr = r.dev.Alloc(other, 40*kib) })
	<-inside
	r.spy.afterAlloc = nil
	before := r.b.Stats()
	if before.Pending != 40*kib || before.Reserved != 64*kib {
		t.Errorf("%+v", before)
	}
	// As much comes as goes: what is outstanding on the device was 24 KiB before the
	// two and will not be less afterwards.
	r.free(a)
	if s := r.b.Stats(); s.Live != 4*kib || s.Retired != 0 || s.Reserved != 44*kib {
		t.Errorf("%d bytes were freed: %+v", 20*kib, s)
	}
	a = r.alloc(20 * kib)
	r.free(b)
	close(goOn)
	wg.Wait()
	if cerr != nil {
		t.Fatal(cerr)
	}
	r.want(60*kib, 0)
	r.free(a)
	r.free(c)
	r.want(0, 0)
}

func TestReapAndRetryOnce(t *testing.T) {
	r := newRig(t, 64*kib)
	other, err := r.dev.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	a := r.alloc(64 * kib)
	g := r.block()
	r.free(a)
	refuse := func(n int64, reaps int64) {
		t.Helper()
		before, calls := r.spy.reaps.Load(), r.spy.allocs.Load()
		if _, err := r.dev.Alloc(other, n); !errors.Is(err, tier.ErrOutOfBudget) {
			t.Fatalf("Alloc(%d): %v", n, err)
		}
		if got := r.spy.reaps.Load() - before; got != reaps {
			t.Errorf("Alloc(%d) reaped %d times, want %d", n, got, reaps)
		}
		if r.spy.allocs.Load() != calls {
			t.Error("the device was asked")
		}
	}
	refuse(64*kib, 1) // it could fit, and does not yet
	g.open()
	r.sync()
	before := r.spy.reaps.Load()
	b, err := r.dev.Alloc(other, 64*kib)
	if err != nil {
		t.Fatal(err)
	}
	if got := r.spy.reaps.Load() - before; got != 1 {
		t.Errorf("the device was reaped %d times", got)
	}
	if s := r.b.Stats(); s.Refused != 1 {
		t.Errorf("%+v", s)
	}
	if err := r.dev.Free(other, b); err != nil {
		t.Fatal(err)
	}
	r.want(0, 0)
}

// What does not fit on one device may need what another has to reap.
func TestReapsTheOtherDevices(t *testing.T) {
	b := newBudget(t, 64*kib)
	d1, s1 := wrap(t, b, newSim(t, 64*kib))
	d2, s2 := wrap(t, b, newSim(t, 64*kib))
	a, err := d1.Alloc(s1, 64*kib)
	if err != nil {
		t.Fatal(err)
	}
	g, err := closeGate(t, d1, s1)
	if err := errors.Join(err, d1.Free(s1, a)); err != nil {
		t.Fatal(err)
	}
	_, err = d2.Alloc(s2, 1)
	mustRefuse(t, err, 256, 64*kib, 64*kib)
	g.open()
	if err := s1.Sync(); err != nil {
		t.Fatal(err)
	}
	if a, err = d2.Alloc(s2, 64*kib); err != nil {
		t.Fatal(err)
	}
	if err := d2.Free(s2, a); err != nil {
		t.Fatal(err)
	}
	checkBooks(t, b.Stats())
}

// A device that takes memory back only at a reap has been reaped before the budget credits.
func TestLazyDeviceReapsBeforeTheCredit(t *testing.T) {
	raw := newSim(t, 64*kib)
	lazy := &lazyDevice{Device: raw}
	b := newBudget(t, 64*kib) // all of it: a credit that comes too early shows
	d, s := wrap(t, b, lazy)
	for range 10 {
		a, err := d.Alloc(s, 64*kib)
		if err != nil {
			t.Fatal(err)
		}
		g, err := closeGate(t, d, s)
		if err := errors.Join(err, d.Free(s, a)); err != nil {
			t.Fatal(err)
		}
		if n := d.Reap(); n != 0 {
			t.Fatalf("Reap credited %d", n)
		}
		g.open()
		if err := s.Sync(); err != nil {
			t.Fatal(err)
		}
		if st := b.Stats(); st.Retired != 64*kib {
			t.Fatalf("%+v", st)
		}
	}
	d.Reap()
	checkBooks(t, b.Stats())
	if n := raw.Outstanding(); n != 0 {
		t.Errorf("%d bytes are outstanding", n)
	}
}

// lazyDevice gives memory back to the device only in Reap, when the work before the
// free is done.
type lazyDevice struct {
	tier.Device
	s      tier.Stream
	events []tier.Event
	addrs  []tier.Addr
}

func (d *lazyDevice) Free(s tier.Stream, a tier.Addr) error {
	e, err := d.Device.Record(s)
	if err != nil {
		return err
	}
	d.events, d.addrs = append(d.events, e), append(d.addrs, a)
	return nil
}

func (d *lazyDevice) Reap() (n int64) {
	if d.s == nil {
		d.s, _ = d.Device.NewStream()
	}
	for len(d.events) > 0 {
		select {
		case <-d.events[0].Done():
		default:
			return n
		}
		before := d.Device.Outstanding()
		_ = d.Device.Free(d.s, d.addrs[0])
		n += before - d.Device.Outstanding()
		d.events, d.addrs = d.events[1:], d.addrs[1:]
	}
	return n
}

func TestRecordRefused(t *testing.T) {
	r := newRig(t, 64*kib)
	a, b := r.alloc(10*kib), r.alloc(20*kib)
	other, err := r.dev.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	c, err := r.dev.Alloc(other, kib)
	if err != nil {
		t.Fatal(err)
	}
	r.spy.beforeRecord = func() error { return errFault }
	r.free(a)
	r.want(21*kib, 10*kib)
	r.spy.beforeRecord = nil
	if err := r.dev.Free(other, c); err != nil {
		t.Fatal(err)
	}
	r.want(20*kib, 10*kib) // an event on another stream is not behind it
	g := r.block()
	r.free(b)
	r.want(0, 30*kib) // the event is behind both
	if n := r.dev.Reap(); n != 0 {
		t.Errorf("Reap credited %d", n)
	}
	g.open()
	r.sync()
	if n := r.dev.Reap(); n != 30*kib {
		t.Errorf("Reap credited %d", n)
	}
	r.want(0, 0)
	// Without a later event, that the device has nothing shows the end.
	a = r.alloc(10 * kib)
	g = r.block()
	r.spy.beforeRecord = func() error { return errFault }
	r.free(a)
	r.want(0, 10*kib)
	g.open()
	r.sync()
	if n := r.dev.Reap(); n != 10*kib {
		t.Errorf("Reap credited %d", n)
	}
	r.want(0, 0)
}

// TestFailedStream: frees take place on streams whose work has failed. An event with an error is
// after them as any other.
func TestFailedStream(t *testing.T) {
	raw, err := sim.NewFaulty(sim.Config{Memory: 256 * kib}, func(op sim.Op) error {
		if op.Stage == sim.Run {
			return errFault
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{T: t, b: newBudget(t, 64*kib)}
	r.dev, r.s = wrap(t, r.b, raw)
	a, kept := r.alloc(10*kib), r.alloc(kib)
	g := r.block()
	if err := r.dev.Fill(r.s, a, 1, kib); err != nil {
		t.Fatal(err)
	}
	r.free(a)
	r.want(kib, 10*kib)
	g.open()
	if err := r.s.Sync(); !errors.Is(err, errFault) {
		t.Fatalf("the stream has not failed: %v", err)
	}
	if n := r.dev.Reap(); n != 10*kib {
		t.Errorf("Reap credited %d", n)
	}
	r.free(kept)
	r.want(0, 0)
}
