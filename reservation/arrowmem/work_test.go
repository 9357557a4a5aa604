package arrowmem_test

import (
	"context"
	"errors"
	"math"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/compute"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/arrowmem"
	"github.com/spillway-db/spillway/tier"
)

const mib = 1 << 20

var inHost = reservation.AnyInTier(tier.Host)

// workOf makes a Work of a manager's host memory. It need not be closed.
func workOf(t testing.TB, m *reservation.Manager, heap *arrowmem.HeapCounter, o arrowmem.WorkOptions) *arrowmem.Work {
	t.Helper()
	if o.In == nil {
		o.In = inHost
	}
	w, err := arrowmem.NewWork(t.Context(), m, heap, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.Close(); err != nil && !errors.Is(err, tier.ErrReleased) {
			t.Error(err)
		}
	})
	return w
}

func TestWorkReservesMinAndSlack(t *testing.T) {
	m, s := arenaOf(t, 100*mib)
	for _, c := range []struct{ min, slack int64 }{
		{0, mib}, {1, mib}, {16 * mib, mib}, {32 * mib, 2 * mib}, {80 * mib, 5 * mib},
	} {
		w := workOf(t, m, nil, arrowmem.WorkOptions{Operator: "sort", Min: c.min})
		if got := s.State().Reserved; got != s.Charge(c.min+c.slack) {
			t.Errorf("Min %d: %d bytes are reserved", c.min, got)
		}
		if err := w.Close(); err != nil || s.State().Used() != 0 {
			t.Errorf("Close: %v, and %d bytes are left", err, s.State().Used())
		}
	}
}

func TestWorkWaitsForMin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := arenaOf(t, 100*mib)
		r, err := m.TryReserve(inHost, 50*mib, nil)
		if err != nil {
			t.Fatal(err)
		}
		made := make(chan *arrowmem.Work)
		go func() { made <- workOf(t, m, nil, arrowmem.WorkOptions{Min: 60 * mib}) }()
		synctest.Wait()
		select {
		case <-made:
			t.Fatal("it was made before there was room for Min")
		default:
		}
		release(t, r)
		(<-made).Close()

		ctx, cancel := context.WithCancelCause(t.Context())
		why := errors.New("why")
		cancel(why)
		o := arrowmem.WorkOptions{In: inHost}
		if _, err := arrowmem.NewWork(ctx, m, new(arrowmem.HeapCounter), o); !errors.Is(err, why) {
			t.Errorf("with a context that has ended: %v", err)
		}
	})
}

func TestWorkWrongArguments(t *testing.T) {
	m, s := arenaOf(t, 100*mib)
	for _, o := range []arrowmem.WorkOptions{
		{In: inHost, Min: -1},
		{In: inHost, Max: -1},
		{In: inHost, Min: 2, Max: 1},
		{Min: 1},
		{In: reservation.AnyInTier(tier.GPU), Min: 1},
	} {
		if w, err := arrowmem.NewWork(t.Context(), m, new(arrowmem.HeapCounter), o); err == nil || w != nil {
			t.Errorf("%+v: %v, %v", o, w, err)
		}
	}
	for _, min := range []int64{100 * mib, math.MaxInt64} {
		o := arrowmem.WorkOptions{Operator: "sort", In: inHost, Min: min}
		_, err := arrowmem.NewWork(t.Context(), m, new(arrowmem.HeapCounter), o)
		if !errors.Is(err, reservation.ErrExceeded) || !strings.Contains(err.Error(), `"sort"`) {
			t.Errorf("Min %d: %v", min, err)
		}
	}
	w := workOf(t, m, nil, arrowmem.WorkOptions{Min: 10 * mib})
	for _, n := range []int64{-1, math.MinInt64} {
		if w.Grow(t.Context(), n) == nil || w.Shrink(n) == nil {
			t.Errorf("%d bytes: no error", n)
		}
	}
	if err := w.Shrink(10*mib + 1); !errors.Is(err, reservation.ErrExceeded) {
		t.Errorf("into the slack: %v", err)
	}
	if err := w.Shrink(10 * mib); err != nil || s.State().Used() != mib {
		t.Errorf("to nothing: %v, and %d bytes are left", err, s.State().Used())
	}
}

func TestWorkMax(t *testing.T) {
	m, s := arenaOf(t, 100*mib)
	w := workOf(t, m, nil, arrowmem.WorkOptions{Operator: "sort", Min: 10 * mib, Max: 20 * mib})
	grow := func(n int64) error { return w.Grow(t.Context(), n) }
	var e *reservation.ExceededError
	if err := grow(10*mib + 1); !errors.As(err, &e) || e.Available != 10*mib || e.Limit != 20*mib {
		t.Errorf("above Max: %v", err)
	}
	if err := grow(math.MaxInt64); !errors.Is(err, reservation.ErrExceeded) {
		t.Errorf("far above Max: %v", err)
	}
	if err := grow(10 * mib); err != nil || s.State().Used() != 21*mib {
		t.Errorf("to Max: %v, and %d bytes are used", err, s.State().Used())
	}
	if err := w.Shrink(15 * mib); err != nil || s.State().Used() != 6*mib {
		t.Errorf("below Min: %v, and %d bytes are used", err, s.State().Used())
	}
	if err := grow(15*mib + 1); !errors.Is(err, reservation.ErrExceeded) {
		t.Errorf("above Max again: %v", err)
	}
	if err := grow(15 * mib); err != nil {
		t.Errorf("to Max again: %v", err)
	}
	if err := w.Close(); err != nil || s.State().Used() != 0 {
		t.Errorf("Close: %v, and %d bytes are left", err, s.State().Used())
	}
	for name, err := range map[string]error{"Grow": grow(1), "Shrink": w.Shrink(1), "Close": w.Close()} {
		if !errors.Is(err, tier.ErrReleased) {
			t.Errorf("%s after Close: %v", name, err)
		}
	}
	unlimited := workOf(t, m, nil, arrowmem.WorkOptions{Min: 10 * mib})
	if err := unlimited.Grow(t.Context(), 89*mib); err != nil {
		t.Errorf("to the space's limit: %v", err)
	}
	for _, n := range []int64{1, math.MaxInt64} {
		if err := unlimited.Grow(t.Context(), n); !errors.Is(err, reservation.ErrExceeded) {
			t.Errorf("%d bytes above the space's limit: %v", n, err)
		}
	}
}

// TestWorkAfterErrors is as it was before.
func TestWorkAfterErrors(t *testing.T) {
	m, s := arenaOf(t, 100*mib)
	w := workOf(t, m, new(arrowmem.HeapCounter), arrowmem.WorkOptions{Min: 10 * mib, Max: 110 * mib})
	if err := w.Grow(t.Context(), 95*mib); !errors.Is(err, reservation.ErrExceeded) {
		t.Errorf("above what the space has: %v", err)
	}
	if err := w.Grow(t.Context(), 50*mib); err != nil || s.State().Used() != 61*mib {
		t.Errorf("Grow after that: %v, and %d bytes are used", err, s.State().Used())
	}
	b := w.Allocator().Allocate(40 * mib)
	if err := w.Shrink(30 * mib); !errors.Is(err, reservation.ErrExceeded) || s.State().Used() != 61*mib {
		t.Errorf("Shrink by what is in an array: %v, and %d bytes are used", err, s.State().Used())
	}
	w.Allocator().Free(b)
	if err := w.Shrink(60 * mib); err != nil || s.State().Used() != mib {
		t.Errorf("Shrink after that: %v, and %d bytes are used", err, s.State().Used())
	}
}

// TestWorkRoundingDoesNotAddUp: the space charges pages, and an operator may grow and shrink by any
// number of bytes.
func TestWorkRoundingDoesNotAddUp(t *testing.T) {
	m, s := arenaOf(t, 100*mib)
	w := workOf(t, m, nil, arrowmem.WorkOptions{Min: 10 * mib, Max: 12 * mib})
	for i := range int64(1000) {
		n := 20_000 + i*7
		if err := w.Grow(t.Context(), n); err != nil {
			t.Fatal(err)
		}
		if err := w.Shrink(n); err != nil {
			t.Fatal(err)
		}
		if over := s.State().Used() - 11*mib; over < 0 || over > tier.Page {
			t.Fatalf("after %d times it has %d bytes more than at first", i+1, over)
		}
	}
}

// numbersAndIndices are a column of n numbers, and the indices that reverse it.
func numbersAndIndices(n int) (values, indices arrow.Array) {
	v, i := array.NewInt64Builder(memory.DefaultAllocator), array.NewInt64Builder(memory.DefaultAllocator)
	for k := range n {
		v.Append(int64(k) * 3)
		i.Append(int64(n - 1 - k))
	}
	return v.NewArray(), i.NewArray()
}

// TestWorkTakeArray: arrow-go runs kernels on a goroutine of its own, so a panic of the allocator
// would end the process.
func TestWorkTakeArray(t *testing.T) {
	const rows = 1 << 20 // 8 MiB
	values, indices := numbersAndIndices(rows)
	m, s := arenaOf(t, 100*mib)
	var heap arrowmem.HeapCounter
	w := workOf(t, m, &heap, arrowmem.WorkOptions{Operator: "join", Min: 1})
	ctx := compute.WithAllocator(t.Context(), w.Allocator())
	take := func() arrow.Array {
		t.Helper()
		out, err := compute.TakeArray(ctx, values, indices)
		if err != nil {
			t.Fatal(err)
		}
		for i, v := range out.(*array.Int64).Int64Values() {
			if v != int64(rows-1-i)*3 {
				t.Fatalf("row %d is %d", i, v)
			}
		}
		return out
	}
	if err := w.Err(); err != nil {
		t.Fatal(err)
	}
	first := take()
	err := w.Err()
	if !errors.Is(err, reservation.ErrExceeded) || !strings.Contains(err.Error(), `"join"`) {
		t.Errorf("Err: %v", err)
	}
	over := heap.Stats()
	if over.Bytes < 8*rows || over.Bytes > 8*rows+2*rows || over.Peak < over.Bytes {
		t.Errorf("on the heap: %+v", over)
	}
	if s.State().Used() > 2*mib {
		t.Errorf("%d bytes of the space are used", s.State().Used())
	}
	if err := w.Grow(t.Context(), mib); err != nil {
		t.Fatal(err)
	}
	if err := w.Err(); !errors.Is(err, reservation.ErrExceeded) {
		t.Errorf("Err after too small a Grow: %v", err)
	}
	if err := w.Grow(t.Context(), over.Bytes); err != nil {
		t.Fatal(err)
	}
	if err := w.Err(); err != nil {
		t.Errorf("Err after Grow: %v", err)
	}
	second := take() // in what Grow has added
	if err := w.Err(); err != nil {
		t.Errorf("Err after a kernel within the Work: %v", err)
	}
	if now := heap.Stats(); now.Bytes != over.Bytes {
		t.Errorf("on the heap after a kernel within the Work: %+v", now)
	}
	first.Release()
	second.Release()
	if now := heap.Stats(); now.Bytes != 0 || now.Peak != over.Peak {
		t.Errorf("on the heap at the end: %+v", now)
	}
}

// TestWorkErrStays until a Grow, even if the arrays on the heap were freed.
func TestWorkErrStays(t *testing.T) {
	m, _ := arenaOf(t, 100*mib)
	var heap arrowmem.HeapCounter
	w := workOf(t, m, &heap, arrowmem.WorkOptions{})
	a := w.Allocator()
	slack := a.Allocate(mib) // which is allowed
	if err := w.Err(); err != nil || heap.Stats().Bytes != 0 {
		t.Errorf("within the slack: %v, %+v", err, heap.Stats())
	}
	over := a.Allocate(1000)
	if len(over) != 1000 || addressOf(over)%64 != 0 || heap.Stats().Bytes != 1000 {
		t.Errorf("%d bytes, %+v", len(over), heap.Stats())
	}
	a.Free(over)
	if err := w.Err(); !errors.Is(err, reservation.ErrExceeded) {
		t.Errorf("after they were freed: %v", err)
	}
	if err := w.Grow(t.Context(), 0); err != nil || w.Err() != nil {
		t.Errorf("after Grow: %v, %v", err, w.Err())
	}
	a.Free(slack)
}

// TestWorkReallocatesOffTheHeap: a block that moves goes into the Work when there is room again.
func TestWorkReallocatesOffTheHeap(t *testing.T) {
	m, s := arenaOf(t, 100*mib)
	var heap arrowmem.HeapCounter
	w := workOf(t, m, &heap, arrowmem.WorkOptions{})
	a := w.Allocator()
	filled := func(b []byte, from int) []byte {
		for i := range b[from:] {
			if b[from+i] != 0 {
				t.Fatalf("byte %d is not zero", from+i)
			}
			b[from+i] = byte(from+i) | 1
		}
		for i := range b {
			if b[i] != byte(i)|1 {
				t.Fatalf("byte %d was lost", i)
			}
		}
		return b
	}
	b := filled(a.Allocate(mib/2), 0)
	b = filled(a.Reallocate(2*mib, b), mib/2)
	if heap.Stats().Bytes != 2*mib || s.State().Live != 0 {
		t.Errorf("grown onto the heap: %+v, %+v", heap.Stats(), s.State().Usage)
	}
	b = a.Reallocate(2*mib-1, b)
	b = filled(a.Reallocate(2*mib, b[:2*mib-1]), 2*mib-1)
	if heap.Stats().Bytes != 2*mib {
		t.Errorf("in place: %+v", heap.Stats())
	}
	b = filled(a.Reallocate(mib/2, b), mib/2)
	if heap.Stats().Bytes != 0 || s.State().Live != mib/2 {
		t.Errorf("shrunk into the Work: %+v, %+v", heap.Stats(), s.State().Usage)
	}
	a.Free(b)
	if heap.Stats().Peak != 2*mib || s.State().Live != 0 {
		t.Errorf("at the end: %+v, %+v", heap.Stats(), s.State().Usage)
	}
}

// TestWorkWithoutAHeapCounter: the allocator uses the Go heap all the same.
func TestWorkWithoutAHeapCounter(t *testing.T) {
	m, _ := arenaOf(t, 100*mib)
	w := workOf(t, m, nil, arrowmem.WorkOptions{Operator: "build"})
	b := w.Allocator().Allocate(2 * mib)
	if err := w.Err(); !errors.Is(err, reservation.ErrExceeded) {
		t.Errorf("Err: %v", err)
	}
	w.Allocator().Free(b)
}

// TestWorkAllocatorNeverPanics for wrong calls: Close returns the first of them.
func TestWorkAllocatorNeverPanics(t *testing.T) {
	m, _ := arenaOf(t, 100*mib)
	for name, f := range map[string]func(a memory.Allocator, freed []byte){
		"negative":         func(a memory.Allocator, _ []byte) { a.Allocate(-1) },
		"free twice":       func(a memory.Allocator, freed []byte) { a.Free(freed) },
		"free another's":   func(a memory.Allocator, _ []byte) { a.Free(make([]byte, 10)) },
		"reallocate freed": func(a memory.Allocator, freed []byte) { a.Free(a.Reallocate(200, freed)) },
		"reallocate foreign": func(a memory.Allocator, _ []byte) {
			b := a.Reallocate(5, []byte("some other"))
			if string(b) != "some " {
				t.Errorf("its bytes are %q", b)
			}
			a.Free(b)
		},
	} {
		w := workOf(t, m, nil, arrowmem.WorkOptions{})
		freed := w.Allocator().Allocate(100)
		w.Allocator().Free(freed)
		f(w.Allocator(), freed)
		if err := w.Close(); err == nil {
			t.Errorf("%s: Close returned no error", name)
		}
	}
}

// TestWorkBuffersOutliveIt: memory of arrays returns to the space when they are released.
func TestWorkBuffersOutliveIt(t *testing.T) {
	m, s := arenaOf(t, 100*mib)
	var heap arrowmem.HeapCounter
	w := workOf(t, m, &heap, arrowmem.WorkOptions{Min: 10 * mib})
	a := w.Allocator()
	b := a.Allocate(mib)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if s.State().Used() != mib {
		t.Errorf("%d bytes are used after Close", s.State().Used())
	}
	late := a.Allocate(1000)
	if err := w.Err(); heap.Stats().Bytes != 1000 || !errors.Is(err, reservation.ErrExceeded) {
		t.Errorf("allocated after Close: %+v, %v", heap.Stats(), err)
	}
	a.Free(b)
	a.Free(late)
	if s.State().Used() != 0 || heap.Stats().Bytes != 0 {
		t.Errorf("at the end %d bytes are used, and %+v", s.State().Used(), heap.Stats())
	}
}

// TestWorkInOtherMemory: its allocator works, on the Go heap alone.
func TestWorkInOtherMemory(t *testing.T) {
	s, err := tier.NewSpace(tier.SpaceConfig{ID: tier.ID{Kind: tier.GPU}, Capacity: 100 * mib, Pool: noPool{}})
	if err != nil {
		t.Fatal(err)
	}
	m, err := reservation.NewManager(reservation.Config{Spaces: []*tier.Space{s}})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	var heap arrowmem.HeapCounter
	w := workOf(t, m, &heap, arrowmem.WorkOptions{In: reservation.AnyInTier(tier.GPU), Min: 10 * mib})
	a := w.Allocator()
	b := a.Allocate(1000)
	if err := w.Err(); heap.Stats().Bytes != 1000 || !errors.Is(err, tier.ErrNotSupported) ||
		!errors.Is(err, reservation.ErrExceeded) {
		t.Errorf("%+v, %v", heap.Stats(), err)
	}
	a.Free(b)
	if err := w.Grow(t.Context(), mib); err != nil {
		t.Fatal(err)
	}
	if err := w.Err(); !errors.Is(err, tier.ErrNotSupported) {
		t.Errorf("after Grow: %v", err)
	}
	if err := w.Close(); err != nil || s.State().Used() != 0 {
		t.Errorf("Close: %v, and %d bytes are used", err, s.State().Used())
	}
}

// TestWorkShrinksInPlaceWithoutRoom: an array that becomes smaller stays where it is if there is no
// room for it elsewhere, and does not go to the heap.
func TestWorkShrinksInPlaceWithoutRoom(t *testing.T) {
	m, _ := arenaOf(t, 8*mib)
	var heap arrowmem.HeapCounter
	w := workOf(t, m, &heap, arrowmem.WorkOptions{Min: 7 * mib})
	alloc := w.Allocator()
	large := alloc.Allocate(3 * mib)
	var all [5][]byte
	for i := range all {
		all[i] = alloc.Allocate(mib)
	}
	alloc.Free(all[0])
	small := alloc.Reallocate(2*mib, large)
	if &small[0] != &large[0] || len(small) != 2*mib || heap.Stats().Peak != 0 || w.Err() != nil {
		t.Errorf("%d bytes, %+v, %v", len(small), heap.Stats(), w.Err())
	}
	alloc.Free(small)
	for _, b := range all[1:] {
		alloc.Free(b)
	}
}

// TestWorkInPieces: nothing comes from the heap where the arena has room, also in pieces.
func TestWorkInPieces(t *testing.T) {
	m, _ := arenaOf(t, 8*mib)
	var heap arrowmem.HeapCounter
	w := workOf(t, m, &heap, arrowmem.WorkOptions{Min: 7 * mib})
	alloc := w.Allocator()
	var all [8][]byte
	for i := range all {
		all[i] = alloc.Allocate(mib)
	}
	for i := 0; i < 8; i += 2 {
		alloc.Free(all[i])
	}
	b := alloc.Allocate(2 * mib)
	if len(b) != 2*mib || heap.Stats().Bytes != 0 || w.Err() != nil {
		t.Errorf("%d bytes, %+v, %v", len(b), heap.Stats(), w.Err())
	}
	alloc.Free(b)
	for i := 1; i < 8; i += 2 {
		alloc.Free(all[i])
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
}

// TestWorkAfterAFailedGrow: a Grow that fails takes nothing of what the Work may grow to.
func TestWorkAfterAFailedGrow(t *testing.T) {
	m, _ := arenaOf(t, 100*mib)
	w := workOf(t, m, nil, arrowmem.WorkOptions{Operator: "build", Min: 10 * mib, Max: 20 * mib})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := w.Grow(ctx, 10*mib); !errors.Is(err, context.Canceled) {
		t.Errorf("Grow: %v", err)
	}
	if err := w.Grow(t.Context(), 10*mib); err != nil {
		t.Errorf("Grow after one that failed: %v", err)
	}
}

// TestWorkShrinkWhileItGrows: what a Grow waits for, and the slack, cannot be given back.
func TestWorkShrinkWhileItGrows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, s := arenaOf(t, 100*mib)
		w := workOf(t, m, nil, arrowmem.WorkOptions{Operator: "build", Min: 10 * mib})
		full, err := m.TryReserve(inHost, s.State().Available, nil)
		if err != nil {
			t.Fatal(err)
		}
		grown := make(chan error, 1)
		go func() { grown <- w.Grow(t.Context(), 50*mib) }()
		synctest.Wait()
		if err := w.Shrink(10*mib + mib/2); !errors.Is(err, reservation.ErrExceeded) {
			t.Errorf("Shrink into the slack: %v", err)
		}
		release(t, full)
		if err := <-grown; err != nil {
			t.Error(err)
		}
		if err := w.Shrink(60 * mib); err != nil {
			t.Error(err)
		}
	})
}

// TestWorkGrowsAndShrinksAtOnce: Grow takes no bytes that Shrink gives back at the same moment for
// what the space rounds, so the Work has its slack in the end.
func TestWorkGrowsAndShrinksAtOnce(t *testing.T) {
	m, s := arenaOf(t, 100*mib)
	w := workOf(t, m, nil, arrowmem.WorkOptions{Min: 10 * mib})
	var all sync.WaitGroup
	for range 16 {
		all.Go(func() {
			for range 3000 {
				if err := errors.Join(w.Grow(t.Context(), tier.Page), w.Shrink(tier.Page)); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	if err := w.Shrink(10 * mib); err != nil || s.State().Used() != mib {
		t.Errorf("%v, and %d bytes are used in the end", err, s.State().Used())
	}
}
