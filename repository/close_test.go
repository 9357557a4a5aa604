package repository

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// TestCallsAreCounted: a call is in the gate of the plan's engine while it has memory that is
// neither in a repository nor a user's. A clock holds each call there. Close does not wait for it.
func TestCallsAreCounted(t *testing.T) {
	for name, call := range map[string]func(*Manager, *Repository) error{
		"Put":    func(_ *Manager, r *Repository) error { return r.Put(background, 0, record(1)) },
		"FanOut": func(m *Manager, r *Repository) error { return m.FanOut(background, record(1), 0, r.Key()) },
		"Reader": func(_ *Manager, r *Repository) error {
			rd, err := r.Reader(background, 1)
			if err != nil {
				return err
			}
			defer rd.Release()
			rd.Next()
			return rd.Err()
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMover(t, 10, 10, 10)
				var held atomic.Bool
				goOn := make(chan struct{})
				var calls guard.Gate
				plan := NewManager("test", 7, Config{Mover: m, Calls: &calls, Clock: func() int64 {
					if held.CompareAndSwap(true, false) {
						<-goOn
					}
					return 0
				}})
				r := ensure(t, plan, "join")
				check(t, r.Put(background, 1, record(0)))
				m.setFault(func(op string) error {
					held.Store(op == "ingest" || op == "record")
					return nil
				})
				called := make(chan error, 1)
				go func() { called <- call(plan, r) }()
				synctest.Wait()
				check(t, closeAll(background, plan))
				calls.Shut()
				var waited atomic.Bool
				left := make(chan struct{})
				go func() {
					defer close(left)
					calls.Wait()
					waited.Store(true)
				}()
				synctest.Wait()
				if waited.Load() {
					t.Error("the call is not counted")
				}
				close(goOn)
				<-left
				for _, k := range tier.Kinds() {
					if used := m.space(k).State().Used(); used != 0 {
						t.Errorf("%d bytes are used in %s", used, k)
					}
				}
				if err := <-called; err != nil {
					wantError(t, err, tier.ErrClosed)
				}
			})
		})
	}
}

// TestClearWaits for a transit, and not for handles.
func TestClearWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 10, 10, 10)
		plan := newPlan(t, m)
		r := ensure(t, plan, "join")
		fill(t, r, 3)
		all := slices.Collect(r.Batches(0))
		transit, err := all[0].TryTransit()
		check(t, err)
		h, err := m.Acquire(background, all[1], reservation.AnyInTier(tier.Host))
		check(t, err)

		ctx, cancel := context.WithCancelCause(background)
		cause := errors.New("no time")
		cancel(cause)
		report, err := plan.Clear(ctx)
		wantError(t, err, cause)
		if len(report) != 0 || r.Total() != 3 {
			t.Errorf("%+v, %d left", report, r.Total())
		}

		var left []Leftover
		done := make(chan error, 1)
		go func() {
			var err error
			left, err = plan.Clear(background)
			done <- err
		}()
		synctest.Wait()
		if len(done) != 0 {
			t.Fatal("it does not wait for the transit")
		}
		check(t, transit.Abort())
		check(t, <-done)
		if len(left) != 1 || left[0].Batches != 3 || r.Total() != 0 || m.space(tier.Host).State().Used() != bodySize {
			t.Errorf("%+v, %d left, %d bytes", left, r.Total(), m.space(tier.Host).State().Used())
		}
		check(t, h.Close())
	})
}

// TestCloseWakesAllRepositories: no repository waits for another's end.
func TestCloseWakesAllRepositories(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 10, 10, 10)
		plan := newPlan(t, m)
		a, b := ensure(t, plan, "a"), ensure(t, plan, "b")
		fill(t, a, 1)
		held, _ := a.Peek(0)
		transit, err := held.TryTransit()
		check(t, err)
		taking := taken(func() (*batch.Batch, error) { return b.Take(background, 0, batch.Idle) })
		closed := make(chan error, 1)
		go func() { closed <- closeAll(background, plan) }()
		(<-taking).check(t, nil, tier.ErrClosed) // though a is not clear yet
		check(t, transit.Abort())
		check(t, <-closed)
		_, err = plan.Create(Key{"c", 0}, Options{})
		wantError(t, err, tier.ErrClosed)
	})
}

// TestClearMany: Clear drops each of many batches once, and waits for one in transit.
func TestClearMany(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 10, 10, 10)
		plan := newPlan(t, m)
		r := ensure(t, plan, "join")
		const n = 1000
		var all []*batch.Batch
		for i := range n {
			b, err := batch.New(batch.Options{ID: batch.ID(i + 1), Payload: &form{m.space(tier.Host)}})
			check(t, err)
			check(t, r.PutBatch(i%3, b))
			all = append(all, b)
		}
		transit, err := all[n/2].TryTransit()
		check(t, err)
		check(t, all[1].Drop())
		done := make(chan []Leftover, 1)
		go func() {
			report, err := plan.Clear(background)
			if err != nil {
				t.Error(err)
			}
			done <- report
		}()
		synctest.Wait()
		if len(done) != 0 || r.Total() == 0 {
			t.Fatalf("%d are left with one in transit", r.Total())
		}
		check(t, transit.Abort())
		if report := <-done; len(report) != 1 || report[0].Batches != n-1 {
			t.Errorf("%+v, want %d batches", report, n-1)
		}
		for _, b := range all {
			if s := b.Info().State; s != batch.Released {
				t.Fatalf("batch %d is %s", b.ID(), s)
			}
		}
		if r.Total() != 0 || r.Bytes(tier.Host) != 0 {
			t.Errorf("%d batches and %d bytes are left", r.Total(), r.Bytes(tier.Host))
		}
	})
}

// endingMover is a mover that can be closed.
type endingMover struct {
	*fakeMover
	life context.Context
}

func (m endingMover) Ended() context.Context { return m.life }

// TestCloseLeavesTransits: once the mover is closed, a batch in transit is its transit's owner's. A
// Close that waits for it ends then, and one that comes later does not wait.
func TestCloseLeavesTransits(t *testing.T) {
	for _, waits := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			m := newMover(t, 10, 10, 10)
			life, end := context.WithCancel(background)
			plan := newPlan(t, endingMover{m, life})
			r := ensure(t, plan, "join")
			fill(t, r, 2)
			b, _ := r.Peek(0)
			transit, err := b.TryTransit()
			check(t, err)
			if !waits {
				end()
			}
			closed := make(chan error, 1)
			go func() { closed <- closeAll(background, plan) }()
			synctest.Wait()
			if (len(closed) == 0) != waits {
				t.Errorf("Close waits: %t, want %t", !waits, waits)
			}
			end()
			check(t, <-closed)
			if r.Total() != 0 || m.space(tier.Host).State().Used() != bodySize {
				t.Errorf("%d batches and %d bytes are left", r.Total(), m.space(tier.Host).State().Used())
			}
			check(t, transit.Abort())
			check(t, b.Drop())
		})
	}
}
