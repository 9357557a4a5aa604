package repository

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// held is a batch of the reference with what is open on it.
type held struct {
	b       *batch.Batch
	handles []*batch.Handle
	transit *batch.Transit
}

// oldest is the reference for what a take finds: it looks at every batch.
func oldest(queue []*held, opts []TakeOption, states ...batch.State) int {
	at := slices.IndexFunc(queue, func(h *held) bool { return slices.Contains(states, h.b.Info().State) })
	moving := slices.IndexFunc(queue, func(h *held) bool { return h.b.Info().State == batch.InTransit })
	if len(opts) == 0 && moving >= 0 && moving < at {
		return -1
	}
	return at
}

// TestModel does random operations on a repository and its batches, and compares
// what comes out with a reference that keeps plain queues.
func TestModel(t *testing.T) {
	const partitions, rounds, operations = 3, 20, 16 * 30
	seed := testseed.One(t)
	for round := range uint64(rounds) {
		rnd := rand.New(rand.NewPCG(seed, round))
		fail := func(format string, args ...any) {
			t.Helper()
			t.Fatalf("round %d: %s", round, fmt.Sprintf(format, args...))
		}
		m := newMover(t, 10, 10, 10)
		spaces := []*tier.Space{m.space(tier.GPU), m.space(tier.Host), m.space(tier.Disk)}
		r := ensure(t, newPlan(t, m), "join")
		var queues [partitions][]*held
		var outside []*held // taken
		var all []*held     // ever
		ids := batch.ID(0)
		some := func() *held {
			if q := queues[rnd.IntN(partitions)]; len(q) > 0 && rnd.IntN(8) > 0 {
				return q[rnd.IntN(len(q))]
			}
			if len(outside) > 0 {
				return outside[rnd.IntN(len(outside))]
			}
			return nil
		}
		for op := range operations {
			p := rnd.IntN(partitions)
			q := &queues[p]
			var opts []TakeOption
			if rnd.IntN(2) == 0 {
				opts = append(opts, Unordered())
			}
			take := func(at int, got *batch.Batch, err error) {
				t.Helper()
				if err != nil {
					fail("take: %v", err)
				}
				want := (*batch.Batch)(nil)
				if at >= 0 {
					want = (*q)[at].b
					outside = append(outside, (*q)[at])
					*q = slices.Delete(*q, at, at+1)
				}
				if got != want {
					fail("took %v, want number %d", got, at)
				}
			}
			switch rnd.IntN(13) {
			case 0, 1:
				ids++
				h := &held{b: newBatch(t, ids, spaces[rnd.IntN(3)])}
				check(t, r.PutBatch(p, h.b))
				*q = append(*q, h)
				all = append(all, h)
			case 2: // back, at the end
				if n := len(outside); n > 0 {
					i := rnd.IntN(n)
					h := outside[i]
					if err := r.PutBatch(p, h.b); err == nil {
						*q = append(*q, h)
					} else if h.b.Info().State != batch.Released {
						fail("put back: %v", err)
					}
					outside = slices.Delete(outside, i, i+1)
				}
			case 3:
				at := oldest(*q, opts, batch.Idle)
				got, err := r.Take(background, p, batch.Idle, append(opts, NoWait())...)
				take(at, got, err)
			case 4:
				at := oldest(*q, opts, batch.Idle, batch.TaskCreated, batch.Processing)
				got, err := r.Take(background, p, batch.TaskCreated, append(opts, NoWait())...)
				take(at, got, err)
			case 5:
				at := oldest(*q, opts, batch.Idle, batch.TaskCreated)
				var transit *batch.Transit
				got, err := r.Take(background, p, batch.InTransit, append(opts, Into(&transit), NoWait())...)
				if transit != nil {
					(*q)[at].transit = transit
				}
				take(at, got, err)
			case 6:
				if len(*q) > 0 {
					at := rnd.IntN(len(*q))
					if (*q)[at].b.Info().State == batch.Idle {
						got, err := r.TakeByID(background, (*q)[at].b.ID(), batch.Idle)
						take(at, got, err)
					}
				}
			case 7:
				if h := some(); h != nil {
					_ = h.b.TryCreateTask() // whether it works is the batch's own test
				}
			case 8:
				if h := some(); h != nil {
					_ = h.b.CancelTask()
				}
			case 9:
				if h := some(); h != nil {
					if handle, err := h.b.TryLock(h.b.Info().Space); err == nil {
						h.handles = append(h.handles, handle)
					}
				}
			case 10:
				if h := some(); h != nil && len(h.handles) > 0 {
					check(t, h.handles[0].Close())
					h.handles = h.handles[1:]
				}
			case 11:
				if h := some(); h != nil && h.transit == nil {
					h.transit, _ = h.b.TryTransit()
				} else if h != nil {
					check(t, h.transit.Commit(form{spaces[rnd.IntN(3)]}, rnd.IntN(3) == 0))
					h.transit = nil
				}
			case 12:
				if h := some(); h != nil && rnd.IntN(3) == 0 && h.b.Drop() == nil {
					for i := range queues {
						queues[i] = slices.DeleteFunc(queues[i], func(other *held) bool { return other == h })
					}
				}
			}
			if op%16 != 15 { // looking at everything takes longer than everything else
				continue
			}
			total := 0
			bytes := map[tier.Kind]int64{}
			for i, q := range queues {
				var want []*batch.Batch
				for _, h := range q {
					want = append(want, h.b)
					bytes[h.b.Info().Space.Kind] += h.b.Info().Bytes
				}
				if got := slices.Collect(r.Batches(i)); !slices.Equal(got, want) || r.Len(i) != len(want) {
					fail("partition %d holds %v, want %v; Len is %d", i, got, want, r.Len(i))
				}
				if first, ok := r.Peek(i); ok != (len(want) > 0) || ok && first != want[0] {
					fail("partition %d shows %v", i, first)
				}
				total += len(want)
			}
			if r.Total() != total {
				fail("%d batches, want %d", r.Total(), total)
			}
			for _, k := range tier.Kinds() {
				if r.Bytes(k) != bytes[k] {
					fail("%d bytes in %s, want %d", r.Bytes(k), k, bytes[k])
				}
			}
		}
		for _, h := range all {
			for _, handle := range h.handles {
				check(t, handle.Close())
			}
			if h.transit != nil {
				check(t, h.transit.Abort())
			}
		}
	}
}

// TestNothingLostNothingTwice: many put and many take, in every way there is,
// while batches are moved and worked on in place. What was put comes out once.
func TestNothingLostNothingTwice(t *testing.T) {
	const putters, takers, each, partitions = 4, 6, 150, 2
	seed := testseed.One(t)
	m := newMover(t, 40, 60, putters*each)
	plan := newPlan(t, m)
	r := ensure(t, plan, "join")
	var (
		mu    sync.Mutex
		times = make(map[int64]int)
		put   sync.WaitGroup
		take  sync.WaitGroup
		other sync.WaitGroup
		done  atomic.Bool
	)
	got := func(n int64) {
		mu.Lock()
		defer mu.Unlock()
		times[n]++
	}
	for i := range int64(putters) {
		put.Go(func() {
			for j := range int64(each) {
				n := i*each + j
				if err := r.Put(background, int(n%partitions), record(n)); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for i := range takers {
		take.Go(func() {
			for err := error(nil); err == nil; {
				err = takeOne(m, r, i, i%partitions, got)
				if err != nil && !errors.Is(err, errEnd) {
					t.Error(err)
				}
			}
		})
	}
	for i := range 2 { // the monitor, and an engine that works in place
		other.Go(func() {
			rnd := rand.New(rand.NewPCG(seed, uint64(i)))
			for !done.Load() {
				for b := range r.Batches(rnd.IntN(partitions)) {
					if rnd.IntN(2) == 0 {
						if h, err := m.Acquire(background, b, reservation.AnyInTiers(tier.GPU, tier.Host, tier.Disk)); err == nil {
							if err := h.Close(); err != nil {
								t.Error(err)
							}
						} else if !errors.Is(err, batch.ErrState) {
							t.Error(err)
						}
						continue
					}
					err := m.move(background, b, reservation.AnyInTier(tier.Kinds()[1+rnd.IntN(2)]))
					if err != nil && !errors.Is(err, batch.ErrState) {
						t.Error(err)
					}
				}
			}
		})
	}
	put.Wait()
	r.CloseInput()
	take.Wait()
	done.Store(true)
	other.Wait()
	for n := range int64(putters * each) {
		if times[n] != 1 {
			t.Errorf("number %d came %d times", n, times[n])
		}
	}
	if r.Total() != 0 || r.Bytes(tier.GPU)+r.Bytes(tier.Host)+r.Bytes(tier.Disk) != 0 {
		t.Errorf("%d batches are left, %d, %d, %d bytes", r.Total(), r.Bytes(tier.GPU), r.Bytes(tier.Host), r.Bytes(tier.Disk))
	}
}

var errEnd = errors.New("the input has ended")

// takeOne takes in the i-th way.
func takeOne(m *fakeMover, r *Repository, i, partition int, got func(int64)) error {
	end := func(err error) error {
		if errors.Is(err, tier.ErrClosed) || errors.Is(err, io.EOF) {
			return errEnd
		}
		return err
	}
	switch i {
	case 0, 1:
		b, err := r.Take(background, partition, batch.TaskCreated)
		if err != nil {
			return end(err)
		}
		got(m.numberOf(b))
		return b.Discard(background)
	case 2:
		var t *batch.Transit
		b, err := r.Take(background, partition, batch.InTransit, Into(&t))
		if err != nil {
			return end(err)
		}
		got(m.numberOf(b))
		return errors.Join(t.Abort(), b.Discard(background))
	case 3:
		b, err := r.Take(background, partition, batch.Idle)
		if err != nil {
			return end(err)
		}
		got(m.numberOf(b))
		return b.Discard(background)
	case 4:
		for h, err := range r.Drain(background, partition, tier.Host, WaitInput()) {
			if err != nil {
				return end(err)
			}
			got(m.numberOf(h.Batch()))
			if err := h.Close(); err != nil {
				return err
			}
		}
		return errEnd
	}
	rd, err := r.Reader(background, partition)
	if err != nil {
		return err
	}
	defer rd.Release()
	for rd.Next() {
		got(number(rd.RecordBatch()))
	}
	return errors.Join(errEnd, rd.Err())
}

// TestCloseRacesEverything: whatever is under way, closing ends it, and no byte
// is left.
func TestCloseRacesEverything(t *testing.T) {
	for round := range 30 {
		m := newMover(t, 3, 3, 40)
		plan := NewManager("test", 1, Config{Mover: m})
		r := ensure(t, plan, "join")
		var all sync.WaitGroup
		started := make(chan struct{}, 100)
		for i := range int64(3) {
			all.Go(func() {
				for n := i; ; n++ {
					if err := r.Put(background, 0, record(n)); err != nil {
						if !errors.Is(err, tier.ErrClosed) {
							t.Error(err)
						}
						return
					}
					select {
					case started <- struct{}{}:
					default:
					}
				}
			})
		}
		for i := range 5 {
			all.Go(func() {
				for err := error(nil); err == nil; {
					if err = takeOne(m, r, i, 0, func(int64) {}); err != nil && !errors.Is(err, errEnd) {
						t.Error(err)
					}
				}
			})
		}
		for range round {
			<-started
		}
		check(t, closeAll(background, plan))
		all.Wait()
		if r.Total() != 0 {
			t.Errorf("%d batches are left", r.Total())
		}
	}
}

// BenchmarkTake puts and takes with more and more batches in the way.
func BenchmarkTake(b *testing.B) {
	for _, behind := range []int{1_000, 100_000, 1_000_000} {
		for _, moving := range []bool{false, true} {
			name := fmt.Sprintf("behind=%d", behind)
			var opts []TakeOption
			if moving {
				name += ",older in transit"
				opts = append(opts, Unordered())
			}
			b.Run(name, func(b *testing.B) {
				m := newMover(b, 10, 10, 10)
				r := ensure(b, newPlan(b, nil), "join")
				var transits []*batch.Transit
				for i := range behind {
					held := newBatch(b, batch.ID(i+1), m.space(tier.GPU))
					check(b, r.PutBatch(0, held))
					if moving && i < behind/2 {
						transit, err := held.TryTransit()
						check(b, err)
						transits = append(transits, transit)
					}
				}
				b.ReportAllocs()
				for b.Loop() {
					got, err := r.Take(background, 0, batch.Idle, opts...)
					if err != nil {
						b.Fatal(err)
					}
					if err := r.PutBatch(0, got); err != nil {
						b.Fatal(err)
					}
				}
				for _, transit := range transits {
					check(b, transit.Abort())
				}
			})
		}
	}
}

func BenchmarkLen(b *testing.B) {
	for _, n := range []int{1_000, 1_000_000} {
		b.Run(fmt.Sprintf("of=%d", n), func(b *testing.B) {
			m := newMover(b, 10, 10, 10)
			r := ensure(b, newPlan(b, nil), "join")
			for i := range n {
				check(b, r.PutBatch(0, newBatch(b, batch.ID(i+1), m.space(tier.GPU))))
			}
			for b.Loop() {
				if r.Len(0) != n {
					b.Fatal("another number")
				}
			}
		})
	}
}
