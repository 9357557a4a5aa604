package monitor

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/decide"
	"github.com/spillway-db/spillway/tier"
)

// joiningMover moves as many batches together as most says, one after the other.
type joiningMover struct {
	*slowMover
	most   int
	fail   func(b *batch.Batch) error // of those in a group
	panics string                     // the method that does

	mu     sync.Mutex
	groups [][]*batch.Batch
	alone  []*batch.Batch
}

func (m *joiningMover) Together(all []*batch.Batch, _ tier.ID) int {
	if m.panics == "Together" {
		panic("together")
	}
	return min(m.most, len(all))
}

func (m *joiningMover) RelieveTogether(ctx context.Context, all []*batch.Batch, to tier.ID, reason string) []error {
	m.mu.Lock()
	m.groups = append(m.groups, slices.Clone(all))
	m.mu.Unlock()
	if m.panics == "RelieveTogether" {
		panic("moving together")
	}
	errs := make([]error, len(all))
	for i, b := range all {
		if m.fail != nil {
			errs[i] = m.fail(b)
		}
		if errs[i] == nil {
			errs[i] = m.slowMover.Relieve(ctx, b, to, reason)
		}
	}
	return errs
}

func (m *joiningMover) Relieve(ctx context.Context, b *batch.Batch, to tier.ID, reason string) error {
	m.mu.Lock()
	m.alone = append(m.alone, b)
	m.mu.Unlock()
	return m.slowMover.Relieve(ctx, b, to, reason)
}

// TestMovesTogether: what is small goes to a disk together, in the policy's order. What is not moved
// so is moved alone, and has its own error. Each move that is begun ends.
func TestMovesTogether(t *testing.T) {
	const tiny = 4 * kib
	injected := errors.New("injected")
	for name, c := range map[string]struct {
		size   int64
		to     tier.ID
		mover  *joiningMover
		groups int  // at least
		alone  bool // some are moved so
		failed int  // moves, at least
	}{
		"small":               {tiny, disk0, &joiningMover{most: 100}, 1, false, 0},
		"a few at once":       {tiny, disk0, &joiningMover{most: 4}, 7, false, 0},
		"one at a time":       {tiny, disk0, &joiningMover{most: 1}, 0, true, 0},
		"none":                {tiny, disk0, &joiningMover{most: 0}, 0, true, 0},
		"large":               {small, disk0, &joiningMover{most: 100}, 0, true, 0},
		"to memory":           {tiny, host0, &joiningMover{most: 100}, 0, true, 0},
		"all fail":            {tiny, disk0, &joiningMover{most: 100, fail: func(*batch.Batch) error { return injected }}, 1, true, 2},
		"some fail":           {tiny, disk0, &joiningMover{most: 8, fail: func(b *batch.Batch) error { return map[bool]error{true: injected}[b.ID()%4 == 0] }}, 1, true, 1},
		"not supported":       {tiny, disk0, &joiningMover{most: 100, fail: func(*batch.Batch) error { return tier.ErrNotSupported }}, 1, true, -1},
		"it panics":           {tiny, disk0, &joiningMover{most: 100, panics: "RelieveTogether"}, 1, true, 2},
		"the counting panics": {tiny, disk0, &joiningMover{most: 100, panics: "Together"}, 0, true, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := int64(40)
				mover := c.mover
				w := newWorld(t, sizes{gpu0: n * c.size, c.to: 4 * n * c.size}, func(cfg *Config, w *world) {
					mover.slowMover, cfg.Mover, cfg.MovesPerEdge = w.mover, mover, 1
				})
				w.most = make(map[[2]tier.ID]int)
				var all []*batch.Batch
				for i := range n * 7 / 10 {
					all = append(all, w.put(gpu0, c.size, seq(int(i))))
				}
				w.start()
				synctest.Wait()
				r, err := w.res.Reserve(t.Context(), specific(gpu0), n*c.size)
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
				if len(w.failed) < c.failed || c.failed == 0 && len(w.failed) > 0 || len(w.begun) != len(w.ended)+len(w.failed) {
					t.Errorf("%d begun, %d ended, %d failed", len(w.begun), len(w.ended), len(w.failed))
				}
				plain := slices.DeleteFunc(slices.Clone(w.failed), func(err error) bool { return errors.Is(err, errTogether) })
				if len(plain) > len(mover.groups) || (c.failed > 0) != (len(plain) > 0) {
					t.Errorf("%d groups told %d errors as those of batches", len(mover.groups), len(plain))
				}
				w.most = nil // those of a group are under way together
				w.mu.Unlock()
				w.end(all...)
			})
		})
	}
}

// TestCopiesAreNotMovedTogether: a batch with a copy on the disk moves no bytes. So it goes by
// itself and in its place in the order.
func TestCopiesAreNotMovedTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mover := &joiningMover{most: 100}
		w := newWorld(t, sizes{host0: 1024 * kib, disk0: 1024 * kib}, func(cfg *Config, w *world) {
			mover.slowMover, cfg.Mover = w.mover, mover
		})
		var all []*batch.Batch
		job := make([]choice, 10)
		for i := range job {
			b := w.put(host0, 4*kib, seq(i))
			all = append(all, b)
			job[i] = choice{Victim: Victim{Batch: b, Bytes: 4 * kib}, From: w.mon.byID[host0], To: w.mon.byID[disk0]}
		}
		job[4].Victim.copied = job[4].Victim.copied.With(job[4].To)
		for i, want := range []int{4, 3, 2, 0, 0, 5, 4, 3, 2, 0} {
			if got := w.mon.countTogether(mover, job[i:]); got != want {
				t.Errorf("from the %d-th on %d go together, want %d", i, got, want)
			}
		}
		h, err := all[7].Open(t.Context(), host0, false)
		if err != nil {
			t.Fatal(err)
		}
		if got := w.mon.countTogether(mover, job[5:]); got != 2 {
			t.Errorf("%d go together before one that is in use", got)
		}
		if err := h.Close(); err != nil {
			t.Error(err)
		}
		w.end(all...)
	})
}

// TestExecutorGoesOnAlone: after an error in a group the rest of a job is moved alone, and a batch that
// is in use by then is given back, which is no failure.
func TestExecutorGoesOnAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // where no time passes: an executor stops after a while
		mover := &joiningMover{most: 2}
		w := newWorld(t, sizes{host0: 1024 * kib, disk0: 1024 * kib}, func(cfg *Config, w *world) {
			mover.slowMover, cfg.Mover = w.mover, mover
		})
		var all []*batch.Batch
		job := make([]choice, 6)
		for i := range job {
			b := w.put(host0, 4*kib, seq(i))
			all = append(all, b)
			job[i] = choice{
				Victim: Victim{Batch: b, Bytes: 4 * kib}, From: w.mon.byID[host0], To: w.mon.byID[disk0],
				Reason: decide.Trigger,
			}
		}
		mover.fail = func(b *batch.Batch) error {
			if b == all[1] {
				return errors.New("injected")
			}
			return nil
		}
		h, err := all[4].Open(t.Context(), host0, false)
		if err != nil {
			t.Fatal(err)
		}
		mover.bytesA = 0
		w.mon.executors.Add(1)
		w.mon.execute(t.Context(), job)
		if len(mover.groups) != 1 || len(mover.alone) == 0 || mover.alone[0] != all[1] {
			t.Errorf("%d groups, and alone %v", len(mover.groups), mover.alone)
		}
		for i, r := range <-w.mon.ended {
			if i < 2 && r.err != nil || i > 3 && r.err != errGivenBack {
				t.Errorf("batch %d: %v", i, r.err)
			}
		}
		if err := h.Close(); err != nil {
			t.Error(err)
		}
		w.end(all...)
	})
}
