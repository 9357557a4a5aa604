package reservation_test

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// TestLongWait: a wait is reported when it has taken long, then after twice as long and so on, with
// the holders; one that is behind another counts with that. What is over is not reported, and
// without waiters there is no timer.
func TestLongWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var told []reservation.LongWait
		var at []time.Duration
		begun := time.Now()
		s, other := spaceOf(t, "gpu:0", 100), spaceOf(t, "host:0", 100)
		m := managerOf(t, reservation.Config{Spaces: []*tier.Space{s, other}, LongWait: func(w reservation.LongWait) {
			told, at = append(told, w), append(at, time.Since(begun))
		}})
		o := reservation.NewOwner("probe")
		mine, others := keep(t, m, o, 30, 7), keep(t, m, nil, 60, 2)
		r := mustTry(t, m, onGPU0, 10, &reservation.Options{Owner: o})
		full := mustTry(t, m, reservation.Specific(host), 100, nil)
		short := startReserve(t.Context(), m, onGPU0, 5)
		short.waiting(t)
		time.Sleep(reservation.LongWaitAfter - time.Millisecond)
		release(t, r)
		release(t, short.served(t))
		r = mustTry(t, m, onGPU0, 10, &reservation.Options{Owner: o})
		time.Sleep(time.Minute)
		if len(told) != 0 {
			t.Fatalf("it was told of %v", told)
		}
		begun = time.Now()
		first := startReserve(t.Context(), m, reservation.AnyInTiers(tier.GPU, tier.Host), 50)
		first.waiting(t)
		second := startReserve(t.Context(), m, onGPU0, 20)
		second.waiting(t)
		time.Sleep(36 * time.Second)
		synctest.Wait()
		if len(at) != 3 || at[0] != 5*time.Second || at[1] != 10*time.Second || at[2] != 20*time.Second {
			t.Fatalf("it was told after %v", at)
		}
		w := told[0]
		if w.Space != gpu0 || w.Requested != 50 || w.Waited != 5*time.Second || w.Waiters != 2 || w.Waiting != 70 ||
			w.Owner != "" ||
			w.Holdings.Available != 0 ||
			w.Holdings.Reserved != 10 {
			t.Errorf("it was told %+v", w)
		}
		for _, want := range []string{
			"0 of 100 bytes are available, 10 promised",
			`1 handle of plan "q", operator join:0 (batch 2): 60 bytes`, `owner "probe" (batch 7): 30 bytes`, `reservations, owner "probe": 10 bytes`,
		} {
			if !strings.Contains(w.Holdings.String(), want) {
				t.Errorf("%q does not say %q", w.Holdings, want)
			}
		}
		release(t, full)
		release(t, first.served(t))
		others.close(t)
		release(t, second.served(t), r)
		mine.close(t)
		n := len(told)
		time.Sleep(time.Hour)
		synctest.Wait()
		if len(told) != n {
			t.Errorf("it was told of %v although nobody waits", told[n:])
		}
	})
}

// TestLongWaitBesideHeadroom: the event of a long wait says how many bytes were asked for, not how
// many with the headroom.
func TestLongWaitBesideHeadroom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got reservation.LongWait
		m := managerOf(t, reservation.Config{
			Spaces:   []*tier.Space{spaceOf(t, "gpu:0", 100), spaceOf(t, "host:0", 100)},
			Headroom: func(tier.ID, int64) int64 { return 30 },
			LongWait: func(l reservation.LongWait) { got = l },
		})
		held := mustTry(t, m, onGPU0, 100, nil)
		w := startAs(m, 20, &reservation.Options{Purpose: reservation.Incoming})
		time.Sleep(6 * time.Second)
		synctest.Wait()
		if got.Requested != 20 {
			t.Errorf("%+v: 20 bytes were requested", got)
		}
		release(t, held)
		release(t, w.served(t))
	})
}

// TestHoldersAreLookedUpOnce: of many waits that end at once one says what Config.Holders says, which is
// called once, and with no lock held. So does one that ends within a second.
func TestHoldersAreLookedUpOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var m *reservation.Manager
		calls := 0
		m = managerOf(t, reservation.Config{
			Spaces: []*tier.Space{spaceOf(t, "gpu:0", 100)},
			Holders: func(id tier.ID) (tier.Holdings, bool) {
				calls++
				time.Sleep(time.Millisecond) // so that the others come
				sp, ok := m.Spaces().ByID(id)
				all := sp.Holdings(nil)
				all.Batches = []tier.Holder{{What: "batch", Plan: "q", Operator: "join", Count: 2, Bytes: 100}}
				return all, ok
			},
		})
		held := mustTry(t, m, onGPU0, 90, nil)
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		waits := make([]*call, 10)
		for i := range waits {
			waits[i] = startReserve(ctx, m, onGPU0, 20)
		}
		later, cancelLater := context.WithTimeout(t.Context(), 2500*time.Millisecond)
		defer cancelLater()
		last := startReserve(later, m, onGPU0, 20)
		time.Sleep(3 * time.Second)
		says := func(err error) bool {
			for _, part := range []string{"in gpu:0 10 of 100 bytes are available", `2 batches of plan "q", operator join:0: 100 bytes`, "reservations: 90 bytes", "use up or drop batches"} {
				if !strings.Contains(err.Error(), part) {
					return false
				}
			}
			return true
		}
		n := 0
		for _, c := range waits {
			if says(c.failed(t, context.DeadlineExceeded)) {
				n++
			}
		}
		if n != 1 {
			t.Errorf("%d errors name the holders", n)
		}
		if err := last.failed(t, context.DeadlineExceeded); !says(err) {
			t.Errorf("the last error does not name the holders: %v", err)
		}
		if calls != 2 {
			t.Errorf("it was looked up %d times", calls)
		}
		release(t, held)
	})
}

// TestHoldersThatDoNotAnswer: while holders are looked up, the wait is in no line, and others end.
func TestHoldersThatDoNotAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		answer := make(chan struct{})
		m := managerOf(t, reservation.Config{
			Spaces:  []*tier.Space{spaceOf(t, "gpu:0", 100)},
			Holders: func(tier.ID) (tier.Holdings, bool) { <-answer; return tier.Holdings{}, false },
		})
		held := mustTry(t, m, onGPU0, 90, nil)
		ctx, cancel := context.WithCancel(t.Context())
		first := startReserve(ctx, m, onGPU0, 20)
		others, cancelOthers := context.WithCancel(t.Context())
		second := startReserve(others, m, onGPU0, 20)
		time.Sleep(2 * time.Second)
		cancel()
		synctest.Wait()
		if d := m.Demand(nil); first.over() || len(d) != 1 || d[0].Waiters != 1 {
			t.Errorf("a wait whose holders are looked up is in line: %+v", d)
		}
		cancelOthers()
		synctest.Wait()
		if !second.over() {
			t.Error("a wait does not end while the holders are looked up")
		}
		close(answer)
		_ = first.failed(t, context.Canceled)
		_ = second.failed(t, context.Canceled)
		release(t, held)
	})
}

// TestErrorSaysWhatHelps: by what holds most of the space.
func TestErrorSaysWhatHelps(t *testing.T) {
	some := func(bytes int64) []tier.Holder { return []tier.Holder{{What: "handle", Count: 1, Bytes: bytes}} }
	for _, c := range []struct {
		held  tier.Holdings
		helps string
	}{
		{tier.Holdings{}, "(close handles, and release records"},
		{tier.Holdings{Holders: some(30), Batches: some(20), Others: 20, Engine: 20, External: 20},
			"(close handles, and release records"},
		{tier.Holdings{Holders: some(10), Batches: some(30), External: 20}, "(use up or drop batches"},
		{tier.Holdings{Holders: some(10), Batches: some(20), Others: 30}, "(try again when what is being moved has arrived"},
		{tier.Holdings{Holders: some(10), Others: 20, Retired: 30}, "(try again when the device has ended the work"},
		{tier.Holdings{Holders: some(10), Others: 20, Engine: 30}, "(give the space more memory"},
		{tier.Holdings{Holders: some(10), Engine: 20, External: 30}, "(end what else holds memory of the device"},
	} {
		synctest.Test(t, func(t *testing.T) {
			m := managerOf(t, reservation.Config{
				Spaces:  []*tier.Space{spaceOf(t, "gpu:0", 100)},
				Holders: func(tier.ID) (tier.Holdings, bool) { return c.held, true },
			})
			held := mustTry(t, m, onGPU0, 100, nil)
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			defer cancel()
			w := startReserve(ctx, m, onGPU0, 20)
			time.Sleep(3 * time.Second)
			if err := w.failed(
				t,
				context.DeadlineExceeded,
			); !strings.Contains(err.Error(), c.helps) ||
				!strings.HasSuffix(err.Error(), "; enlarge gpu:0)") {
				t.Errorf("%+v: %v", c.held, err)
			}
			release(t, held)
		})
	}
}

// TestDeadlocksCutNames: an owner may be named by its whole query.
func TestDeadlocksCutNames(t *testing.T) {
	for _, e := range []reservation.DeadlockError{{}, {Held: 1}} {
		e.Owner = strings.Repeat("SELECT ", 1000)
		if text := e.Error(); !strings.Contains(text, `"SELECT SELECT`) || len(text) > 500 {
			t.Error(text)
		}
	}
}
