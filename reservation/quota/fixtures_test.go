package quota_test

import (
	"errors"
	"io"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/sim"
	"github.com/spillway-db/spillway/tier/tiertest"
)

var errFault = errors.New("a fault on purpose")

// spy is between a budget and a device: it counts calls and does what a test wants before them.
type spy struct {
	tier.Device
	allocs, reaps atomic.Int64

	beforeAlloc, beforeFree, beforeRecord func() error
	afterAlloc, afterOutstanding          func()
}

func (d *spy) Unwrap() tier.Device { return d.Device }

func call(f func() error) error {
	if f == nil {
		return nil
	}
	return f()
}

func (d *spy) Alloc(s tier.Stream, size int64) (tier.Addr, error) {
	d.allocs.Add(1)
	if err := call(d.beforeAlloc); err != nil {
		return 0, err
	}
	a, err := d.Device.Alloc(s, size)
	if d.afterAlloc != nil {
		d.afterAlloc()
	}
	return a, err
}

func (d *spy) Free(s tier.Stream, a tier.Addr) error {
	if err := call(d.beforeFree); err != nil {
		return err
	}
	return d.Device.Free(s, a)
}

func (d *spy) Record(s tier.Stream) (tier.Event, error) {
	if err := call(d.beforeRecord); err != nil {
		return nil, err
	}
	return d.Device.Record(s)
}

func (d *spy) Reap() int64 {
	d.reaps.Add(1)
	return d.Device.Reap()
}

func (d *spy) Outstanding() int64 {
	n := d.Device.Outstanding()
	if f := d.afterOutstanding; f != nil {
		d.afterOutstanding = nil
		f()
	}
	return n
}

// plain is a device that frees synchronously: it waits for the stream.
type plain struct{ tier.Device }

func (d plain) Unwrap() tier.Device { return d.Device }

func (d plain) Free(s tier.Stream, a tier.Addr) error {
	return errors.Join(s.Sync(), d.Device.Free(s, a), s.Sync())
}

// gate is an event that is done when the test says so, at the latest when it ends.
type gate struct{ open func() }

type gateEvent chan struct{}

func (c gateEvent) Done() <-chan struct{} { return c }
func (c gateEvent) Err() error            { return nil }

// closeGate puts a gate on a stream.
func closeGate(t testing.TB, d tier.Device, s tier.Stream) (gate, error) {
	c := make(gateEvent)
	g := gate{sync.OnceFunc(func() { close(c) })}
	err := d.WaitEvent(s, c)
	if err == nil {
		t.Cleanup(g.open)
	}
	return g, err
}

const kib = 1 << 10

// rig is a budget over a spied simulated device.
type rig struct {
	*testing.T
	b   *quota.Budget
	spy *spy
	dev tier.Device
	s   tier.Stream
}

func newSim(t testing.TB, memory int64) tier.Device {
	t.Helper()
	d, err := sim.New(sim.Config{Memory: memory})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func newBudget(t testing.TB, limit int64, name ...string) *quota.Budget {
	t.Helper()
	b, err := quota.NewBudget(limit, strings.Join(name, ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// wrap wraps dev, which is closed with the test, and opens a stream.
func wrap(t testing.TB, b *quota.Budget, dev tier.Device) (tier.Device, tier.Stream) {
	t.Helper()
	d, err := b.Wrap(dev)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil && !errors.Is(err, tier.ErrClosed) {
			t.Errorf("closing the device: %v", err)
		}
	})
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	return d, s
}

// newRig has a limit and, on the device, four times that.
func newRig(t *testing.T, limit int64, name ...string) *rig {
	tiertest.NoLeaks(t)
	r := &rig{T: t, b: newBudget(t, limit, name...), spy: &spy{Device: newSim(t, 4*limit)}}
	r.dev, r.s = wrap(t, r.b, r.spy)
	return r
}

func (r *rig) alloc(n int64) tier.Addr {
	r.Helper()
	a, err := r.dev.Alloc(r.s, n)
	if err != nil {
		r.Fatalf("Alloc(%d): %v", n, err)
	}
	return a
}

func (r *rig) free(a tier.Addr) {
	r.Helper()
	if err := r.dev.Free(r.s, a); err != nil {
		r.Fatalf("Free: %v", err)
	}
}

// block holds up the stream until the gate is opened.
func (r *rig) block() gate {
	r.Helper()
	g, err := closeGate(r, r.dev, r.s)
	if err != nil {
		r.Fatal(err)
	}
	return g
}

func (r *rig) sync() {
	r.Helper()
	if err := r.s.Sync(); err != nil {
		r.Fatal(err)
	}
}

// want checks the books at a quiet moment.
func (r *rig) want(live, retired int64) {
	r.Helper()
	checkBooks(r, r.b.Stats())
	if s := r.b.Stats(); s.Live != live || s.Retired != retired {
		r.Fatalf("live %d, retired %d; want %d and %d: %+v", s.Live, s.Retired, live, retired, s)
	}
}

// checkBooks checks what holds whenever nothing is under way and nothing is
// promised.
func checkBooks(t testing.TB, s quota.BudgetStats) {
	t.Helper()
	if s.Reserved != s.Live+s.Retired || s.Pending != 0 {
		t.Fatalf("reserved is not live + retired: %+v", s)
	}
	if s.Peak < s.Reserved {
		t.Fatalf("the peak is below what is reserved: %+v", s)
	}
}

// mustRefuse checks a refusal's type and numbers.
func mustRefuse(t testing.TB, err error, requested, current, limit int64) {
	t.Helper()
	var full *tier.OutOfBudgetError
	if !errors.As(err, &full) || !errors.Is(err, tier.ErrOutOfBudget) || !errors.Is(err, tier.ErrNoSpace) {
		t.Fatalf("%v; want an OutOfBudgetError", err)
	}
	want := tier.OutOfBudgetError{
		Budget: full.Budget, Requested: requested, Remaining: max(0, limit-current), Current: current, Limit: limit,
	}
	if *full != want {
		t.Fatalf("%+v; want %+v", *full, want)
	}
}

var discard = slog.New(slog.NewTextHandler(io.Discard, &slog.HandlerOptions{Level: slog.LevelDebug}))
