package reservation_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// withHeadroom returns a manager of a GPU, host memory and a disk of 100 bytes each, whose headroom
// is n.
func withHeadroom(t *testing.T, n int64) *reservation.Manager {
	return managerOf(t, reservation.Config{
		Spaces:   []*tier.Space{spaceOf(t, "gpu:0", 100), spaceOf(t, "host:0", 100), spaceOf(t, "disk:0", 100)},
		Headroom: func(tier.ID, int64) int64 { return n },
	})
}

// startAs starts a request for bytes of gpu:0 with an origin.
func startAs(m *reservation.Manager, bytes int64, origin *reservation.Options) *call {
	return start(func() (*reservation.Reservation, error) {
		return m.Reserve(context.Background(), onGPU0, bytes, origin)
	})
}

// TestHeadroom: what comes from outside, or from a faster tier, leaves the headroom free. All
// others may have it.
func TestHeadroom(t *testing.T) {
	onHost := reservation.Specific(tier.ID{Kind: tier.Host})
	for _, c := range []struct {
		name   string
		to     reservation.Strategy
		origin *reservation.Options
		leaves bool
	}{
		{"work", onGPU0, &reservation.Options{}, false},
		{"incoming", onGPU0, &reservation.Options{Purpose: reservation.Incoming}, true},
		{"consuming", onGPU0, &reservation.Options{Purpose: reservation.Consuming}, false},
		{"moved up", onGPU0, &reservation.Options{From: tier.Disk}, false},
		{"moved up to host", onHost, &reservation.Options{From: tier.Disk}, false},
		{"moved within a tier", onHost, &reservation.Options{From: tier.Host}, false},
		{"moved down", onHost, &reservation.Options{From: tier.GPU}, true},
		{"moved to the slowest", reservation.Specific(tier.ID{Kind: tier.Disk}), &reservation.Options{From: tier.Host}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := withHeadroom(t, 30)
			held, most := mustTry(t, m, c.to, 10, nil), int64(90)
			defer release(t, held)
			if c.leaves {
				_, err := m.TryReserve(c.to, 61, c.origin)
				if !errors.Is(err, tier.ErrNoSpace) ||
					!strings.Contains(err.Error(), "kept for batches that consumers bring") {
					t.Errorf("more than leaves the headroom: %v", err)
				}
				most = 60
			}
			r := mustTry(t, m, c.to, most, c.origin)
			release(t, r)
		})
	}
}

// TestEarly: what nobody needs yet leaves free what is above the stop mark, or the headroom if that
// is more, also where many ask at once.
func TestEarly(t *testing.T) {
	for _, c := range []struct {
		name              string
		headroom, foreign int64
		most              int64
	}{
		{"nothing else", 0, 0, 60},
		{"a small headroom", 30, 0, 60},
		{"a large headroom", 50, 0, 50},
		{"others on the device", 0, 20, 40},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := withHeadroom(t, c.headroom)
			s, _ := m.Spaces().ByID(tier.ID{Kind: tier.GPU})
			if err := s.SetMarks(tier.Marks{Limit: 1, Trigger: 0.8, Stop: 0.6}); err != nil {
				t.Fatal(err)
			}
			s.SetExternal(c.foreign)
			var all sync.WaitGroup
			got := make([]*reservation.Reservation, 200)
			for i := range got {
				all.Go(func() {
					var err error
					if got[i], err = m.TryReserve(
						onGPU0,
						1,
						&reservation.Options{Purpose: reservation.Early},
					); err != nil &&
						!errors.Is(err, tier.ErrNoSpace) {
						t.Error(err)
					}
				})
			}
			all.Wait()
			if n := s.State().Used(); n != c.most {
				t.Errorf("%d bytes are used, want %d", n, c.most)
			}
			release(t, mustTry(t, m, onGPU0, 100-c.most, nil)) // the rest is for others
			for _, r := range got {
				release(t, r)
			}
		})
	}
}

// TestEarlyInTheSlowestTier: there is no headroom there, but what is above the stop mark stays free.
func TestEarlyInTheSlowestTier(t *testing.T) {
	m, s := one(t, 100, 0)
	if err := s.SetMarks(tier.Marks{Limit: 1, Trigger: 0.8, Stop: 0.6}); err != nil {
		t.Fatal(err)
	}
	held := mustTry(t, m, onGPU0, 50, nil)
	if _, err := m.TryReserve(onGPU0, 11, &reservation.Options{Purpose: reservation.Early}); !errors.Is(err, tier.ErrNoSpace) {
		t.Errorf("bytes above the stop mark: %v", err)
	}
	release(t, held, mustTry(t, m, onGPU0, 10, &reservation.Options{Purpose: reservation.Early}))
}

// TestHeadroomOfALargeRequest: a request that cannot leave the headroom free waits for all there
// is, and not for ever.
func TestHeadroomOfALargeRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := withHeadroom(t, 30)
		held := mustTry(t, m, onGPU0, 1, nil)
		large := startAs(m, 90, &reservation.Options{Purpose: reservation.Incoming})
		large.waiting(t)
		release(t, held)
		release(t, large.served(t))
	})
}

// TestConsumersPassProducers: what is brought for a consumer takes the headroom past those that
// leave it free, however many have done so before, and waiting or not. Others do not.
func TestConsumersPassProducers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := withHeadroom(t, 30)
		full := mustTry(t, m, onGPU0, 70, nil)
		producer := startAs(m, 20, &reservation.Options{Purpose: reservation.Incoming})
		producer.waiting(t)
		for range 100 { // the door is shut after 16
			release(t, mustTry(t, m, onGPU0, 30, &reservation.Options{Purpose: reservation.Consuming}))
		}
		if _, err := m.TryReserve(onGPU0, 10, nil); !errors.Is(err, tier.ErrNoSpace) {
			t.Errorf("work passes through a shut door: %v", err)
		}
		first := mustTry(t, m, onGPU0, 30, &reservation.Options{Purpose: reservation.Consuming})
		work := startReserve(t.Context(), m, onGPU0, 5)
		second := startAs(m, 20, &reservation.Options{Purpose: reservation.Consuming})
		second.waiting(t)
		release(t, first)
		release(t, second.served(t))
		work.waiting(t)
		producer.waiting(t)
		release(t, full)
		release(t, producer.served(t), work.served(t))
		if wrong := m.Runnable(); wrong != nil {
			t.Errorf("%q", wrong)
		}
	})
}

// TestHeadroomIsDemandedOnce: producers that wait together need the headroom once.
func TestHeadroomIsDemandedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := withHeadroom(t, 30)
		full := mustTry(t, m, onGPU0, 80, nil)
		a, b := startAs(m, 10, &reservation.Options{Purpose: reservation.Incoming}), startAs(m, 5, &reservation.Options{Purpose: reservation.Incoming})
		a.waiting(t)
		b.waiting(t)
		got := m.Demand(nil)
		want := reservation.Demand{Space: tier.ID{Kind: tier.GPU}, Bytes: 45, Waiters: 2}
		if len(got) != 1 || got[0] != want {
			t.Errorf("%+v, want %+v", got, want)
		}
		release(t, full)
		release(t, a.served(t), b.served(t))
	})
}

// TestConsumerBehindALargeProducer: a consumer passes a producer that leaves headroom free wherever
// it fits, also if that is more than the producer's own size lets it leave.
func TestConsumerBehindALargeProducer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// In use by a consumer: 40. The producer asks for 45 of 100, so that its headroom is cut to
		// 15, though the largest batch elsewhere is 20.
		m := managerOf(t, reservation.Config{
			Spaces: []*tier.Space{spaceOf(t, "gpu:0", 100), spaceOf(t, "host:0", 100)},
			Headroom: func(_ tier.ID, need int64) int64 { // Monitor.Headroom's rule
				return max(0, min(20, 100-40-need))
			},
		})
		work := mustTry(t, m, onGPU0, 40, nil)
		rest := mustTry(t, m, onGPU0, 10, nil)
		producer := startAs(m, 45, &reservation.Options{Purpose: reservation.Incoming})
		producer.waiting(t)
		for range 16 { // other batches come up and go; then the door is shut
			release(t, mustTry(t, m, onGPU0, 20, &reservation.Options{Purpose: reservation.Consuming}))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		r, err := m.Reserve(ctx, onGPU0, 20, &reservation.Options{Purpose: reservation.Consuming})
		if err != nil {
			t.Errorf("a consumer waits behind a producer for 20 bytes, with 50 free: %v", errors.Unwrap(err))
		} else {
			release(t, r)
		}
		release(t, work, rest)
		release(t, producer.served(t))
	})
}

// TestHeadroomIsReconsidered: when the headroom has shrunk, who waits for it does not wait on.
func TestHeadroomIsReconsidered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n atomic.Int64
		n.Store(30)
		m := managerOf(t, reservation.Config{
			Spaces:   []*tier.Space{spaceOf(t, "gpu:0", 100), spaceOf(t, "host:0", 100)},
			Headroom: func(tier.ID, int64) int64 { return n.Load() },
		})
		held := mustTry(t, m, onGPU0, 60, nil)
		first := startAs(m, 20, &reservation.Options{Purpose: reservation.Incoming})
		first.waiting(t)
		n.Store(0) // the largest batch elsewhere was dropped
		time.Sleep(time.Second)
		synctest.Wait()
		if !first.over() {
			t.Error("20 bytes still wait, with 40 free and no headroom to leave")
		}
		release(t, held)
		release(t, first.served(t))
	})
}

// TestHeadroomOfReserveUpTo: what is taken beyond the least leaves the headroom free, too.
func TestHeadroomOfReserveUpTo(t *testing.T) {
	m := withHeadroom(t, 30)
	for _, c := range []struct {
		origin         *reservation.Options
		want, arriving int64
	}{{&reservation.Options{Purpose: reservation.Incoming}, 70, 70}, {&reservation.Options{Purpose: reservation.Early}, 50, 50}, {&reservation.Options{Purpose: reservation.Consuming}, 100, 0}} {
		r, err := m.ReserveUpTo(t.Context(), onGPU0, 10, 100, c.origin)
		if err != nil {
			t.Fatal(err)
		}
		if n := m.Arriving(gpu0); r.Bytes() != c.want || n != c.arriving {
			t.Errorf("%d bytes, of which %d are counted as arriving; want %d and %d", r.Bytes(), n, c.want, c.arriving)
		}
		release(t, r)
		if n := m.Arriving(gpu0); n != 0 {
			t.Errorf("%d bytes are counted as arriving after the release", n)
		}
	}
}

// TestHeadroomIsReconsideredAtOnce: while a waiter looks for room, its headroom changes.
func TestHeadroomIsReconsideredAtOnce(t *testing.T) {
	m := withHeadroom(t, 30)
	s, _ := m.Spaces().ByID(gpu0)
	held := mustTry(t, m, onGPU0, 100, nil)
	c := start(func() (*reservation.Reservation, error) {
		return m.ReserveUpTo(context.Background(), onGPU0, 10, 50, &reservation.Options{Purpose: reservation.Incoming})
	})
	limits := start(func() (r *reservation.Reservation, err error) {
		for i := range int64(2000) { // each wakes the head of the line
			err = errors.Join(err, s.SetLimit(99+i%2))
		}
		return r, err
	})
	<-limits.done
	release(t, held)
	<-c.done
	if err := errors.Join(c.err, limits.err); err != nil {
		t.Fatal(err)
	}
	release(t, c.r)
}

// TestHeadroomEnds: a request that has waited for StallTimeout leaves no headroom any more.
func TestHeadroomEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := withHeadroom(t, 30)
		held := mustTry(t, m, onGPU0, 60, nil)
		w := startAs(m, 20, &reservation.Options{Purpose: reservation.Incoming})
		time.Sleep(reservation.StallTimeout - time.Second)
		w.waiting(t)
		time.Sleep(2 * time.Second)
		release(t, w.served(t), held)
	})
}

// sharedQuota is brokenQuota that is safe for concurrent use.
type sharedQuota struct {
	mu sync.Mutex
	brokenQuota
}

func (q *sharedQuota) Charge(n int64) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.brokenQuota.Charge(n)
}

func (q *sharedQuota) Credit(n int64) {
	q.mu.Lock()
	q.room += n
	q.mu.Unlock()
	q.told()
}

func (q *sharedQuota) Remaining() int64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.room
}

// TestHeadroomAndAGrowingQuota: a producer begins to wait while another GPU holds a part of the
// quota that both share. Some of that is given back: enough for the producer, but not for the
// headroom that it leaves. It waits on, can be cancelled, and other spaces are served.
func TestHeadroomAndAGrowingQuota(t *testing.T) {
	q := &sharedQuota{brokenQuota: brokenQuota{room: 100, told: func() {}}}
	s, err := tier.NewSpace(tier.SpaceConfig{
		ID: gpu0, Capacity: 100, Marks: tier.Marks{Limit: 1}, Pool: &heapPool{granule: 1}, Quota: q,
	})
	if err != nil {
		t.Fatal(err)
	}
	host := spaceOf(t, "host:0", 100)
	m := managerOf(t, reservation.Config{
		Spaces: []*tier.Space{s, host}, Headroom: func(tier.ID, int64) int64 { return 50 },
	})
	onHost := reservation.Specific(host.ID())
	used, full := mustTry(t, m, onGPU0, 30, nil), mustTry(t, m, onHost, 100, nil)
	if err := q.Charge(60); err != nil { // of the other GPU
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	producer := start(func() (*reservation.Reservation, error) {
		return m.Reserve(ctx, onGPU0, 20, &reservation.Options{Purpose: reservation.Incoming})
	})
	worker := start(func() (*reservation.Reservation, error) { return m.Reserve(t.Context(), onHost, 10, nil) })
	for len(m.Demand(nil)) < 2 {
		time.Sleep(time.Millisecond)
	}
	q.Credit(35) // 45 are left, and the producer needs 20 and 50
	time.Sleep(20 * time.Millisecond)
	release(t, full)
	select {
	case <-worker.done:
	case <-time.After(3 * time.Second):
		t.Error("a waiter for an empty host is not served")
	}
	cancel()
	select {
	case <-producer.done:
	case <-time.After(3 * time.Second):
		t.Error("the producer's wait does not end with its context")
	}
	q.Credit(25)
	<-worker.done
	<-producer.done
	for _, c := range []*call{producer, worker} {
		if c.err == nil {
			release(t, c.r)
		}
	}
	release(t, used)
}

// TestProducerBesideBusyConsumers: consumers that open one batch after the other leave a producer
// its turn, at the latest when it has waited for StallTimeout and leaves no headroom any more.
func TestProducerBesideBusyConsumers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := withHeadroom(t, 30)
		ctx, cancel := context.WithCancel(t.Context())
		var all sync.WaitGroup
		for i := range 4 { // three have 30 bytes each, and one waits
			time.Sleep(time.Duration(i) * time.Millisecond)
			all.Go(func() {
				for ctx.Err() == nil {
					r, err := m.Reserve(context.Background(), onGPU0, 30, &reservation.Options{Purpose: reservation.Consuming})
					if err != nil {
						t.Error(err)
						return
					}
					time.Sleep(100 * time.Millisecond)
					if err := r.Release(); err != nil {
						t.Error(err)
					}
				}
			})
		}
		time.Sleep(time.Second)
		producer := startAs(m, 45, &reservation.Options{Purpose: reservation.Incoming})
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if !producer.over() {
			t.Error("after 10 minutes, and 18,000 consumers that came later, a producer of 45 of 100 bytes waits still")
		}
		cancel()
		all.Wait()
		release(t, producer.served(t))
	})
}

// TestDeadlockBesideHeadroom: the error of a wait that cannot end says how many bytes were asked
// for, not how many with the headroom.
func TestDeadlockBesideHeadroom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newTask(t, withHeadroom(t, 30), "a")
		held := k.hold(gpu0, 60)
		c := start(func() (*reservation.Reservation, error) {
			return k.m.Reserve(context.Background(), onGPU0, 20, &reservation.Options{Purpose: reservation.Incoming, Owner: k.o})
		})
		if e := c.deadlocked(t); e.Requested != 20 {
			t.Errorf("%+v: 20 bytes were requested", e)
		}
		release(t, held)
	})
}

// TestArriving: what is open of reservations that left headroom free.
func TestArriving(t *testing.T) {
	m := withHeadroom(t, 30)
	onHost := reservation.Specific(host)
	all := []releaser{
		mustTry(t, m, onHost, 10, &reservation.Options{Purpose: reservation.Incoming}), mustTry(t, m, onHost, 5, &reservation.Options{From: tier.GPU}),
		mustTry(t, m, onHost, 1, &reservation.Options{From: tier.Disk}), mustTry(t, m, onHost, 1, &reservation.Options{Purpose: reservation.Consuming}),
		mustTry(t, m, onHost, 1, nil), mustTry(t, m, onGPU0, 7, &reservation.Options{Purpose: reservation.Incoming}),
	}
	if h, g := m.Arriving(host), m.Arriving(gpu0); h != 15 || g != 7 {
		t.Errorf("%d bytes arrive in host and %d in the GPU, want 15 and 7", h, g)
	}
	release(t, all...)
	if n := m.Arriving(host) + m.Arriving(gpu0) + m.Arriving(tier.ID{Kind: tier.Disk}); n != 0 {
		t.Errorf("%d bytes arrive after the release", n)
	}
}

// TestRefuseBesideHeadroom: a Put that fits into the headroom is refused only where moves fail:
// elsewhere it may take the headroom after Config.StallTimeout.
func TestRefuseBesideHeadroom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, broken := range []bool{false, true} {
			m := managerOf(t, reservation.Config{
				Spaces:   []*tier.Space{spaceOf(t, "gpu:0", 100), spaceOf(t, "host:0", 100), spaceOf(t, "disk:0", 100)},
				Headroom: func(tier.ID, int64) int64 { return 30 },
				Evict: func(context.Context, tier.ID, int64) reservation.Eviction {
					return reservation.Eviction{Why: func() string { return "hint" }, Broken: broken}
				},
			})
			full := mustTry(t, m, onGPU0, 80, nil)
			rest := mustAlloc(t, full, 80)
			release(t, full)
			producer := startAs(m, 20, &reservation.Options{Purpose: reservation.Incoming})
			producer.waiting(t)
			time.Sleep(time.Second)
			if !broken {
				producer.waiting(t)
				time.Sleep(reservation.StallTimeout)
				release(t, producer.served(t), rest)
				continue
			}
			var e *tier.NoSpaceError
			err := producer.failed(t, tier.ErrNoSpace)
			if !errors.As(err, &e) || e.Available != 20 || e.Hint != "hint" ||
				!strings.Contains(err.Error(), "kept for batches that consumers bring") {
				t.Errorf("%+v", err)
			}
			release(t, rest)
		}
	})
}
