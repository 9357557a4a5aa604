package monitor

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/decide"
	"github.com/spillway-db/spillway/tier"
)

// joiningMover moves as many batches together as most says, one after the other.
type joiningMover struct {
	*slowMover
	most int
	fail func(b *batch.Batch) error // of those in a group

	mu     sync.Mutex
	groups [][]*batch.Batch
	alone  []*batch.Batch
}

func (m *joiningMover) Evict(ctx context.Context, all []*batch.Batch, to tier.ID, reason string) []error {
	all = all[:max(1, min(m.most, len(all)))]
	m.mu.Lock()
	if len(all) > 1 {
		m.groups = append(m.groups, slices.Clone(all))
	} else {
		m.alone = append(m.alone, all[0])
	}
	m.mu.Unlock()
	errs := make([]error, len(all))
	for i, b := range all {
		if m.fail != nil && len(all) > 1 {
			errs[i] = m.fail(b)
		}
		if errs[i] == nil {
			errs[i] = m.slowMover.Relieve(ctx, b, to, reason)
		}
	}
	return errs
}

// joinSmall makes the spaces of w take small batches several at once.
func (w *world) joinSmall() {
	for _, p := range w.pools {
		p.together = 1 << 20
	}
}

// TestMovesTogether: what is small goes to a disk together, in the policy's order. What is not moved
// so is moved alone, and has its own error. The error of a group is logged once.
func TestMovesTogether(t *testing.T) {
	const tiny = 4 * kib
	injected := errors.New("injected")
	for name, c := range map[string]struct {
		size   int64
		to     tier.ID
		mover  *joiningMover
		groups int  // at least
		alone  bool // some are moved so
		failed bool // there are warnings of failed moves
	}{
		"small":         {tiny, disk0, &joiningMover{most: 100}, 1, false, false},
		"a few at once": {tiny, disk0, &joiningMover{most: 4}, 7, false, false},
		"one at a time": {tiny, disk0, &joiningMover{most: 1}, 0, true, false},
		"none":          {tiny, disk0, &joiningMover{most: 0}, 0, true, false},
		"large":         {small, disk0, &joiningMover{most: 100}, 0, true, false},
		"to memory":     {tiny, host0, &joiningMover{most: 100}, 0, true, false},
		"all fail":      {tiny, disk0, &joiningMover{most: 100, fail: func(*batch.Batch) error { return injected }}, 1, true, true},
		"some fail":     {tiny, disk0, &joiningMover{most: 8, fail: func(b *batch.Batch) error { return map[bool]error{true: injected}[b.ID()%4 == 0] }}, 1, true, true},
		"not supported": {tiny, disk0, &joiningMover{most: 100, fail: func(*batch.Batch) error { return tier.ErrNotSupported }}, 1, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				count := int64(40)
				mover := c.mover
				var log bytes.Buffer
				w := newWorld(t, sizes{gpu0: count * c.size, c.to: 4 * count * c.size}, func(cfg *Config, w *world) {
					mover.slowMover, cfg.Mover, cfg.MovesPerEdge = w.mover, mover, 1
					cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
				})
				w.joinSmall()
				w.most = make(map[[2]tier.ID]int)
				var all []*batch.Batch
				for i := range count * 7 / 10 {
					all = append(all, w.put(gpu0, c.size, seq(int(i))))
				}
				w.start()
				synctest.Wait()
				r, err := w.res.Reserve(t.Context(), specific(gpu0), count*c.size, nil)
				if err != nil {
					t.Fatal(err)
				}
				synctest.Wait()
				if err := r.Release(); err != nil {
					t.Error(err)
				}
				for _, b := range all {
					if now := b.Info(); now.Space != c.to || now.State != batch.Idle {
						t.Errorf("a batch is %+v", now)
					}
				}
				if len(mover.groups) < c.groups || c.groups == 0 && len(mover.groups) > 0 || len(mover.alone) > 0 != c.alone {
					t.Errorf("%d groups, and %d alone", len(mover.groups), len(mover.alone))
				}
				for _, g := range mover.groups {
					if len(g) < 2 || !slices.IsSortedFunc(g, func(a, b *batch.Batch) int { return int(b.ID()) - int(a.ID()) }) {
						t.Errorf("a group of %d, which are in order: the newest first", len(g))
					}
				}
				w.mu.Lock()
				for e, under := range w.now {
					if under != 0 {
						t.Errorf("%d moves from %s to %s have not ended", under, e[0], e[1])
					}
				}
				if len(w.begun) != len(w.ended)+len(w.failed) {
					t.Errorf("%d begun, %d ended, %d failed", len(w.begun), len(w.ended), len(w.failed))
				}
				n := strings.Count(log.String(), "a move failed")
				if n > len(mover.groups) || (n > 0) != c.failed {
					t.Errorf("%d groups logged %d errors:\n%s", len(mover.groups), n, &log)
				}
				w.most = nil // those of a group are under way together
				w.mu.Unlock()
				w.end(all...)
			})
		})
	}
}

// TestCopiesAreNotMovedTogether: a batch with a clean image on the disk moves no bytes. So it goes by
// itself and in its place in the order.
func TestCopiesAreNotMovedTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mover := &joiningMover{most: 100}
		w := newWorld(t, sizes{host0: 1024 * kib, disk0: 1024 * kib}, func(cfg *Config, w *world) {
			mover.slowMover, cfg.Mover = w.mover, mover
		})
		w.joinSmall()
		var all []*batch.Batch
		from, to := w.mon.byID[host0], w.mon.byID[disk0]
		j := &job{
			m: w.mon, from: from, to: to, reason: decide.Demand, until: time.Now().Add(time.Hour), joins: true,
		}
		for i := range 10 {
			b := w.put(host0, 4*kib, seq(i))
			all = append(all, b)
			j.left = append(j.left, Victim{Batch: b, ID: b.ID(), Bytes: 4 * kib})
		}
		j.left[4].copied = j.left[4].copied.With(to.place)
		h, err := all[7].Open(t.Context(), host0, false) // it stays
		if err != nil {
			t.Fatal(err)
		}
		j.work(t.Context())
		want := [][]*batch.Batch{all[:4], {all[5], all[6], all[8], all[9]}}
		if !slices.EqualFunc(mover.groups, want, slices.Equal) || !slices.Equal(mover.alone, all[4:5]) {
			t.Errorf("together go %v, and alone %v", mover.groups, mover.alone)
		}
		if w.most = nil; !j.retry || j.freed != 9*4*kib {
			t.Errorf("%d bytes were freed, and another list is worth it: %t", j.freed, j.retry)
		}
		if err := h.Close(); err != nil {
			t.Error(err)
		}
		w.end(all...)
	})
}

// TestFailedTogether: after an error in a group those that failed are moved alone, and the others
// together. After one that fails alone none follows.
func TestFailedTogether(t *testing.T) {
	for _, breaks := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) { // where no time passes: a list ends after a while
			mover := &joiningMover{most: 2}
			w := newWorld(t, sizes{host0: 1024 * kib, disk0: 1024 * kib}, func(cfg *Config, w *world) {
				mover.slowMover, cfg.Mover = w.mover, mover
			})
			w.joinSmall()
			var all []*batch.Batch
			from, to := w.mon.spaces[0], w.mon.spaces[1]
			j := &job{m: w.mon, from: from, to: to, until: time.Now().Add(time.Hour), joins: true}
			for i := range 6 {
				b := w.put(host0, 4*kib, seq(i))
				all = append(all, b)
				j.left = append(j.left, Victim{Batch: b, ID: b.ID(), Bytes: 4 * kib})
			}
			mover.fail = func(b *batch.Batch) error {
				if b == all[1] {
					return errors.New("injected")
				}
				return nil
			}
			if breaks {
				mover.fault = func(*batch.Batch, tier.ID, tier.ID) error { return errors.New("broken") }
			}
			mover.bytesA = 0
			j.reason = decide.Trigger
			j.work(t.Context())
			groups, moved := 3, int64(6)
			if breaks {
				groups, moved = 1, 0
			}
			if len(mover.groups) != groups || len(mover.alone) == 0 || !breaks && mover.alone[0] != all[1] {
				t.Errorf("%d groups, and alone %v", len(mover.groups), mover.alone)
			}
			if j.freed != moved*4*kib {
				t.Errorf("%d bytes were freed", j.freed)
			}
			w.end(all...)
		})
	}
}

// TestSlowFailureTogether: a write together that fails after the time for a list has passed is followed by
// a move of one batch, so that the next list does not begin with the same write and nothing else.
func TestSlowFailureTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mover := &joiningMover{most: 100}
		w := newWorld(t, sizes{host0: 40 * 4 * kib, disk0: 1024 * kib}, func(cfg *Config, w *world) {
			mover.slowMover, cfg.Mover, cfg.MovesPerEdge = w.mover, mover, 1
		})
		w.joinSmall()
		mover.fail = func(*batch.Batch) error {
			<-time.After(2 * listTime)
			return errors.New("injected")
		}
		var all []*batch.Batch
		for i := range 20 {
			all = append(all, w.put(host0, 4*kib, seq(i)))
		}
		w.start()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		r, err := w.res.Reserve(ctx, specific(host0), 30*4*kib, nil)
		if err != nil {
			t.Fatalf("%v; %d groups have failed, and %d batches were moved alone",
				err, len(mover.groups), len(mover.alone))
		}
		if err := r.Release(); err != nil {
			t.Error(err)
		}
		w.end(all...)
	})
}

// fewMover claims to have moved so many batches of each list.
type fewMover int

func (n fewMover) Evict(_ context.Context, all []*batch.Batch, _ tier.ID, _ string) []error {
	return make([]error, min(int(n), len(all)))
}

// TestListsAreNotCopied: the batches that a mover leaves of a list are not copied for each move.
func TestListsAreNotCopied(t *testing.T) {
	const n, limit = 4000, 2048
	for _, atOnce := range []int{1, 4, n} {
		w := newWorld(t, sizes{host0: 4 * n * kib, disk0: 4 * n * kib}, func(cfg *Config, w *world) {
			cfg.Mover = fewMover(atOnce)
		})
		w.joinSmall()
		j := &job{m: w.mon, from: w.mon.spaces[0], to: w.mon.spaces[1], reason: decide.Demand, joins: true}
		j.until = time.Now().Add(time.Hour)
		var all []*batch.Batch
		for i := range n {
			b := w.put(host0, 4*kib, seq(i))
			all = append(all, b)
			j.left = append(j.left, Victim{Batch: b, ID: b.ID(), Bytes: 4 * kib})
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		j.work(t.Context())
		runtime.ReadMemStats(&after)
		if each := (after.TotalAlloc - before.TotalAlloc) / n; each > limit {
			t.Errorf("%d at once: %d bytes were allocated for each move, want at most %d", atOnce, each, limit)
		} else {
			t.Logf("%d at once: %d bytes for each move", atOnce, each)
		}
		if j.freed != n*4*kib {
			t.Errorf("%d at once: %d bytes were freed", atOnce, j.freed)
		}
		w.end(all...)
	}
}
