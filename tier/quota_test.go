package tier_test

import (
	"errors"
	"testing"

	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/sim"
)

// counter is a quota for one goroutine.
type counter struct {
	used, limit int64
	told        map[int]func()
	next        int
}

func (q *counter) Charge(n int64) error {
	if n > q.limit-q.used {
		return &tier.OutOfBudgetError{Requested: n, Remaining: q.limit - q.used, Current: q.used, Limit: q.limit}
	}
	q.used += n
	return nil
}

func (q *counter) Credit(n int64) {
	q.used -= n
	for _, f := range q.told {
		f()
	}
}

func (q *counter) Remaining() int64 { return max(0, q.limit-q.used) }
func (q *counter) Limit() int64     { return q.limit }

func (q *counter) Subscribe(f func()) (cancel func()) {
	if q.told == nil {
		q.told = make(map[int]func())
	}
	q.next++
	id := q.next
	q.told[id] = f
	return func() { delete(q.told, id) }
}

func TestQuotasChargeAllOrNone(t *testing.T) {
	if q := tier.Quotas(nil, nil); q != nil {
		t.Errorf("of none it is %v", q)
	}
	a, b, c := &counter{limit: 100}, &counter{limit: 50}, &counter{limit: 70}
	if q := tier.Quotas(nil, a, nil); q != a {
		t.Errorf("of one it is %v", q)
	}
	q := tier.Quotas(a, b, c)
	told := 0
	cancel := q.Subscribe(func() { told++ })
	if q.Limit() != 50 || q.Remaining() != 50 {
		t.Errorf("limit %d, remaining %d", q.Limit(), q.Remaining())
	}
	if err := q.Charge(50); err != nil {
		t.Fatal(err)
	}
	for want, one := range []*counter{a, b, c} {
		if one.used != 50 {
			t.Errorf("quota %d was charged %d", want, one.used)
		}
	}
	b.limit, c.limit = 200, 60
	if err := q.Charge(20); !errors.Is(err, tier.ErrOutOfBudget) {
		t.Errorf("the last has no room: %v", err)
	}
	if a.used != 50 || b.used != 50 || c.used != 50 || told != 2 {
		t.Errorf("after a refusal: %d, %d, %d; told %d times", a.used, b.used, c.used, told)
	}
	q.Credit(50)
	if a.used+b.used+c.used != 0 || told != 5 {
		t.Errorf("after a credit: %d, %d, %d; told %d times", a.used, b.used, c.used, told)
	}
	cancel()
	q.Credit(0)
	if told != 5 {
		t.Error("told after the end")
	}
}

// limited is a device with a quota, and over another device.
type limited struct {
	tier.Device
	q tier.Quota
}

func (d limited) Unwrap() tier.Device { return d.Device }
func (d limited) Quota() tier.Quota   { return d.q }

func TestQuotaOf(t *testing.T) {
	dev := openDevice(t, sim.Config{Memory: 1 << 20})
	if q := tier.QuotaOf(dev); q != nil {
		t.Errorf("a device that is not limited has %v", q)
	}
	inner, outer := &counter{limit: 30}, &counter{limit: 40}
	q := tier.QuotaOf(limited{struct {
		limited
	}{limited{dev, inner}}, outer})
	if err := q.Charge(30); err != nil || inner.used != 30 || outer.used != 30 {
		t.Errorf("%v; charged %d and %d", err, inner.used, outer.used)
	}
	if q.Charge(5) == nil {
		t.Error("the inner limit is exceeded")
	}
}

func TestCeiling(t *testing.T) {
	dev := openDevice(t, sim.Config{Memory: 1 << 20})
	pool, err := devpool.NewMemory(dev)
	if err != nil {
		t.Fatal(err)
	}
	q := &counter{limit: 8000}
	s, err := tier.NewSpace(tier.SpaceConfig{
		ID: tier.ID{Kind: tier.GPU}, Capacity: 10_000, Pool: pool, Quota: q,
		Marks: tier.Marks{Limit: 0.9, Trigger: 0.8, Stop: 0.5},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for _, c := range []struct{ mine, others, want int64 }{
		{0, 0, 8000}, {1000, 0, 8000}, {1000, 3000, 5000}, {8000, 0, 8000}, {0, 8000, 0},
	} {
		r := promise(t, s, c.mine)
		ok(t, q.Charge(c.others))
		if got := s.State().Ceiling; got != c.want {
			t.Errorf("with %d used here and %d elsewhere the ceiling is %d, want %d", c.mine, c.others, got, c.want)
		}
		ok(t, s.Release(r))
		q.Credit(c.others)
	}
	q.limit = 1<<63 - 1
	if got := s.State().Ceiling; got != 9000 {
		t.Errorf("with a wide quota the ceiling is %d", got)
	}
}

// TestRefusedBytesAreNotCharged: a quota keeps nothing of what the space's own books refuse.
func TestRefusedBytesAreNotCharged(t *testing.T) {
	q := &counter{limit: 10_000}
	s, err := tier.NewSpace(tier.SpaceConfig{ID: tier.ID{Kind: tier.GPU}, Capacity: 1000, Pool: &fakePool{}, Quota: q})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := s.Promise(s.State().Limit + 1); !errors.Is(err, tier.ErrNoSpace) {
		t.Errorf("reserved above the limit: %v", err)
	}
	if _, err := s.Occupy(s.Capacity + 1); !errors.Is(err, tier.ErrNoSpace) {
		t.Errorf("occupied above the capacity: %v", err)
	}
	if q.used != 0 {
		t.Errorf("the quota is charged %d bytes", q.used)
	}
}

// TestQuotaIsChargedForWhatIsUsed: for promised, live and retired bytes, until they are free.
func TestQuotaIsChargedForWhatIsUsed(t *testing.T) {
	q := &counter{limit: 500}
	p := &fakePool{keep: true}
	s, err := tier.NewSpace(tier.SpaceConfig{ID: tier.ID{Kind: tier.GPU}, Capacity: 1000, Pool: p, Quota: q})
	ok(t, err)
	var c changes
	s.Subscribe(c.listen)
	charged := func(when string, want int64) {
		t.Helper()
		if q.used != want || s.State().Used() != want {
			t.Errorf("%s the quota is charged %d bytes, and %d are used; want %d", when, q.used, s.State().Used(), want)
		}
	}
	r := promise(t, s, 200)
	b, err := drawFrom(s, r, 128)
	ok(t, err)
	charged("drawn:", 200)
	if _, err := s.Promise(301); !errors.Is(err, tier.ErrOutOfBudget) || !errors.Is(err, tier.ErrNoSpace) {
		t.Errorf("more than the quota has: %v", err)
	}
	if s.State().Available != 300 || s.State().Room != 500 {
		t.Errorf("%d bytes are available of a room of %d", s.State().Available, s.State().Room)
	}
	ok(t, s.Release(r))
	charged("the promise released:", 128)
	c.expect(t, "the release", false)
	ok(t, b.Release())
	charged("retired:", 128)
	p.reclaim()
	charged("reclaimed:", 0)
	c.expect(t, "the reclaim", false)
	q.Credit(0)
	c.expect(t, "a credit of another's", false)
	ok(t, s.Close())
	q.Credit(0)
	c.expect(t, "a credit after the close")
}

// strict is a quota that takes the rule of its interface literally.
type strict struct{ counter }

func (q *strict) Charge(n int64) error {
	if n <= 0 {
		return errors.New("nothing to charge")
	}
	return q.counter.Charge(n)
}

// TestOccupyNothing: memory of no bytes, such as a table's that has no rows, is adopted whatever
// the quota.
func TestOccupyNothing(t *testing.T) {
	q := &strict{counter{limit: 100}}
	s, err := tier.NewSpace(tier.SpaceConfig{ID: tier.ID{Kind: tier.GPU}, Capacity: 100, Pool: &fakePool{}, Quota: q})
	if err != nil {
		t.Fatal(err)
	}
	r, err := s.Occupy(0)
	ok(t, err)
	ok(t, s.Adopt(r, fakeMemory(0)).Release())
	ok(t, s.Release(r))
	if s.State().Used() != 0 || q.used != 0 {
		t.Errorf("%d bytes are used, %d charged", s.State().Used(), q.used)
	}
}
