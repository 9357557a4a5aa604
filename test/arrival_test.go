package test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow/array"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// slowSpill is an engine that moves what was used longest ago first, which is what a
// consumer wants next, to a disk on which writes can be held up.
type slowSpill struct {
	t    *testing.T
	eng  *spillway.Engine
	repo *repository.Repository
	host *tier.Space

	files   *faultfs.FS
	hit     chan struct{} // receives when a write is held up
	release func()
}

func openSlowSpill(t *testing.T, marks tier.Marks) *slowSpill {
	t.Helper()
	s := &slowSpill{t: t, files: faultfs.New(disk.OS(), 1)}
	eng, err := spillway.Open(t.Context(), spillway.Config{
		GPUs:          []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(1 << 20)}},
		HostMemory:    spillway.Bytes(2 << 20),
		HostMarks:     marks,
		Disks:         []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(64 << 20), FS: s.files}},
		Policy:        monitor.LRU(),
		Codec:         convert.CodecNone,
		WriteAhead:    -1, // what the monitor does is to be seen
		MonitorPeriod: time.Millisecond,
		Logger:        slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	s.eng, s.host = eng, eng.Reservations().Spaces().InTier(tier.Host)[0]
	plan, err := eng.Plan("merge")
	if err != nil {
		t.Fatal(err)
	}
	if s.repo, err = plan.Repository("merge", 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.release(); closeClean(t, eng) })
	s.hold()
	return s
}

// hold holds up all writes until release is called.
func (s *slowSpill) hold() {
	s.hit = make(chan struct{}, 1)
	gate := make(chan struct{})
	remove := s.files.Add(faultfs.Rule{Ops: []string{"write"}, Effect: faultfs.Do(func(string, string) {
		select {
		case s.hit <- struct{}{}:
		default:
		}
		<-gate
	})})
	s.release = sync.OnceFunc(func() { remove(); close(gate) })
}

const slowRows = 2000

func (s *slowSpill) put(n int) {
	s.t.Helper()
	rec := numberedRecord(int64(n), slowRows, wordList(uint64(n%3), 300))
	if err := s.repo.Put(s.t.Context(), 0, rec, repository.WithPlacement(reservation.AnyInTier(tier.Host))); err != nil {
		s.t.Fatal(err)
	}
}

// spillHead puts batches until the monitor moves the first of them, and returns how many
// there are. The move is held up.
func (s *slowSpill) spillHead() int {
	s.t.Helper()
	n := 0
	for ; s.host.State().Pressure < s.host.State().Trigger; n++ {
		s.put(n)
	}
	head, _ := s.repo.Peek(0)
	s.untilMoving(head)
	<-s.hit
	return n
}

// untilMoving returns when b is in transit.
func (s *slowSpill) untilMoving(b *batch.Batch) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	for {
		changed := b.Changed()
		if b.Info().State == batch.InTransit {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			s.t.Fatalf("batch %d is %s", b.ID(), b.Info().State)
		}
	}
}

// inOrder are the ways to consume a repository in the order of arrival.
var inOrder = map[string]func(ctx context.Context, s *slowSpill, got func(int)) error{
	"reader": func(ctx context.Context, s *slowSpill, got func(int)) error {
		rd, err := s.repo.Reader(ctx, 0)
		if err != nil {
			return err
		}
		defer rd.Release()
		for rd.Next() {
			got(int(rd.RecordBatch().Column(0).(*array.Int64).Value(0)))
		}
		return rd.Err()
	},
	"drain": func(ctx context.Context, s *slowSpill, got func(int)) error {
		for h, err := range s.repo.Drain(ctx, 0, tier.GPU, repository.WaitInput()) {
			if err != nil {
				return err
			}
			n, err := numberOf(ctx, s.eng, h, slowRows)
			got(n)
			if err := errors.Join(err, h.Close()); err != nil {
				return err
			}
		}
		return nil
	},
	"take": func(ctx context.Context, s *slowSpill, got func(int)) error {
		for {
			b, err := s.repo.Take(ctx, 0, batch.TaskCreated)
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return err
			}
			h, err := s.eng.Mover().Acquire(ctx, b, reservation.AnyInTier(tier.Host))
			if err != nil {
				return err
			}
			n, err := numberOf(ctx, s.eng, h, slowRows)
			got(n)
			if err := errors.Join(err, h.Close(), b.Discard(ctx)); err != nil {
				return err
			}
		}
	},
	"tasks": func(ctx context.Context, s *slowSpill, got func(int)) error {
		for {
			c, err := s.repo.Claim(ctx, 0, 3)
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return err
			}
			err = s.eng.RunTask(ctx, spillway.Task{Operator: "merge", Inputs: []*repository.Claim{c}},
				func(ctx context.Context, _ *spillway.Grant, handles []*spillway.Handle) error {
					for _, h := range handles {
						n, err := numberOf(ctx, s.eng, h, slowRows)
						if err != nil {
							return err
						}
						got(n)
					}
					return nil
				})
			if err != nil {
				return err
			}
		}
	},
}

// TestRowsComeInOrder: while the monitor moves out what comes next, and more is put, a
// consumer gets everything in the order in which it was put.
func TestRowsComeInOrder(t *testing.T) {
	t.Parallel()
	for name, consume := range inOrder {
		t.Run(name, func(t *testing.T) {
			s := openSlowSpill(t, tier.Marks{})
			n := s.spillHead()
			gone, cancel := context.WithCancel(t.Context())
			cancel()
			var got []int
			add := func(n int) { got = append(got, n) }
			if err := consume(gone, s, add); !errors.Is(err, context.Canceled) || len(got) > 0 {
				t.Fatalf("while the first is moved: %d, %v", got, err)
			}
			done := make(chan error, 1)
			go func() { done <- consume(t.Context(), s, add) }()
			s.files.Add(faultfs.Rule{Ops: []string{"write"}, Effect: faultfs.Slow(time.Millisecond)})
			s.release()
			for range testseed.Rounds(40, 12) {
				s.put(n)
				n++
			}
			s.repo.CloseInput()
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			if !slices.IsSorted(got) || len(got) != n {
				t.Errorf("%d of %d batches came, as %d", len(got), n, got)
			}
		})
	}
}

// TestHeadIsSpilledForItsWaiter: one drain waits for room, the monitor moves the next
// batch out to make it, and another drain waits for that batch. Both get theirs.
func TestHeadIsSpilledForItsWaiter(t *testing.T) {
	s := openSlowSpill(t, tier.Marks{Limit: 1, Trigger: 1, Stop: 0.9}) // only on demand
	s.release()
	s.put(0)
	first, _ := s.repo.Peek(0)
	if err := s.eng.Mover().Move(t.Context(), first, reservation.AnyInTier(tier.Disk)); err != nil {
		t.Fatal(err)
	}
	s.hold()
	s.put(1)
	full, err := s.eng.Reservations().TryReserve(reservation.AnyInTier(tier.Host), s.host.State().Available-4096, nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	type result struct {
		n   int
		err error
	}
	results := make(chan result, 2)
	drainOne := func() {
		for h, err := range s.repo.Drain(ctx, 0, tier.Host) {
			if err != nil {
				results <- result{-1, err}
				return
			}
			n, err := numberOf(ctx, s.eng, h, slowRows)
			results <- result{n, errors.Join(err, h.Close())}
			return
		}
		results <- result{-1, io.EOF}
	}
	go drainOne()
	s.untilMoving(slices.Collect(s.repo.Batches(0))[1]) // for the first drain's room
	go drainOne()
	s.release()
	a, b := <-results, <-results
	if err := errors.Join(a.err, b.err); err != nil || a.n+b.n != 1 {
		t.Errorf("%d and %d came: %v", a.n, b.n, err)
	}
	if err := full.Release(); err != nil {
		t.Error(err)
	}
}

// TestClaimOfEverything: right after the input is closed, while the monitor still moves
// batches, one claim has all of them; another says that there are no more.
func TestClaimOfEverything(t *testing.T) {
	s := openSlowSpill(t, tier.Marks{})
	n := s.spillHead()
	s.repo.CloseInput()
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if c, err := s.repo.ClaimAll(gone, 0); !errors.Is(err, context.Canceled) {
		t.Fatalf("while the first is moved: %v, %v", c, err)
	}
	s.release()
	c, err := s.repo.ClaimAll(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	if len(c.Batches()) != n {
		t.Errorf("%d of %d batches are claimed", len(c.Batches()), n)
	}
	if _, err := s.repo.Claim(t.Context(), 0, n); !errors.Is(err, repository.ErrClaimed) {
		t.Errorf("a second claim: %v", err)
	}
	if err := c.Consume(); err != nil {
		t.Error(err)
	}
}
