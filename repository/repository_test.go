package repository

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

var background = context.Background()

// TestFirstInFirstOut: partitions keep their orders apart.
func TestFirstInFirstOut(t *testing.T) {
	m := newMover(t, 10, 10, 10)
	r := ensure(t, newPlan(t, m), "join")
	for n := range int64(9) {
		check(t, r.Put(background, int(n%3), record(n)))
	}
	if got := r.Partitions(); !slices.Equal(got, []int{0, 1, 2}) || r.Total() != 9 {
		t.Errorf("partitions %d with %d batches", got, r.Total())
	}
	for _, p := range []int{2, 0, 1} {
		for i := range 3 {
			if r.Len(p) != 3-i {
				t.Errorf("partition %d holds %d batches, want %d", p, r.Len(p), 3-i)
			}
			first, ok := r.Peek(p)
			b, err := r.Take(background, p, batch.Idle)
			check(t, err)
			if want := int64(i*3 + p); m.numberOf(b) != want || !ok || first != b {
				t.Errorf("partition %d: took %d, want %d; peeked %v", p, m.numberOf(b), want, ok)
			}
			check(t, b.Drop())
		}
		if _, ok := r.Peek(p); ok {
			t.Errorf("partition %d is empty and shows a batch", p)
		}
	}
	if b, err := r.Take(background, 0, batch.Idle, NoWait()); b != nil || err != nil {
		t.Errorf("from an empty partition: %v, %v", b, err)
	}
}

// TestPartitionRange: a number out of range is an error wherever something would
// be done, and an empty view elsewhere.
func TestPartitionRange(t *testing.T) {
	m := newMover(t, 10, 10, 10)
	plan := newPlan(t, m)
	r, err := plan.Create(Key{"join", 1}, Options{Partitions: 2})
	check(t, err)
	check(t, r.Put(background, 1, record(1)))
	for _, p := range []int{-1, 2, 1 << 40} {
		b := newBatch(t, 99, m.space(tier.Host))
		operations := map[string]func() error{
			"put":       func() error { return r.Put(background, p, record(1)) },
			"put batch": func() error { return r.PutBatch(p, b) },
			"take":      func() error { _, err := r.Take(background, p, batch.Idle); return err },
			"try take":  func() error { _, err := r.Take(background, p, batch.TaskCreated, NoWait()); return err },
			"transit":   func() error { _, err := r.Take(background, p, batch.InTransit, Into(new(*batch.Transit))); return err },
			"reader":    func() error { _, err := r.Reader(background, p); return err },
			"drain": func() error {
				for _, err := range r.Drain(background, p, tier.GPU) {
					return err
				}
				return nil
			},
		}
		for name, do := range operations {
			if err := do(); !errors.Is(err, ErrPartition) {
				t.Errorf("%s of partition %d: %v", name, p, err)
			}
		}
		if _, ok := r.Peek(p); ok || r.Len(p) != 0 || len(slices.Collect(r.Batches(p))) != 0 {
			t.Errorf("partition %d shows something", p)
		}
		check(t, b.Drop()) // it stayed the caller's
	}
	if r.Total() != 1 {
		t.Errorf("%d batches, want 1", r.Total())
	}
	if _, err := plan.Create(Key{"join", 2}, Options{Partitions: -1}); err == nil {
		t.Error("a negative number of partitions is no error")
	}
}

// TestTakeFindsTheOldestThatCanMove goes through orders of states and takes.
func TestTakeFindsTheOldestThatCanMove(t *testing.T) {
	tests := []struct {
		queue              string // a letter a batch, oldest first: idle, task created, processing, moving
		how                string
		ordered, unordered int // index into queue, -1: none
	}{
		{"itpm", "idle", 0, 0}, {"mpti", "idle", -1, 3}, {"mpt", "idle", -1, -1}, {"", "idle", -1, -1},
		{"ptim", "idle", 2, 2}, {"tmi", "idle", -1, 2}, {"imi", "idle", 0, 0},
		{"itpm", "task", 0, 0}, {"mtpi", "task", -1, 1}, {"mpti", "task", -1, 1}, {"mm", "task", -1, -1},
		{"mmi", "task", -1, 2}, {"pmi", "task", 0, 0},
		{"itpm", "transit", 0, 0}, {"mpti", "transit", -1, 2}, {"pm", "transit", -1, -1}, {"pmi", "transit", -1, 2},
		{"pim", "transit", 1, 1},
	}
	for i := range 2 * len(tests) {
		test := tests[i/2]
		want, opts := test.ordered, []TakeOption(nil)
		if i%2 == 1 {
			want, opts = test.unordered, []TakeOption{Unordered()}
		}
		t.Run(fmt.Sprintf("%s %s %d", test.queue, test.how, i%2), func(t *testing.T) {
			m := newMover(t, 10, 10, 10)
			r := ensure(t, newPlan(t, m), "join")
			gpu := m.space(tier.GPU)
			var all []*batch.Batch
			var ends []func() error
			for i, c := range test.queue {
				b := newBatch(t, batch.ID(i+1), gpu)
				check(t, r.PutBatch(0, b))
				all = append(all, b)
				if c == 't' || c == 'p' {
					check(t, b.TryCreateTask())
				}
				switch c {
				case 'p':
					h, err := b.TryLock(gpu.ID())
					check(t, err)
					ends = append(ends, h.Close)
				case 'm':
					transit, err := b.TryTransit()
					check(t, err)
					ends = append(ends, transit.Abort)
				}
			}
			var got *batch.Batch
			var err error
			state := batch.Idle
			switch test.how {
			case "idle":
				got, err = r.Take(background, 0, batch.Idle, append(opts, NoWait())...)
			case "task":
				state = batch.TaskCreated
				got, err = r.Take(background, 0, batch.TaskCreated, append(opts, NoWait())...)
			case "transit":
				state = batch.InTransit
				var transit *batch.Transit
				if got, err = r.Take(background, 0, batch.InTransit, append(opts, Into(&transit), NoWait())...); transit != nil {
					ends = append(ends, transit.Abort)
				}
			}
			check(t, err)
			if at := slices.Index(all, got); at != want {
				t.Fatalf("took number %d, want %d", at, want)
			}
			if want >= 0 {
				if test.queue[want] == 'p' {
					state = batch.Processing
				}
				if got.Info().State != state || r.Len(0) != len(all)-1 {
					t.Errorf("it is %s, want %s; %d are left", got.Info().State, state, r.Len(0))
				}
			}
			for _, end := range ends {
				check(t, end())
			}
			if got != nil {
				check(t, got.Drop())
			}
		})
	}
}

func TestTakeRefusesOtherStates(t *testing.T) {
	r := ensure(t, newPlan(t, nil), "join")
	for _, s := range []batch.State{batch.Processing, batch.InTransit, batch.Released} {
		if _, err := r.Take(background, 0, s); err == nil {
			t.Errorf("taking as %s is no error", s)
		}
		if _, err := r.TakeByID(background, 1, s); err == nil {
			t.Errorf("taking by id as %s is no error", s)
		}
	}
	if _, err := r.Take(background, 0, batch.InTransit); !strings.Contains(err.Error(), "Into") {
		t.Errorf("the error does not name Into: %v", err)
	}
}

// taken runs take in a goroutine and returns its result when it comes.
func taken(take func() (*batch.Batch, error)) <-chan result {
	ch := make(chan result, 1)
	go func() {
		b, err := take()
		ch <- result{b, err}
	}()
	return ch
}

type result struct {
	b   *batch.Batch
	err error
}

func (ch result) check(t *testing.T, b *batch.Batch, err error) {
	t.Helper()
	if ch.b != b || !errors.Is(ch.err, err) {
		t.Errorf("took %p, %v; want %p, %v", ch.b, ch.err, b, err)
	}
}

// TestTakeWaits: a take waits for what it needs, and for nothing else.
func TestTakeWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 10, 10, 10)
		r := ensure(t, newPlan(t, m), "join")
		gpu := m.space(tier.GPU)
		pending := func(what string, chs ...<-chan result) {
			t.Helper()
			synctest.Wait()
			for i, ch := range chs {
				if len(ch) != 0 {
					t.Fatalf("%s: taker %d did not wait: %v", what, i, <-ch)
				}
			}
		}
		take := func(s batch.State) <-chan result {
			ch := taken(func() (*batch.Batch, error) { return r.Take(background, 0, s) })
			synctest.Wait()
			return ch
		}

		first, second := take(batch.TaskCreated), take(batch.TaskCreated)
		pending("empty", first, second)
		a := newBatch(t, 1, gpu)
		check(t, r.PutBatch(1, a)) // another partition
		pending("put elsewhere", first, second)
		b := newBatch(t, 2, gpu)
		check(t, r.PutBatch(0, b))
		(<-first).check(t, b, nil) // first come, first served
		pending("one put for two", second)

		c := newBatch(t, 3, gpu)
		transit, err := c.TryTransit()
		check(t, err)
		check(t, r.PutBatch(0, c))
		third := take(batch.Idle)
		pending("in transit", second, third)
		check(t, transit.Abort())
		(<-second).check(t, c, nil)
		pending("taken by another", third)

		d := newBatch(t, 4, gpu)
		check(t, d.TryCreateTask())
		check(t, r.PutBatch(0, d))
		pending("not idle", third)
		h, err := d.TryLock(gpu.ID())
		check(t, err)
		pending("processing", third)
		check(t, h.Close())
		(<-third).check(t, d, nil)

		// A taker that cannot have what is there does not hold up one that can.
		check(t, d.TryCreateTask())
		check(t, r.PutBatch(0, d))
		fourth, fifth := take(batch.Idle), take(batch.TaskCreated)
		(<-fifth).check(t, d, nil)
		pending("nothing idle", fourth)

		r.CloseInput()
		(<-fourth).check(t, nil, io.EOF)
		(<-take(batch.Idle)).check(t, nil, io.EOF)
		if _, err := r.Take(background, 0, batch.Idle, NoWait()); !errors.Is(err, io.EOF) {
			t.Errorf("trying after the end: %v", err)
		}
		wantError(t, r.PutBatch(0, b), tier.ErrClosed)
		wantError(t, r.Put(background, 0, record(1)), tier.ErrClosed)
		if got, err := r.Take(background, 1, batch.Idle, NoWait()); got != a || err != nil { // what is in comes out
			t.Errorf("took %v, %v", got, err)
		}
		for _, b := range []*batch.Batch{a, b, c, d} {
			check(t, b.Drop())
		}
	})
}

// TestEndOfInputWaitsForWhatIsOnItsWay: while a batch is in transit, or in the
// hands of a drain that may fail, the partition has not ended.
func TestEndOfInputWaitsForWhatIsOnItsWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 1, 10, 10)
		r := ensure(t, newPlan(t, m), "join")
		check(t, r.Put(background, 0, record(1), WithPlacement(reservation.AnyInTier(tier.Host))))
		full, err := m.reservations.TryReserve(reservation.AnyInTier(tier.GPU), bodySize, nil)
		check(t, err)
		r.CloseInput()
		ctx, cancel := context.WithCancelCause(background)
		reason := errors.New("enough")
		drained := make(chan error, 1)
		go func() {
			for h, err := range r.Drain(ctx, 0, tier.GPU) {
				if err == nil {
					err = h.Close()
				}
				drained <- err
			}
		}()
		synctest.Wait() // it waits for the GPU
		if r.Len(0) != 1 {
			t.Error("a batch on its way out is not counted")
		}
		take := taken(func() (*batch.Batch, error) { return r.Take(background, 0, batch.Idle) })
		synctest.Wait()
		if len(take) != 0 {
			t.Fatalf("the take ended: %v", <-take)
		}
		cancel(reason)
		wantError(t, <-drained, reason)
		got := <-take
		if got.err != nil || m.numberOf(got.b) != 1 || got.b.Info().Pending != 0 {
			t.Errorf("%v, %+v", got.err, got.b.Info())
		}
		check(t, got.b.Drop())
		check(t, full.Release())
	})
}

// TestCancelledTakeLosesNothing: a taker that gives up leaves its batch to the next one that waits,
// also a batch that is handed over to it at that moment.
func TestCancelledTakeLosesNothing(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // so that the taker has not run when the put follows the cancel
	cause := errors.New("gave up")
	gaveUp := 0
	orders := [][2]string{{"cancel", "put"}, {"put", "cancel"}, {"cancel, and let it end", "put"}}
	for i := range 300 {
		synctest.Test(t, func(t *testing.T) {
			m := newMover(t, 10, 10, 10)
			r := ensure(t, newPlan(t, m), "join")
			ctx, cancel := context.WithCancelCause(background)
			defer cancel(nil)
			take := taken(func() (*batch.Batch, error) { return r.Take(ctx, 0, batch.TaskCreated) })
			synctest.Wait()
			next, end := context.WithCancel(background)
			defer end()
			second := taken(func() (*batch.Batch, error) { return r.Take(next, 0, batch.TaskCreated) })
			synctest.Wait()
			b := newBatch(t, 1, m.space(tier.GPU))
			for _, step := range orders[i%len(orders)] {
				switch step {
				case "put":
					check(t, r.PutBatch(0, b))
				case "cancel":
					cancel(cause)
				default:
					cancel(cause)
					synctest.Wait()
				}
			}
			got := <-take
			if got.err != nil {
				gaveUp++
				wantError(t, got.err, cause)
				synctest.Wait()
				if len(second) == 0 {
					t.Fatalf("round %d: the next taker does not get the batch", i)
				}
				got = <-second
				check(t, got.err)
			} else {
				end()
				wantError(t, (<-second).err, context.Canceled)
			}
			if got.b != b || r.Total() != 0 {
				t.Fatalf("round %d: took %p, want %p; %d are left", i, got.b, b, r.Total())
			}
			check(t, b.Drop())
		})
	}
	if gaveUp < 150 {
		t.Errorf("only %d takers gave up", gaveUp)
	}
}

func TestSchema(t *testing.T) {
	m := newMover(t, 10, 10, 10)
	plan := newPlan(t, m)
	first := ensure(t, plan, "first")
	check(t, first.Put(background, 0, record(1)))
	given, err := plan.Create(Key{"given", 0}, Options{Schema: schemaB})
	check(t, err)
	for r, want := range map[*Repository]*arrow.Schema{first: schemaA, given: schemaB} {
		rd, err := r.Reader(background, 0)
		check(t, err)
		if rd.Schema() != want {
			t.Errorf("repository %s has the schema %s", r.Key(), rd.Schema())
		}
		rd.Release()
	}
	err = given.Put(background, 0, record(1))
	var se *SchemaError
	if !errors.As(err, &se) || !errors.Is(err, ErrSchema) || se.Want != schemaB || se.Got != schemaA {
		t.Errorf("%v", err)
	}
	if !strings.Contains(err.Error(), "given:0") || !strings.Contains(err.Error(), "int32") {
		t.Errorf("the error says too little: %v", err)
	}
	b, err := first.Take(background, 0, batch.Idle)
	check(t, err)
	wantError(t, given.PutBatch(0, b), ErrSchema)
	check(t, first.PutBatch(0, b)) // still the caller's, still whole
	if given.Total() != 0 || first.Total() != 1 {
		t.Errorf("%d and %d batches", given.Total(), first.Total())
	}
}

// TestFirstSchemaWins: of two first puts with different schemas one fails, and
// leaves nothing.
func TestFirstSchemaWins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 10, 10, 10)
		r := ensure(t, newPlan(t, m), "join")
		both := make(chan struct{})
		m.setFault(func(string) error { <-both; return nil }) // both are past the first check
		errs := make(chan error, 2)
		go func() { errs <- r.Put(background, 0, record(1)) }()
		go func() { errs <- r.Put(background, 0, recordB(1)) }()
		synctest.Wait()
		close(both)
		a, b := <-errs, <-errs
		if a != nil {
			a, b = b, a
		}
		if a != nil || !errors.Is(b, ErrSchema) || r.Total() != 1 {
			t.Errorf("%v and %v, %d batches", a, b, r.Total())
		}
	})
}

func TestPutBatchRefuses(t *testing.T) {
	m := newMover(t, 10, 10, 10)
	plan := newPlan(t, m)
	r, other := ensure(t, plan, "join"), ensure(t, plan, "other")
	gpu := m.space(tier.GPU)
	b := newBatch(t, 1, gpu)
	check(t, r.PutBatch(0, b))
	wantError(t, r.PutBatch(0, b), batch.ErrStored)
	wantError(t, other.PutBatch(0, b), batch.ErrStored)
	same := newBatch(t, 1, gpu)
	wantError(t, r.PutBatch(1, same), ErrDuplicate)
	check(t, other.PutBatch(0, same)) // still whole and free
	dropped := newBatch(t, 2, gpu)
	check(t, dropped.Drop())
	wantError(t, r.PutBatch(0, dropped), batch.ErrState)
	got, err := r.Take(background, 0, batch.Idle)
	check(t, err)
	wantError(t, other.PutBatch(1, got), ErrDuplicate)
	check(t, r.PutBatch(1, got)) // its id is free again where it was taken
	if r.Total() != 1 || other.Total() != 1 {
		t.Errorf("%d and %d batches", r.Total(), other.Total())
	}
}

// TestBytesByTier: Bytes follows the batches wherever they are moved.
func TestBytesByTier(t *testing.T) {
	m := newMover(t, 3, 10, 10) // at three batches the GPU is at its trigger
	r := ensure(t, newPlan(t, m), "join")
	wantBytes := func(what string, gpu, host, disk int64) {
		t.Helper()
		if g, h, d := r.Bytes(tier.GPU), r.Bytes(tier.Host), r.Bytes(tier.Disk); g != gpu*bodySize || h != host*bodySize || d != disk*bodySize {
			t.Errorf("%s: %d, %d, %d bytes", what, g, h, d)
		}
	}
	for n := range int64(3) {
		check(t, r.Put(background, 0, record(n)))
	}
	wantBytes("by default the fastest below its trigger", 2, 1, 0)
	check(t, r.Put(background, 0, record(3), WithPlacement(reservation.AnyInTier(tier.Disk))))
	wantBytes("placed", 2, 1, 1)
	b, _ := r.Peek(0)
	check(t, m.move(background, b, reservation.AnyInTier(tier.Disk)))
	wantBytes("moved", 1, 1, 2)
	check(t, b.Drop())
	wantBytes("dropped in place", 1, 1, 1)
	if r.Total() != 3 || r.Len(0) != 3 {
		t.Errorf("%d batches, %d in partition 0", r.Total(), r.Len(0))
	}
	c, err := r.Take(background, 0, batch.Idle)
	check(t, err)
	wantBytes("taken", 0, 1, 1)
	check(t, c.Drop())
	if r.Bytes(0) != 0 || r.Bytes(99) != 0 {
		t.Error("bytes in no tier")
	}
}

// TestInPlace: an engine goes through a partition twice, and what it holds or
// drops there is respected.
func TestInPlace(t *testing.T) {
	m := newMover(t, 10, 10, 10)
	r := ensure(t, newPlan(t, m), "join")
	for n := range int64(4) {
		check(t, r.Put(background, 0, record(n)))
	}
	for range 2 {
		var seen []int64
		for b := range r.Batches(0) {
			h, err := m.Acquire(background, b, reservation.AnyInTier(tier.GPU))
			check(t, err)
			seen = append(seen, m.numberOf(b))
			check(t, h.Close())
		}
		if !slices.Equal(seen, []int64{0, 1, 2, 3}) {
			t.Errorf("saw %d", seen)
		}
	}
	for b := range r.Batches(0) {
		if m.numberOf(b)%2 == 0 {
			check(t, b.Drop())
		}
	}
	var left []int64
	for b := range r.Batches(0) {
		left = append(left, m.numberOf(b))
		if len(left) == 2 {
			break
		}
	}
	if !slices.Equal(left, []int64{1, 3}) || r.Len(0) != 2 {
		t.Errorf("left are %d, %d by count", left, r.Len(0))
	}
}

// TestFailedPutLeavesNothing: whatever fails on the way in.
func TestFailedPutLeavesNothing(t *testing.T) {
	m := newMover(t, 1, 1, 1)
	r := ensure(t, newPlan(t, m), "join")
	broken := errors.New("broken")
	m.setFault(func(string) error { return broken })
	wantError(t, r.Put(background, 0, record(1)), broken)
	m.setFault(nil)
	for n := range int64(3) {
		check(t, r.Put(background, 0, record(n)))
	}
	ctx, cancel := context.WithCancel(background)
	cancel()
	wantError(t, r.Put(ctx, 0, record(4)), context.Canceled)
	if r.Total() != 3 {
		t.Errorf("%d batches, want 3", r.Total())
	}
	none := ensure(t, newPlan(t, nil), "join")
	wantError(t, none.Put(background, 0, record(1)), tier.ErrNotSupported)
}

// TestCloseWakesPut: a put that waits for room ends when the repository closes.
func TestCloseWakesPut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 1, 1, 1)
		r := ensure(t, newPlan(t, m), "join")
		check(t, r.Put(background, 0, record(1), WithPlacement(reservation.AnyInTier(tier.GPU))))
		put := make(chan error, 1)
		go func() { put <- r.Put(background, 0, record(2), WithPlacement(reservation.AnyInTier(tier.GPU))) }()
		synctest.Wait()
		if len(put) != 0 {
			t.Fatal("the put does not wait")
		}
		b, _ := r.Peek(0)
		transit, err := b.TryTransit()
		check(t, err)
		closed := make(chan error, 1)
		go func() { closed <- r.Close(background) }()
		wantError(t, <-put, tier.ErrClosed)
		synctest.Wait()
		if len(closed) != 0 {
			t.Fatal("Close does not wait for the transit")
		}
		check(t, transit.Abort())
		check(t, <-closed)
		wantError(t, r.Close(background), tier.ErrClosed)
		if b.Info().State != batch.Released || r.Total() != 0 {
			t.Errorf("the batch is %s, %d are left", b.Info().State, r.Total())
		}
	})
}

// TestCloseCanBeTriedAgain: a Close that its context ends has woken all waiters and lost nothing.
func TestCloseCanBeTriedAgain(t *testing.T) {
	m := newMover(t, 2, 2, 2)
	plan := newPlan(t, m)
	r := ensure(t, plan, "join")
	check(t, r.Put(background, 0, record(1)))
	check(t, r.Put(background, 0, record(2)))
	b, _ := r.Peek(0)
	transit, err := b.TryTransit()
	check(t, err)
	ctx, cancel := context.WithCancel(background)
	cancel()
	wantError(t, closeAll(ctx, plan), context.Canceled)
	_, err = r.Take(background, 0, batch.Idle)
	wantError(t, err, tier.ErrClosed)
	_, err = plan.Ensure(Key{Operator: "late"})
	wantError(t, err, tier.ErrClosed)
	check(t, transit.Abort())
	check(t, closeAll(background, plan))
	wantError(t, closeAll(background, plan), tier.ErrClosed)
}

// TestDropWithHandleOpen: closing does not wait for readers, and their data stays
// until they are done.
func TestDropWithHandleOpen(t *testing.T) {
	m := newMover(t, 2, 2, 2)
	plan := newPlan(t, m)
	r := ensure(t, plan, "join")
	check(t, r.Put(background, 0, record(1)))
	b, _ := r.Peek(0)
	h, err := m.Acquire(background, b, reservation.AnyInTier(tier.GPU))
	check(t, err)
	check(t, closeAll(background, plan))
	if m.space(tier.GPU).State().Used() != bodySize {
		t.Error("the data went under its reader")
	}
	check(t, h.Close())
}
