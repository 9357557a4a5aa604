package test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/tier"
)

// TestTaskThatNeverFits: a task that takes more than any GPU has is not tried again and again, and
// nothing is moved for one that says so itself. Its inputs are whole in their places.
func TestTaskThatNeverFits(t *testing.T) {
	const capacity = 1 << 20
	alloc := func(sizes ...int64) func(*spillway.Grant) error {
		return func(g *spillway.Grant) (err error) {
			for _, n := range sizes {
				b, err := g.Alloc(n)
				if err != nil {
					return err
				}
				defer func() { err = errors.Join(err, b.Release()) }()
			}
			return nil
		}
	}
	pieces := make([]int64, 40)
	for i := range pieces {
		pieces[i] = capacity / 16
	}
	for _, test := range []struct {
		name             string
		output, overhead int64
		f                func(*spillway.Grant) error
		learn            bool // of tasks that took much more
		calls            int  // at most; 0: refused at once
	}{
		{name: "output", output: capacity, f: alloc()},
		{name: "overhead", output: admission.None, overhead: capacity, f: alloc()},
		{name: "both", output: capacity * 2 / 3, overhead: capacity * 2 / 3, f: alloc()},
		{name: "the largest numbers", output: math.MaxInt64, overhead: math.MaxInt64, f: alloc()},
		{name: "one allocation", f: alloc(2 * capacity), calls: 2},
		{name: "allocations together", f: alloc(capacity/2, capacity*2/3), calls: 3},
		{name: "many", f: alloc(pieces...), calls: 4},
		{name: "learned", f: alloc(pieces...), learn: true, calls: 1},
		{name: "from Reserve", calls: 2, f: func(g *spillway.Grant) error {
			return g.Reservation().Grow(context.Background(), capacity)
		}},
		{name: "without numbers", f: func(*spillway.Grant) error { return reservation.ErrExceeded }, calls: 5},
	} {
		t.Run(test.name, func(t *testing.T) {
			eng, repo := openTasks(t, capacity, 4<<20, 0, 0)
			putIn(t, repo, tier.Host, 2)
			if test.learn {
				for range 100 {
					eng.Admitter().Estimator().Observe("sort", admission.Measured{Input: 1000, Output: 1_000_000, Peak: 1_000_000})
				}
			}
			// What others have in the GPU need not be moved for what cannot be.
			putIn(t, repo, tier.GPU, 6)
			before := written(eng)
			var calls atomic.Int32
			task := spillway.Task{Operator: "sort", Inputs: []*repository.Claim{mustClaim(t, repo, 2)}, Output: test.output, Overhead: test.overhead}
			err := eng.RunTask(t.Context(), task, func(_ context.Context, g *spillway.Grant, _ []*spillway.Handle) error {
				calls.Add(1)
				return test.f(g)
			})
			var exceeded *reservation.ExceededError
			if !errors.Is(err, reservation.ErrExceeded) ||
				test.calls == 0 && (!errors.As(err, &exceeded) || exceeded.Requested <= exceeded.Limit) {
				t.Errorf("%v", err)
			}
			if err != nil && strings.Contains(err.Error(), fmt.Sprint(math.MaxInt64)) {
				t.Errorf("a sum that overflows is shown as a number: %v", err)
			}
			if n := int(calls.Load()); n > test.calls || n == 0 && test.calls > 0 {
				t.Errorf("%d calls, want %d at most", n, test.calls)
			}
			if n := written(eng) - before; test.calls == 0 && n != 0 {
				t.Errorf("%d bytes were moved", n)
			}
			if test.calls > 0 && (!outOfAttempts(err) || !strings.Contains(err.Error(), "ran out of memory")) {
				t.Errorf("%v", err)
			}
			if repo.Total() != 8 {
				t.Errorf("%d batches are left", repo.Total())
			}
			for b := range repo.Batches(0) {
				if info := b.Info(); info.Active != 0 || info.Pending != 0 {
					t.Errorf("%+v", info)
				}
			}
			closeClean(t, eng)
		})
	}
}

// putIn puts records into a tier.
func putIn(t *testing.T, repo *repository.Repository, k tier.Kind, records int) {
	t.Helper()
	for n := range int64(records) {
		if err := repo.Put(t.Context(), 0, numberedRecord(n, 1000, wordList(1, 10)), in(k)); err != nil {
			t.Fatal(err)
		}
	}
}

// written returns how many bytes were moved.
func written(eng *spillway.Engine) (bytes int64) {
	for _, e := range eng.Mover().Stats() {
		bytes += e.Bytes
	}
	return bytes
}

// TestTaskThatFitsLater: a task whose estimate is more than the GPU has runs with all of it, and
// one that took more than it was given runs again.
func TestTaskThatFitsLater(t *testing.T) {
	const capacity = 1 << 20
	eng, repo := openTasks(t, capacity, 4<<20, 0, 0)
	putIn(t, repo, tier.Host, 2)
	for range 100 {
		eng.Admitter().Estimator().Observe("guess", admission.Measured{Input: 1000, Output: 1_000_000, Peak: 1_000_000})
	}
	for _, operator := range []string{"guess", "low"} {
		calls := 0
		task := spillway.Task{Operator: operator, Inputs: []*repository.Claim{mustClaim(t, repo, 1)}}
		err := eng.RunTask(t.Context(), task, func(_ context.Context, g *spillway.Grant, _ []*spillway.Handle) error {
			calls++
			b, err := g.Alloc(capacity / 2)
			if err != nil {
				return err
			}
			return b.Release()
		})
		if err != nil || operator == "guess" && calls != 1 || operator == "low" && calls < 2 {
			t.Errorf("%s: %d calls: %v", operator, calls, err)
		}
	}
	closeClean(t, eng)
}

// TestRefusalNamesTheLargestGPU: of the GPUs that no task fits into the one with the most room is
// named.
func TestRefusalNamesTheLargestGPU(t *testing.T) {
	eng, err := spillway.Open(t.Context(), spillway.Config{
		GPUs:       []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(256 << 10)}, {Backend: spillway.Sim, Memory: spillway.Bytes(512 << 10)}},
		HostMemory: spillway.Bytes(1 << 20), Disks: []spillway.DiskConfig{},
	})
	if err != nil {
		t.Fatal(err)
	}
	err = eng.RunTask(t.Context(), spillway.Task{Output: 1 << 20}, func(context.Context, *spillway.Grant, []*spillway.Handle) error { return nil })
	var exceeded *reservation.ExceededError
	if !errors.As(err, &exceeded) || exceeded.Space != otherGPU {
		t.Errorf("%v", err)
	}
	closeClean(t, eng)
}
