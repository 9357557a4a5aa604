package test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/permit"
)

// TestMemoryFragments runs the fragments of docs/memory.md as TestPageFragments does.
func TestMemoryFragments(t *testing.T) {
	t.Parallel()
	for name, fragment := range map[string]func(shown) error{
		"accounts": shown.accounts, "promise": shown.promise, "now": shown.now, "begin again": shown.beginAgain,
		"other waits": shown.otherWaits, "state": shown.state, "permit": shown.permit, "admit": shown.admit,
		"limits": shown.limits, "leaks": shown.leaks,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if err := withShown(t.Context(), t.TempDir(), fragment); err != nil {
				t.Error(err)
			}
		})
	}
}

func (s shown) accounts() error {
	eng := s.eng
	for _, space := range eng.Spaces() {
		now := space.State()
		fmt.Println(space.ID(), "live", now.Live, "retired", now.Retired, "reserved", now.Reserved, "cached", now.Cached)
		fmt.Println("available", now.Available, "of", now.Limit, "pressure", now.Pressure)
	}
	return nil
}

func (s shown) promise() error {
	ctx, eng := s.ctx, s.eng
	r, err := eng.Reserve(ctx, spillway.AnyInTier(spillway.GPU), 64<<20) // waits for room
	if err != nil {
		return err
	}
	defer r.Release() // the unused rest is free at once
	table, err := r.Alloc(16 << 20)
	if err != nil {
		return err
	}
	defer table.Release()                       // before or after r.Release
	if err := r.Grow(ctx, 32<<20); err != nil { // waits like a new request
		return err
	}
	if err := r.Shrink(r.Unused()); err != nil { // at most what is in no buffer
		return err
	}
	return nil
}

func (s shown) now() error {
	ctx, eng := s.ctx, s.eng
	gpu, anywhere := spillway.AnyInTier(spillway.GPU), reservation.AnyInTiers(spillway.GPU, spillway.Host)
	r, err := eng.Reservations().TryReserve(gpu, 512<<20, nil)
	if errors.Is(err, spillway.ErrNoSpace) || errors.Is(err, spillway.ErrExceeded) { // not now, or never
		r, err = eng.Reservations().ReserveUpTo(ctx, anywhere, 1<<20, 512<<20, nil)
	}
	if err != nil {
		return err
	}
	defer r.Release()
	fmt.Println(r.Bytes(), "bytes in", r.Space().ID())
	return nil
}

func (s shown) beginAgain() error {
	eng := s.eng
	half := eng.Spaces()[0].State().Limit / 2
	work := func(ctx context.Context) error {
		owner := &reservation.Options{Owner: reservation.OwnerOf(ctx)}
		r, err := eng.Reservations().Reserve(ctx, spillway.AnyInTier(spillway.GPU), half, owner)
		if err != nil {
			return err
		}
		return r.Release()
	}
	return untilDone(s.ctx, work)
}

func untilDone(ctx context.Context, work func(context.Context) error) error {
	owner := reservation.NewOwner("merge")
	for {
		err := work(owner.Context(ctx)) // gives everything back when it fails
		var deadlock *reservation.DeadlockError
		if !errors.As(err, &deadlock) {
			return err
		}
		if err := deadlock.Wait(ctx); err != nil { // until one of the others has gone on
			return err
		}
	}
}

func (s shown) otherWaits() error {
	ctx := reservation.NewOwner("merge").Context(s.ctx)
	closed := make(chan struct{})
	close(closed)
	done := reservation.Waits(ctx) // ctx is a context of the owner
	<-closed                       // another task closes its handles
	done()
	return nil
}

func (s shown) state() error {
	ctx, plan, groups, spilled := s.ctx, s.plan, s.scan, s.groups
	var rec arrow.RecordBatch
	for rec = range groups {
		break
	}
	work, err := plan.Work(ctx, spillway.WorkOptions{
		Operator: "group-by", In: spillway.AnyInTier(spillway.Host), Min: 32 << 20,
	})
	if err != nil {
		return err
	}
	defer work.Close()
	if err := work.Grow(ctx, 16<<20); err != nil { // evicts batches, then asks other operators
		return err
	}
	if work.Requested() > 0 { // others wait: put state away
		err := spilled.Put(ctx, partition, rec, spillway.WithPlacement(spillway.AnyInTier(spillway.Disk)))
		if err != nil {
			return err
		}
		if err := work.Shrink(16 << 20); err != nil {
			return err
		}
	}
	return nil
}

func (s shown) permit() error {
	ctx, eng := s.ctx, s.eng
	send := func(context.Context, int64) error { return nil }
	held, err := eng.Permits().Acquire(ctx, permit.Request{
		Bytes: map[string]int64{permit.Host: 8 << 20}, Capped: true,
	})
	if err != nil {
		return err
	}
	defer held.Release()
	return send(ctx, held.Bytes(permit.Host))
}

func (s shown) admit() error {
	ctx, eng := s.ctx, s.eng
	grant, err := eng.Admit(ctx, spillway.Estimate{Operator: "scan", Output: 32 << 20, Overhead: 8 << 20})
	if err != nil {
		return err
	}
	defer grant.Release()
	buffer, err := grant.Alloc(32 << 20) // from the reservation of the task
	if err != nil {
		return err
	}
	defer buffer.Release()
	return nil
}

func (s shown) limits() error {
	shared, err := spillway.NewBudget(8<<30, "the service's GPU budget")
	if err != nil {
		return err
	}
	cfg := spillway.Config{Limits: spillway.Limits{
		Quota:   &spillway.QuotaSettings{Limit: spillway.Bytes(16 << 30)}, // all GPUs of this engine
		Budgets: []*spillway.Budget{shared},                               // with the other engines that have it
	}}
	_ = cfg
	return nil
}

func (s shown) leaks() error {
	ctx := s.ctx
	dir := s.dir
	eng, err := spillway.Open(ctx, spillway.Config{
		GPUs:       []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(1 << 20)}},
		HostMemory: spillway.Bytes(1 << 20),
		Disks:      []spillway.DiskConfig{{Dir: dir, Capacity: spillway.Bytes(1 << 20)}},
	})
	if err != nil {
		return err
	}
	err = eng.Close()
	var leak *spillway.LeakError
	if errors.As(err, &leak) {
		for _, l := range leak.Leaks {
			fmt.Println(l.Space, l.Bytes, l.Holders)
		}
	}
	return err
}

// TestDeadlockOfOwners: two tasks that each hold half of the GPU and ask for the rest do not wait for
// ever, and the error names both, as docs/memory.md shows.
func TestDeadlockOfOwners(t *testing.T) {
	t.Parallel()
	err := withShown(t.Context(), t.TempDir(), func(s shown) error {
		gpu := spillway.AnyInTier(spillway.GPU)
		half := s.eng.Spaces()[0].State().Available / 2
		var held [2]*spillway.Reservation
		for i, name := range []string{"join", "sort"} {
			r, err := s.eng.Reservations().Reserve(s.ctx, gpu, half, &reservation.Options{Owner: reservation.NewOwner(name)})
			if err != nil {
				return err
			}
			held[i] = r
		}
		ctx, cancel := context.WithTimeout(s.ctx, time.Minute)
		defer cancel()
		errs := make(chan error)
		for _, r := range held {
			go func() {
				err := r.Grow(ctx, half)
				errs <- errors.Join(err, r.Release())
			}()
		}
		failed, served := <-errs, <-errs
		if failed == nil {
			failed, served = served, failed
		}
		t.Log(failed)
		for _, want := range []string{"wait for each other", `owner "join"`, `owner "sort"`} {
			if !strings.Contains(fmt.Sprint(failed), want) {
				t.Errorf("%v: want %s", failed, want)
			}
		}
		if !errors.Is(failed, spillway.ErrDeadlock) {
			t.Errorf("%v: want ErrDeadlock", failed)
		}
		return served
	})
	if err != nil {
		t.Error(err)
	}
}
