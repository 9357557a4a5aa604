package quota_test

import (
	"context"
	"errors"
	"math"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
)

func yield() { runtime.Gosched() }

// newSpace opens a space over dev that charges its quota.
func newSpace(t *testing.T, dev tier.Device, capacity int64) *tier.Space {
	t.Helper()
	pool, err := devpool.NewMemory(dev)
	if err != nil {
		t.Fatal(err)
	}
	s, err := tier.NewSpace(tier.SpaceConfig{
		ID: tier.ID{Kind: tier.GPU}, Capacity: capacity, Pool: pool, Quota: tier.QuotaOf(dev),
		Marks: tier.Marks{Limit: 1, Trigger: 1, Stop: 0.5},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil && !errors.Is(err, tier.ErrClosed) {
			t.Error(err)
		}
	})
	return s
}

// What one space has promised, another that shares the budget cannot take, and it is
// charged once when it is drawn.
func TestPromisesHold(t *testing.T) {
	b := newBudget(t, 64*kib)
	d1, _ := wrap(t, b, newSim(t, 64*kib))
	d2, s2 := wrap(t, b, quota.Logged(newSim(t, 64*kib), discard))
	one, two := newSpace(t, d1, 64*kib), newSpace(t, quota.Logged(d2, discard), 64*kib)
	promise, err := one.Promise(40 * kib)
	if err != nil {
		t.Fatal(err)
	}
	rest, err := one.Promise(8 * kib)
	if err != nil {
		t.Fatal(err)
	}
	if n := two.State().Available; n != 16*kib {
		t.Errorf("%d bytes are available to the other", n)
	}
	if n := two.State().Ceiling; n != 16*kib {
		t.Errorf("the other's ceiling is %d", n)
	}
	_, err = two.Promise(16*kib + 256)
	mustRefuse(t, err, 16*kib+256, 48*kib, 64*kib)
	var full *tier.NoSpaceError
	if !errors.As(err, &full) || full.Space != two.ID() || full.Available != 16*kib {
		t.Errorf("%v", err)
	}
	if _, err := d2.Alloc(s2, 16*kib+1); !errors.Is(err, tier.ErrOutOfBudget) {
		t.Errorf("allocating beside a promise: %v", err)
	}
	if err := b.SetLimit(40 * kib); err != nil { // revokes no promise
		t.Fatal(err)
	}
	promise.Draw(40*kib, 0, false)
	buf, err := one.Draw(promise, 40*kib, nil)
	if err := errors.Join(err, one.Release(promise)); err != nil {
		t.Fatal(err)
	}
	if st := b.Stats(); st.Reserved != 48*kib || st.Live != 40*kib || st.Promised != 48*kib {
		t.Errorf("%+v", st)
	}
	woken := atomic.Int64{}
	defer two.Subscribe(func(aboveTrigger bool) {
		if !aboveTrigger {
			woken.Add(1)
		}
	})()
	if err := buf.Release(); err != nil {
		t.Fatal(err)
	}
	for two.State().Available != 32*kib { // the device may take its time
		yield()
	}
	if woken.Load() == 0 {
		t.Error("the space that shares the budget was not told that there is room")
	}
	if err := one.Release(rest); err != nil {
		t.Error(err)
	}
	checkBooks(t, b.Stats())
	if two.State().Room != 40*kib {
		t.Errorf("the room is %d with a limit of %d", two.State().Room, 40*kib)
	}
}

// Two budgets over one device: a promise is one within both.
func TestPromisesInTwoBudgets(t *testing.T) {
	inner, outer := newBudget(t, 64*kib), newBudget(t, 32*kib)
	d, err := inner.Wrap(newSim(t, 64*kib))
	if err != nil {
		t.Fatal(err)
	}
	top, _ := wrap(t, outer, d)
	s := newSpace(t, top, 64*kib)
	if s.State().Room != 32*kib || s.State().Available != 32*kib {
		t.Errorf("room %d, available %d", s.State().Room, s.State().Available)
	}
	promise, err := s.Promise(32 * kib)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range []*quota.Budget{inner, outer} {
		if st := b.Stats(); st.Reserved != 32*kib || st.Promised != 32*kib {
			t.Errorf("%+v", st)
		}
	}
	if _, err := s.Promise(256); !errors.Is(err, tier.ErrOutOfBudget) {
		t.Errorf("%v", err)
	}
	if err := s.Release(promise); err != nil {
		t.Fatal(err)
	}
	if err := inner.SetLimit(16 * kib); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Promise(32 * kib); !errors.Is(err, tier.ErrOutOfBudget) { // refused by the second one
		t.Errorf("%v", err)
	}
	checkBooks(t, inner.Stats())
	checkBooks(t, outer.Stats())
	if outer.Stats().Reserved != 0 {
		t.Errorf("what one budget refused stays in the other: %+v", outer.Stats())
	}
}

// TestRemainingOverALoweredLimit: each device is over the limit by its share of the excess, and the
// shares cover it.
func TestRemainingOverALoweredLimit(t *testing.T) {
	b := newBudget(t, 96*kib)
	d1, _ := wrap(t, b, newSim(t, 64*kib))
	d2, _ := wrap(t, b, newSim(t, 64*kib))
	empty, _ := wrap(t, b, newSim(t, 64*kib))
	one, two := tier.QuotaOf(d1), tier.QuotaOf(d2)
	if err := errors.Join(one.Charge(60*kib), two.Charge(20*kib)); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ limit, one, two, empty int64 }{
		{96 * kib, 16 * kib, 16 * kib, 16 * kib},
		{80 * kib, 0, 0, 0},
		{40 * kib, -30 * kib, -10 * kib, 0},
		{80*kib - 1, -1, -1, 0},
		{1, -60 * kib, -20 * kib, 0},
	} {
		if err := b.SetLimit(c.limit); err != nil {
			t.Fatal(err)
		}
		got := [3]int64{one.Remaining(), two.Remaining(), tier.QuotaOf(empty).Remaining()}
		if want := [3]int64{c.one, c.two, c.empty}; got != want {
			t.Errorf("with a limit of %d bytes %v remain, want %v", c.limit, got, want)
		}
	}
	one.Credit(60 * kib)
	two.Credit(20 * kib)
	checkBooks(t, b.Stats())
}

// TestQuotaOfAClosedDevice: nothing can be charged any more, and nothing is credited twice.
func TestQuotaOfAClosedDevice(t *testing.T) {
	b := newBudget(t, 64*kib)
	d, _ := wrap(t, b, newSim(t, 64*kib))
	q := tier.QuotaOf(d)
	if err := errors.Join(q.Charge(kib), d.Close()); err != nil {
		t.Fatal(err)
	}
	if err := q.Charge(1); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("%v", err)
	}
	if st := b.Stats(); st.Reserved != 0 {
		t.Errorf("closing left %+v", st)
	}
	q.Credit(kib)
	checkBooks(t, b.Stats())
	if st := b.Stats(); st.Reserved != 0 {
		t.Errorf("%+v", st)
	}
}

// When a space reports that bytes are free, the budget knows that the device is done with them,
// without a reap.
func TestCreditOfAnAsynchronousFree(t *testing.T) {
	b := newBudget(t, 64*kib)
	sp := &spy{Device: newSim(t, 64*kib)}
	d, _ := wrap(t, b, sp)
	held := &heldFrees{Device: d, t: t, gate: make(chan gate, 1)}
	s := newSpace(t, held, 64*kib)
	buf, err := s.DrawNew(64 * kib)
	if err != nil {
		t.Fatal(err)
	}
	if err := buf.Release(); err != nil {
		t.Fatal(err)
	}
	if st := b.Stats(); st.Retired != 64*kib || st.Reserved != 64*kib {
		t.Errorf("%+v", st)
	}
	freed := make(chan struct{}, 1)
	defer s.Subscribe(func(aboveTrigger bool) {
		if !aboveTrigger {
			select {
			case freed <- struct{}{}:
			default:
			}
		}
	})()
	(<-held.gate).open()
	<-freed
	if n := s.State().Available; n != 64*kib {
		t.Errorf("%d bytes are available when the space says that they are: %+v", n, b.Stats())
	}
	checkBooks(t, b.Stats())
}

// A manager of spaces makes no request of its own to the budget: it would be in the budget's
// figures.
func TestManagerLeavesTheFiguresAlone(t *testing.T) {
	for _, limit := range []int64{64 * kib, math.MaxInt64} {
		b := newBudget(t, limit)
		d, _ := wrap(t, b, newSim(t, 64*kib))
		m, err := reservation.NewManager(reservation.Config{Spaces: []*tier.Space{newSpace(t, d, 64*kib)}})
		if err != nil {
			t.Fatal(err)
		}
		if st := b.Stats(); st != (quota.BudgetStats{Limit: limit}) {
			t.Errorf("%+v", st)
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}
}

// A space reports each release, also when the budget is charged no less for it, because more is
// allocated beside the space than it has promised: there may be waiters for its own room.
func TestCreditBesideAllocations(t *testing.T) {
	b := newBudget(t, 512*kib)
	d, stream := wrap(t, b, newSim(t, 512*kib))
	s := newSpace(t, d, 64*kib)
	m, err := reservation.NewManager(reservation.Config{Spaces: []*tier.Space{s}})
	if err != nil {
		t.Fatal(err)
	}
	beside, err := d.Alloc(stream, 128*kib)
	if err != nil {
		t.Fatal(err)
	}
	held, err := m.TryReserve(reservation.Specific(s.ID()), 64*kib, nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // only a defect reaches it
	defer cancel()
	waited := make(chan error)
	go func() {
		r, err := m.Reserve(ctx, reservation.Specific(s.ID()), 32*kib, nil)
		waited <- errors.Join(err, r.Release())
	}()
	for len(m.Demand(nil)) == 0 {
		yield()
	}
	if err := held.Release(); err != nil {
		t.Fatal(err)
	}
	if err := <-waited; err != nil {
		t.Errorf("with %d bytes available: %v", s.State().Available, err)
	}
	if err := errors.Join(m.Close(), s.Close()); err != nil {
		t.Fatal(err)
	}
	q, calls := tier.QuotaOf(d), 0
	if err := q.Charge(kib); err != nil {
		t.Fatal(err)
	}
	defer q.Subscribe(func() { calls++ })()
	if q.Credit(kib); calls != 1 {
		t.Errorf("the subscribers were called %d times", calls)
	}
	if err := d.Free(stream, beside); err != nil {
		t.Error(err)
	}
}

// heldFrees holds the stream up before each free.
type heldFrees struct {
	tier.Device
	t    *testing.T
	gate chan gate
}

func (d *heldFrees) Unwrap() tier.Device { return d.Device }

func (d *heldFrees) Free(s tier.Stream, a tier.Addr) error {
	g, err := closeGate(d.t, d.Device, s)
	d.gate <- g
	return errors.Join(err, d.Device.Free(s, a))
}
