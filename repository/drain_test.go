package repository

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// fill puts the numbers from 0 to n-1 into partition 0, in host memory.
func fill(t testing.TB, r *Repository, n int64) {
	t.Helper()
	for i := range n {
		check(t, r.Put(background, 0, record(i), WithPlacement(reservation.AnyInTier(tier.Host))))
	}
}

// TestDrain: every batch comes to the tier in order, and its memory goes with
// its handle.
func TestDrain(t *testing.T) {
	m := newMover(t, 2, 10, 10) // less than the data: the drain needs the closed handles' room
	r := ensure(t, newPlan(t, m), "join")
	fill(t, r, 6)
	var seen []int64
	for h, err := range r.Drain(background, 0, tier.GPU) {
		check(t, err)
		if h.Space().Kind() != tier.GPU || m.space(tier.GPU).State().Used() != bodySize {
			t.Errorf("the handle is in %s, the GPU holds %d bytes", h.Space().ID(), m.space(tier.GPU).State().Used())
		}
		seen = append(seen, m.numberOf(h.Batch()))
		rec, err := m.Record(background, h)
		check(t, err)
		rec.Release()
		check(t, h.Close())
		if h.Batch().Info().State != batch.Released || m.space(tier.GPU).State().Used() != 0 {
			t.Errorf("a closed handle leaves the batch %s and %d bytes",
				h.Batch().Info().State, m.space(tier.GPU).State().Used())
		}
	}
	if !slices.Equal(seen, []int64{0, 1, 2, 3, 4, 5}) || r.Total() != 0 {
		t.Errorf("saw %d, %d are left", seen, r.Total())
	}
	for range r.Drain(background, 0, 0) { // an invalid tier
		return
	}
	t.Error("draining to no tier is no error")
}

// TestDrainBreak: after a break the caller holds what was yielded, and the rest is whole.
func TestDrainBreak(t *testing.T) {
	m := newMover(t, 10, 10, 10)
	r := ensure(t, newPlan(t, m), "join")
	fill(t, r, 5)
	var kept *batch.Handle
	for h, err := range r.Drain(background, 0, tier.GPU) {
		check(t, err)
		if m.numberOf(h.Batch()) == 1 {
			kept = h // beyond the loop
			break
		}
		check(t, h.Close())
	}
	if r.Total() != 3 || r.Bytes(tier.Host) != 3*bodySize || m.space(tier.GPU).State().Used() != bodySize {
		t.Errorf("%d left, %d bytes of them in host memory, %d on the GPU",
			r.Total(), r.Bytes(tier.Host), m.space(tier.GPU).State().Used())
	}
	for b := range r.Batches(0) {
		if info := b.Info(); info.State != batch.Idle || info.Subscribers != 0 {
			t.Errorf("a batch that was not reached is %+v", info)
		}
	}
	check(t, kept.Close())
	func() { // and out of a loop by a panic
		defer func() {
			if recover() == nil {
				t.Error("the panic is gone")
			}
		}()
		for h, err := range r.Drain(background, 0, tier.GPU) {
			check(t, err)
			check(t, h.Close())
			panic("the consumer's")
		}
	}()
	if r.Total() != 2 {
		t.Errorf("%d left, want 2", r.Total())
	}
}

// TestDrainError: what fails on the way leaves the batch where it was, first in
// the queue.
func TestDrainError(t *testing.T) {
	broken := errors.New("broken")
	for _, at := range []string{"acquire", "move"} {
		t.Run(at, func(t *testing.T) {
			m := newMover(t, 10, 10, 10)
			r := ensure(t, newPlan(t, m), "join")
			fill(t, r, 3)
			calls := 0
			m.setFault(func(op string) error {
				if op == at {
					if calls++; calls == 2 {
						return broken
					}
				}
				return nil
			})
			var seen []int64
			failures := 0
			for range 2 {
				for h, err := range r.Drain(background, 0, tier.GPU) {
					if err != nil {
						failures++
						wantError(t, err, broken)
						if h != nil {
							t.Error("a handle beside an error")
						}
						b, _ := r.Peek(0)
						if info := b.Info(); m.numberOf(b) != 1 || info.State != batch.Idle || info.Space.Kind != tier.Host || r.Len(0) != 2 {
							t.Errorf("first is number %d, %+v, of %d", m.numberOf(b), info, r.Len(0))
						}
						continue // the iteration ends by itself
					}
					seen = append(seen, m.numberOf(h.Batch()))
					check(t, h.Close())
				}
			}
			if failures != 1 || !slices.Equal(seen, []int64{0, 1, 2}) {
				t.Errorf("%d failures, saw %d", failures, seen)
			}
		})
	}
}

// TestDrainPanic: a panic on the way is the caller's, and the batch is whole.
func TestDrainPanic(t *testing.T) {
	m := newMover(t, 10, 10, 10)
	r := ensure(t, newPlan(t, m), "join")
	fill(t, r, 1)
	m.setFault(func(op string) error {
		if op == "acquire" {
			panic("a converter's")
		}
		return nil
	})
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic is gone")
			}
		}()
		for range r.Drain(background, 0, tier.GPU) {
			t.Error("something was yielded")
		}
	}()
	if b, err := r.Take(background, 0, batch.Idle, NoWait()); err != nil || b == nil {
		t.Errorf("the batch is gone: %v", err)
	} else {
		check(t, b.Drop())
	}
}

// TestDrainPassesDropped: a batch that is dropped in place while the drain brings
// it is no error.
func TestDrainPassesDropped(t *testing.T) {
	m := newMover(t, 10, 10, 10)
	r := ensure(t, newPlan(t, m), "join")
	fill(t, r, 3)
	m.setFault(func(op string) error {
		if b, ok := r.Peek(0); ok && op == "acquire" && m.numberOf(b) == 1 {
			return b.Drop()
		}
		return nil
	})
	var seen []int64
	for h, err := range r.Drain(background, 0, tier.GPU) {
		check(t, err)
		seen = append(seen, m.numberOf(h.Batch()))
		check(t, h.Close())
	}
	if !slices.Equal(seen, []int64{0, 2}) || r.Total() != 0 {
		t.Errorf("saw %d, %d left", seen, r.Total())
	}
}

// TestDrainersShare: several drainers of one partition get all there is once, while another
// goroutine moves batches about.
func TestDrainersShare(t *testing.T) {
	const n = 200
	m := newMover(t, 3, n, n)
	r := ensure(t, newPlan(t, m), "join")
	fill(t, r, n)
	var (
		mu   sync.Mutex
		seen []int64
		all  sync.WaitGroup
	)
	for range 3 {
		all.Go(func() {
			for h, err := range r.Drain(background, 0, tier.GPU) {
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				seen = append(seen, m.numberOf(h.Batch()))
				mu.Unlock()
				if err := h.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	stop := make(chan struct{})
	var mover sync.WaitGroup
	mover.Go(func() {
		for {
			for b := range r.Batches(0) {
				if transit, err := b.TryTransit(); err == nil {
					if err := transit.Abort(); err != nil {
						t.Error(err)
					}
				}
				select {
				case <-stop:
					return
				default:
				}
			}
			select {
			case <-stop:
				return
			default:
			}
		}
	})
	all.Wait()
	close(stop)
	mover.Wait()
	slices.Sort(seen)
	if len(seen) != n || len(slices.Compact(seen)) != n || r.Total() != 0 {
		t.Errorf("%d batches came, %d different ones; %d are left", len(seen), len(slices.Compact(seen)), r.Total())
	}
}

// TestSecondDrainerEnds: a drainer that waits for what another may put back ends
// when the other does not.
func TestSecondDrainerEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 1, 10, 10)
		r := ensure(t, newPlan(t, m), "join")
		fill(t, r, 1)
		full, err := m.reservations.TryReserve(reservation.AnyInTier(tier.GPU), bodySize, nil)
		check(t, err)
		ends := make(chan int, 2)
		for range 2 {
			go func() {
				n := 0
				for h, err := range r.Drain(background, 0, tier.GPU) {
					if err == nil {
						n++
						err = h.Close()
					}
					if err != nil {
						t.Error(err)
					}
				}
				ends <- n
			}()
		}
		synctest.Wait()
		if len(ends) != 0 {
			t.Fatal("a drainer ended while the batch was on its way")
		}
		check(t, full.Release())
		if n := <-ends + <-ends; n != 1 {
			t.Errorf("the batch came %d times", n)
		}
	})
}

// TestClearAwaitsDrain: a batch that a drain is bringing is the drain's if that
// succeeds, and is cleared if not.
func TestClearAwaitsDrain(t *testing.T) {
	for name, fault := range map[string]error{"succeeds": nil, "fails": errors.New("broken")} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMover(t, 1, 10, 10)
				plan := newPlan(t, m)
				r := ensure(t, plan, "join")
				fill(t, r, 1)
				goOn := make(chan struct{})
				m.setFault(func(op string) error {
					if op != "acquire" {
						return nil
					}
					<-goOn
					return fault
				})
				drained := make(chan error, 1)
				go func() {
					for h, err := range r.Drain(background, 0, tier.GPU) {
						if err == nil {
							err = h.Close()
						}
						drained <- err
					}
				}()
				synctest.Wait()
				cleared := make(chan int, 1)
				go func() {
					report, err := plan.Clear(background)
					if err != nil {
						t.Error(err)
					}
					cleared <- len(report)
				}()
				synctest.Wait()
				if len(cleared) != 0 {
					t.Fatal("it was cleared under the drain")
				}
				close(goOn)
				if err := <-drained; !errors.Is(err, fault) {
					t.Errorf("the drain met %v, want %v", err, fault)
				}
				want := 0
				if fault != nil {
					want = 1
				}
				if n := <-cleared; n != want || r.Total() != 0 {
					t.Errorf("%d reports, want %d; %d batches left", n, want, r.Total())
				}
			})
		})
	}
}

// TestDrainWaitInput: it goes on until the input is closed, and the other ends
// when the partition is empty.
func TestDrainWaitInput(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 10, 10, 10)
		r := ensure(t, newPlan(t, m), "join")
		fill(t, r, 2)
		var seen []int64
		done := make(chan struct{})
		go func() {
			defer close(done)
			for h, err := range r.Drain(background, 0, tier.GPU, WaitInput()) {
				if err == nil {
					seen = append(seen, m.numberOf(h.Batch()))
					err = h.Close()
				}
				if err != nil {
					t.Error(err)
				}
			}
		}()
		synctest.Wait()
		check(t, r.Put(background, 0, record(2)))
		synctest.Wait()
		if !slices.Equal(seen, []int64{0, 1, 2}) {
			t.Errorf("saw %d", seen)
		}
		for range r.Drain(background, 0, tier.GPU) { // empty now, so it ends at once
			t.Error("something from an empty partition")
		}
		select {
		case <-done:
			t.Error("ended before the input")
		default:
		}
		r.CloseInput()
		<-done
	})
}

// TestReaderWaitsForTheSchema of the first batch, which may be put into another partition, and for
// the end of the input.
func TestReaderWaitsForTheSchema(t *testing.T) {
	for _, learns := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			m := newMover(t, 10, 10, 10)
			r := ensure(t, newPlan(t, m), "join")
			done := make(chan error, 1)
			go func() {
				rd, err := r.Reader(background, 1)
				if err == nil {
					rd.Release()
				}
				done <- err
			}()
			mustWait(t, done)
			var want error
			if learns {
				fill(t, r, 1)
			} else {
				r.CloseInput()
				want = ErrNoSchema
			}
			synctest.Wait()
			if len(done) != 1 {
				t.Fatal("the reader still waits")
			}
			wantError(t, <-done, want)
		})
	}
}

// TestStreamsIgnoreNoWait: the option is not for streams, which wait for a batch in transit.
func TestStreamsIgnoreNoWait(t *testing.T) {
	for _, name := range []string{"reader", "drain", "drain of what is there"} {
		synctest.Test(t, func(t *testing.T) {
			m := newMover(t, 10, 10, 10)
			r := ensure(t, newPlan(t, m), "join")
			fill(t, r, 2)
			r.CloseInput()
			transit := mustTransit(t, nth(r, 0))
			var got numbers
			done := make(chan error, 1)
			go func() { done <- ways[name](background, m, r, got.add, NoWait()) }()
			mustWait(t, done)
			check(t, transit.Abort())
			check(t, <-done)
			wantNumbers(t, got.all(), 0, 1)
		})
	}
}

// TestCloseEndsDrain: a drain that waits for room ends when the repository closes.
func TestCloseEndsDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 1, 10, 10)
		r := ensure(t, newPlan(t, m), "join")
		fill(t, r, 2)
		full, err := m.reservations.TryReserve(reservation.AnyInTier(tier.GPU), bodySize, nil)
		check(t, err)
		drained := make(chan error, 2)
		go func() {
			for _, err := range r.Drain(background, 0, tier.GPU) {
				drained <- err
			}
			close(drained)
		}()
		synctest.Wait()
		check(t, r.Close(background))
		wantError(t, <-drained, tier.ErrClosed)
		if _, more := <-drained; more || r.Total() != 0 {
			t.Errorf("something came after the close, %d are left", r.Total())
		}
		for _, err := range r.Drain(background, 0, tier.GPU) {
			wantError(t, err, tier.ErrClosed)
		}
		check(t, full.Release())
	})
}

// TestCloseEndsReading: the context with which a reader opens a record ends with the repository.
func TestCloseEndsReading(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 10, 10, 10)
		r := ensure(t, newPlan(t, m), "join")
		fill(t, r, 1)
		rd, err := r.Reader(background, 0)
		check(t, err)
		closed := make(chan struct{})
		m.setFault(func(op string) error {
			if op == "record" {
				<-closed
			}
			return nil
		})
		read, ended := make(chan bool), make(chan error, 1)
		go func() { read <- rd.Next() }()
		synctest.Wait()
		go func() { ended <- r.Close(background) }()
		synctest.Wait()
		close(closed)
		if <-read {
			t.Error("a record came after the close")
		}
		wantError(t, rd.Err(), tier.ErrClosed)
		check(t, <-ended)
		rd.Release()
	})
}

// TestReader: records come out as they were put, from whatever tier, and the
// reader consumes what it shows.
func TestReader(t *testing.T) {
	m := newMover(t, 1, 1, 10)
	r := ensure(t, newPlan(t, m), "join")
	for n := range int64(4) { // one on the GPU, one in host memory, two on disk
		check(t, r.Put(background, 0, record(n)))
	}
	r.CloseInput()
	rd, err := r.Reader(background, 0)
	check(t, err)
	if !rd.Schema().Equal(schemaA) {
		t.Error("another schema")
	}
	rd.Retain()
	for n := range int64(4) {
		if !rd.Next() {
			t.Fatalf("ended before %d: %v", n, rd.Err())
		}
		if got := number(rd.RecordBatch()); got != n || r.Total() != int(3-n) {
			t.Errorf("record %d, want %d; %d batches are left", got, n, r.Total())
		}
	}
	for range 2 {
		if rd.Next() || rd.Err() != nil || rd.RecordBatch() != nil {
			t.Errorf("after the end: %v", rd.Err())
		}
	}
	rd.Release()
	rd.Release()
}

// TestReaderOfALockedThread: goroutines that use CUDA contexts are locked to their threads.
func TestReaderOfALockedThread(t *testing.T) {
	m := newMover(t, 10, 10, 10)
	r := ensure(t, newPlan(t, m), "join")
	fill(t, r, 2)
	rd, err := r.Reader(background, 0)
	check(t, err)
	done := make(chan bool)
	go func() {
		runtime.LockOSThread()
		done <- rd.Next()
	}()
	if !<-done || !rd.Next() {
		t.Error(rd.Err())
	}
	rd.Release()
}

func TestReaderErrors(t *testing.T) {
	m := newMover(t, 10, 10, 10)
	r := ensure(t, newPlan(t, m), "join")
	fill(t, r, 3)
	broken := errors.New("broken")
	rd, err := r.Reader(background, 0)
	check(t, err)
	defer rd.Release()
	if !rd.Next() {
		t.Fatal(rd.Err())
	}
	m.setFault(func(op string) error {
		if op == "record" {
			return broken
		}
		return nil
	})
	for range 2 {
		if rd.Next() {
			t.Error("a record that cannot be opened is no end")
		}
	}
	wantError(t, rd.Err(), broken)
	b, _ := r.Peek(0)
	if m.numberOf(b) != 1 || b.Info().State != batch.Idle || r.Len(0) != 2 {
		t.Errorf("number %d, %s, of %d", m.numberOf(b), b.Info().State, r.Len(0))
	}

	m.setFault(nil)
	again, err := r.Reader(background, 0)
	check(t, err)
	if !again.Next() || number(again.RecordBatch()) != 1 {
		t.Errorf("a new reader goes on elsewhere: %v", again.Err())
	}
	again.Release() // in the middle
	if again.Next() {
		t.Error("a released reader goes on")
	}
	if r.Len(0) != 1 {
		t.Errorf("%d left, want 1", r.Len(0))
	}
}

// TestFailedReaderHasLetGo: a batch that cannot be opened is put back when the reader's handle
// is closed, and not before.
func TestFailedReaderHasLetGo(t *testing.T) {
	m := newMover(t, 10, 10, 10)
	broken := errors.New("broken")
	failed := false
	m.setFault(func(op string) error {
		if op != "record" {
			return nil
		}
		failed = true
		return broken
	})
	var r *Repository
	plan := NewManager("test", 7, Config{Mover: m, Clock: func() int64 { // is called when a handle is closed
		if failed {
			if b, err := r.Take(background, 0, batch.TaskCreated, NoWait()); b != nil || err != nil {
				t.Errorf("the batch of an open handle was taken: %v", err)
			}
		}
		return 0
	}})
	r = ensure(t, plan, "join")
	fill(t, r, 1)
	rd, err := r.Reader(background, 0)
	check(t, err)
	if rd.Next() {
		t.Error("a record that cannot be opened was returned")
	}
	wantError(t, rd.Err(), broken)
	rd.Release()
	failed = false
	check(t, closeAll(background, plan))
}

// TestFailedReaderLeavesTasks: a task that another caller has created stays pending, and as old as
// it was, when a reader cannot open the batch.
func TestFailedReaderLeavesTasks(t *testing.T) {
	m := newMover(t, 10, 10, 10)
	plan := newPlan(t, m)
	r := ensure(t, plan, "join")
	fill(t, r, 2)
	b, other := nth(r, 0), nth(r, 1)
	check(t, errors.Join(b.TryCreateTask(), other.TryCreateTask()))
	was := b.Info().Task
	broken := errors.New("broken")
	m.setFault(func(op string) error {
		if op == "record" {
			return broken
		}
		return nil
	})
	rd, err := r.Reader(background, 0)
	check(t, err)
	if rd.Next() {
		t.Error("a record that cannot be opened was returned")
	}
	wantError(t, rd.Err(), broken)
	rd.Release()
	if now := b.Info(); now.Pending != 1 || now.State != batch.TaskCreated || now.Task != was {
		t.Errorf("it leaves %d tasks, the oldest number %d, which was %d, and the batch %s", now.Pending, now.Task, was, now.State)
	}
}

// TestReaderSchema: it is known from the options though nothing was put, or waited
// for.
func TestReaderSchema(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 10, 10, 10)
		plan := newPlan(t, m)
		given, err := plan.Create(Key{"given", 0}, Options{Schema: schemaB})
		check(t, err)
		rd, err := given.Reader(background, 0)
		check(t, err)
		given.CloseInput()
		if rd.Schema() != schemaB || rd.Next() || rd.Err() != nil {
			t.Errorf("an empty reader: %v", rd.Err())
		}
		rd.Release()

		type made struct {
			number int64
			err    error
		}
		read := func(ctx context.Context, r *Repository) <-chan made {
			ch := make(chan made, 1)
			go func() {
				rd, err := r.Reader(ctx, 0)
				if err != nil {
					ch <- made{0, err}
					return
				}
				defer rd.Release()
				if !rd.Next() {
					ch <- made{0, rd.Err()}
					return
				}
				ch <- made{number(rd.RecordBatch()), nil}
			}()
			synctest.Wait()
			if len(ch) != 0 {
				t.Fatalf("it does not wait: %+v", <-ch)
			}
			return ch
		}
		waits := ensure(t, plan, "waits")
		first := read(background, waits)
		check(t, waits.Put(background, 0, record(5)))
		if got := <-first; got != (made{5, nil}) {
			t.Errorf("%+v", got)
		}
		empty := ensure(t, plan, "empty")
		second := read(background, empty)
		empty.CloseInput()
		wantError(t, (<-second).err, ErrNoSchema)
		closed := ensure(t, plan, "closed")
		third := read(background, closed)
		check(t, closed.Close(background))
		wantError(t, (<-third).err, tier.ErrClosed)
		ctx, cancel := context.WithCancelCause(background)
		cause := errors.New("gave up")
		fourth := read(ctx, ensure(t, plan, "cancelled"))
		cancel(cause)
		wantError(t, (<-fourth).err, cause)
	})
}

func TestNoMover(t *testing.T) {
	r := ensure(t, newPlan(t, nil), "join")
	for _, err := range r.Drain(background, 0, tier.GPU) {
		wantError(t, err, tier.ErrNotSupported)
	}
}
