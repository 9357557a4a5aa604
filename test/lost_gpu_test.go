package test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/faultdev"
	"github.com/spillway-db/spillway/tier/tiertest"
)

var (
	errFellOff = errors.New("the GPU has fallen off the bus")
	lostGPU    = tier.ID{Kind: tier.GPU}
	otherGPU   = tier.ID{Kind: tier.GPU, Ordinal: 1}
	onAnyGPU   = reservation.AnyInTier(tier.GPU)
)

// losable is an engine over simulated GPUs that can be lost.
type losable struct {
	begun atomic.Pointer[chan struct{}] // gets one for each wait for room that begins
	t     *testing.T
	eng   *spillway.Engine
	repo  *repository.Repository
	gpus  []*faultdev.Device
	told  chan spillway.Event
	log   *syncBuffer
}

// syncBuffer is a log that may be read while it is written.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// count returns how many warnings the log has that say something.
func (s *syncBuffer) count(what string) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for line := range strings.Lines(s.b.String()) {
		if strings.Contains(line, "level=WARN") && strings.Contains(line, what) {
			n++
		}
	}
	return n
}

func openLosable(t *testing.T, gpus int, memory int64, rules ...faultdev.Rule) *losable {
	t.Helper()
	tiertest.NoLeaks(t)
	l := &losable{t: t, told: make(chan spillway.Event, 8), log: new(syncBuffer)}
	cfg := spillway.Config{
		HostMemory: spillway.Bytes(2 << 20), Disks: []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(64 << 20)}}, MonitorPeriod: time.Millisecond,
		Logger: slog.New(slog.NewTextHandler(l.log, nil)),
		Events: func(e spillway.Event) {
			switch begun := l.begun.Load(); {
			case e.Kind == events.Lost:
				l.told <- e
			case e.Kind == events.WaitBegun && begun != nil:
				*begun <- struct{}{}
			}
		},
	}
	for range gpus {
		cfg.GPUs = append(cfg.GPUs, spillway.GPUConfig{Backend: spillway.Sim, Memory: spillway.Bytes(memory), Wrap: func(dev tier.Device) (tier.Device, error) {
			gpu := faultdev.New(dev, 1)
			l.gpus = append(l.gpus, gpu)
			return gpu, nil
		}})
	}
	var err error
	if l.eng, err = spillway.Open(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	for _, r := range rules {
		l.gpus[0].Add(r)
	}
	plan, err := l.eng.Plan("plan")
	if err == nil {
		l.repo, err = plan.Repository("scan", 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// put puts a record and returns its batch; a partition has one.
func (l *losable) put(partition int, rec arrow.RecordBatch, opts ...repository.PutOption) *batch.Batch {
	l.t.Helper()
	if err := l.repo.Put(l.t.Context(), partition, rec, opts...); err != nil {
		l.t.Fatal(err)
	}
	b, _ := l.repo.Peek(partition)
	return b
}

func in(kinds ...tier.Kind) repository.PutOption {
	return repository.WithPlacement(reservation.AnyInTiers(kinds...))
}

// isLost checks that an error is that of a GPU that is lost, and of nothing else.
func isLost(t *testing.T, what string, err error) {
	t.Helper()
	var lost *tier.LostError
	if !errors.As(err, &lost) || lost.Space != lostGPU || !errors.Is(err, tier.ErrLost) || !errors.Is(err, errFellOff) {
		t.Errorf("%s: %v, want that %s is lost", what, err, lostGPU)
	}
	if errors.Is(err, tier.ErrNoSpace) || errors.Is(err, reservation.ErrExceeded) {
		t.Errorf("%s: %v, which is also one about room", what, err)
	}
}

// same checks that a batch has the bytes of a record.
func (l *losable) same(b *batch.Batch, want arrow.RecordBatch) {
	l.t.Helper()
	got, err := openedFrom(l.t, l.eng, b)
	if err == nil {
		err = convert.Equal(want, got)
		got.Release()
	}
	if err != nil {
		l.t.Errorf("batch %d in %s: %v", b.ID(), b.Info().Space, err)
	}
}

// end drops what is left and closes the engine, whose books are at zero before and after.
func (l *losable) end(partitions int) {
	l.t.Helper()
	for i := range partitions {
		for l.repo.Len(i) > 0 {
			b, err := l.repo.Take(l.t.Context(), i, batch.Idle) // the monitor may be moving it
			if err == nil {
				err = b.Discard(l.t.Context())
			}
			if err != nil {
				l.t.Fatalf("dropping a batch of partition %d: %v", i, err)
			}
		}
	}
	for _, s := range l.eng.Stats().Spaces {
		if s.Used() != 0 && s.ID.Kind == tier.GPU {
			l.t.Errorf("with all batches dropped %s has %+v", s.ID, s.Usage)
		}
	}
	if err := l.eng.Close(); err != nil {
		l.t.Errorf("closing: %v", err)
	}
	for _, s := range l.eng.Stats().Spaces {
		if s.Used() != 0 {
			l.t.Errorf("%s ends with %+v", s.ID, s.Usage)
		}
	}
}

// TestLostGPUIsPassedBy: what may go elsewhere does; what may not fails at once. What is elsewhere
// is as it was, and there is one warning.
func TestLostGPUIsPassedBy(t *testing.T) {
	l := openLosable(t, 1, 1<<20)
	words := wordList(1, 1500)
	var records []arrow.RecordBatch
	var batches []*batch.Batch
	for i, k := range []tier.Kind{tier.GPU, tier.Host, tier.Disk} {
		records = append(records, numberedRecord(int64(i), 1000, words))
		batches = append(batches, l.put(i, records[i], in(k)))
	}
	if all := l.eng.Warnings(); warningsOf(all, causes.GPULost) != 0 {
		t.Errorf("before there is a warning: %v", all)
	}
	l.gpus[0].Lose(errFellOff)

	ctx, mover := t.Context(), l.eng.Mover()
	records = append(records, numberedRecord(3, 1000, words))
	batches = append(batches, l.put(3, records[3]))
	if at := batches[3].Info().Space; at.Kind != tier.Host {
		t.Errorf("what is put after the loss lies in %s", at)
	}
	isLost(t, "putting it there", l.repo.Put(ctx, 4, records[3], in(tier.GPU)))
	for _, n := range []int64{0, 1, 1 << 30} {
		_, err := l.eng.Reserve(ctx, reservation.Specific(lostGPU), n)
		isLost(t, fmt.Sprintf("reserving %d bytes", n), err)
	}
	isLost(t, "moving from there", mover.Move(ctx, batches[0], reservation.AnyInTier(tier.Host)))
	isLost(t, "moving there", mover.Move(ctx, batches[1], onAnyGPU))
	for _, k := range []tier.Kind{tier.GPU, tier.Host, tier.Disk} {
		_, err := mover.Acquire(ctx, batches[0], reservation.AnyInTier(k))
		isLost(t, fmt.Sprintf("opening in %s what was there", k), err)
	}
	_, err := mover.Clone(ctx, batches[0], nil)
	isLost(t, "cloning it", err)
	_, err = l.eng.Admit(ctx, spillway.Estimate{Operator: "task", Output: 100})
	isLost(t, "admitting a task", err)
	for i := range 4 {
		for _, err := range l.repo.Drain(ctx, i, tier.GPU) {
			isLost(t, fmt.Sprintf("draining partition %d to it", i), err)
		}
	}
	for i := 1; i < 4; i++ {
		l.same(batches[i], records[i])
	}

	if lost := <-l.told; lost.To != lostGPU || !errors.Is(lost.Err, errFellOff) {
		t.Errorf("the monitor tells of %+v", lost)
	}
	if n := l.log.count("lost"); n != 1 {
		t.Errorf("when it is told, the log has %d lines of it", n)
	}
	all := l.eng.Warnings()
	if n := warningsOf(all, causes.GPULost); n != 1 {
		t.Errorf("there are %d warnings of it: %v", n, all)
	}
	for _, w := range all {
		if w.Cause == causes.GPULost && (w.Space != lostGPU.String() || w.Info || w.Remedy == "" || !strings.Contains(w.What, errFellOff.Error())) {
			t.Errorf("the warning is %+v", w)
		}
	}
	for _, s := range l.eng.Stats().Spaces {
		if s.Lost != (s.ID == lostGPU) {
			t.Errorf("the stats of %s say lost: %v", s.ID, s.Lost)
		}
	}
	l.end(5)
	if n := l.log.count("lost"); n != 1 {
		t.Errorf("the log has %d lines of it: %s", n, l.log.b.String())
	}
	if len(l.told) > 0 {
		t.Errorf("the monitor has told again: %+v", <-l.told)
	}
}

// TestReaderOfALostBatch: a Reader that finds one fails with it, and leaves it and all after it
// where they are.
func TestReaderOfALostBatch(t *testing.T) {
	l := openLosable(t, 1, 1<<20)
	for _, k := range []tier.Kind{tier.GPU, tier.Host} {
		l.put(0, numberedRecord(0, 1000, wordList(1, 1500)), in(k))
	}
	l.gpus[0].Lose(errFellOff)
	rd, err := l.repo.Reader(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	if rd.Next() {
		t.Error("it returns a record")
	}
	isLost(t, "reading it", rd.Err())
	rd.Release()
	if n := l.repo.Len(0); n != 2 {
		t.Errorf("%d batches are left", n)
	}
	l.end(1)
}

func warningsOf(all []diag.Warning, c diag.Cause) (n int) {
	for _, w := range all {
		if w.Cause == c {
			n++
		}
	}
	return n
}

// TestWaitersOfALostGPU: a waiter for room there when it is lost gets the error, or goes on waiting
// for its other spaces.
func TestWaitersOfALostGPU(t *testing.T) {
	l := openLosable(t, 1, 1<<20)
	ctx, cancel := context.WithTimeoutCause(t.Context(), time.Minute, errors.New("it takes for ever"))
	defer cancel()
	waits := make(chan struct{}, 16)
	l.begun.Store(&waits)
	take := func(k tier.Kind, part int64) *reservation.Reservation {
		s := l.eng.Reservations().Spaces().InTier(k)[0]
		r, err := l.eng.Reserve(ctx, reservation.Specific(s.ID()), s.State().Available/part/tier.Page*tier.Page)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	record := numberedRecord(1, 1000, wordList(1, 10))
	dead := l.put(2, record, in(tier.GPU))
	letGo := dead.Subscribe() // it is not to be moved out of the way
	gpu, rest, host := take(tier.GPU, 2), take(tier.GPU, 1), take(tier.Host, 1)
	told := make(chan error, 6)
	waiting := func() {
		t.Helper()
		select {
		case <-waits:
		case err := <-told:
			t.Fatalf("somebody does not wait: %v", err)
		}
	}
	for _, wait := range []func() error{
		func() error { _, err := l.eng.Reserve(ctx, onAnyGPU, 100<<10); return err },
		func() error { _, err := l.eng.Reserve(ctx, reservation.Specific(lostGPU), 100<<10); return err },
		func() error {
			_, err := l.eng.Reservations().ReserveUpTo(ctx, onAnyGPU, 100<<10, 200<<10, nil)
			return err
		},
		func() error { return gpu.Grow(ctx, 40<<10) },
		func() error { return l.repo.Put(ctx, 0, record, in(tier.GPU)) },
		func() error {
			_, err := l.eng.Admit(ctx, spillway.Estimate{Operator: "task", Output: 300 << 10})
			return err
		},
	} {
		go func() { told <- wait() }()
		waiting()
	}
	type served struct {
		r   *reservation.Reservation
		err error
	}
	passed, landed := make(chan served), make(chan error)
	go func() {
		r, err := l.eng.Reserve(ctx, reservation.AnyInTiers(tier.GPU, tier.Host), 100<<10)
		passed <- served{r, err}
	}()
	waiting()
	go func() { landed <- l.repo.Put(ctx, 1, record, in(tier.GPU, tier.Host)) }()
	waiting()

	l.gpus[0].Lose(errFellOff)
	for range 6 {
		isLost(t, "a waiter", <-told)
	}
	letGo()
	isLost(t, "moving what was there to where there is no room", l.eng.Mover().Move(ctx, dead, reservation.AnyInTier(tier.Host)))
	if err := host.Release(); err != nil {
		t.Error(err)
	}
	if s := <-passed; s.err != nil || s.r.Space().Kind() != tier.Host {
		t.Errorf("who may have host memory: %v", s.err)
	} else if err := s.r.Release(); err != nil {
		t.Error(err)
	}
	if err := <-landed; err != nil {
		t.Errorf("a Put that may go to the host: %v", err)
	}
	b, _ := l.repo.Peek(1)
	l.same(b, record)
	_, err := gpu.Alloc(100)
	isLost(t, "drawing from what was promised", err)
	isLost(t, "growing it", gpu.Grow(ctx, 1))
	if err := errors.Join(gpu.Release(), rest.Release()); err != nil {
		t.Error(err)
	}
	l.end(3)
}

// TestOneOfTwoGPUsIsLost: the other serves.
func TestOneOfTwoGPUsIsLost(t *testing.T) {
	l := openLosable(t, 2, 1<<20)
	words := wordList(1, 1500)
	record := func(i int) arrow.RecordBatch { return numberedRecord(int64(i), 1000, words) }
	dead := l.put(0, record(0), repository.WithPlacement(reservation.Specific(lostGPU)))
	alive := l.put(1, record(1), repository.WithPlacement(reservation.Specific(otherGPU)))
	l.put(2, record(2), in(tier.Host))
	l.put(3, record(3), in(tier.Disk))
	l.gpus[0].Lose(errFellOff)

	put := []*batch.Batch{
		l.put(4, record(4), in(tier.GPU)),
		l.put(5, record(5), repository.WithPlacement(reservation.AnyInTierPreferring(tier.GPU, 0))),
		l.put(6, record(6)),
	}
	for i, b := range append(put, alive) {
		if at := b.Info().Space; at != otherGPU {
			t.Errorf("batch %d of those that may go to a GPU lies in %s", i, at)
		}
	}
	for i := 1; i < 7; i++ {
		n := 0
		for h, err := range l.repo.Drain(t.Context(), i, tier.GPU) {
			if err != nil {
				t.Fatalf("draining partition %d: %v", i, err)
			}
			got, err := l.eng.Mover().Record(t.Context(), h)
			if err == nil {
				err = convert.Equal(record(i), got)
				got.Release()
			}
			if at := h.Space().ID(); err != nil || at != otherGPU {
				t.Errorf("what partition %d has comes to %s, %v", i, at, err)
			}
			if err := h.Close(); err != nil {
				t.Error(err)
			}
			n++
		}
		if n != 1 {
			t.Errorf("partition %d had %d batches", i, n)
		}
	}
	g, err := l.eng.Admit(t.Context(), spillway.Estimate{Operator: "task", Output: 100})
	if err != nil {
		t.Fatal(err)
	}
	if at := g.Reservation().Space().ID(); at != otherGPU {
		t.Errorf("a task runs in %s", at)
	}
	if err := g.Release(); err != nil {
		t.Error(err)
	}
	isLost(t, "moving from one GPU to the other", l.eng.Mover().Move(t.Context(), dead, reservation.Specific(otherGPU)))
	l.end(1)
}

// TestGPUIsLostUnderPuts: at whichever operation of the device that happens, no Put fails that may
// go elsewhere, not even the one under way; and the monitor, which is moving batches down, leaves
// it at that.
func TestGPUIsLostUnderPuts(t *testing.T) {
	const putters, each = 4, 12
	for _, at := range []int{0, 2, 13, 55, 1, 3, 5, 8, 21, 34, 89}[:testseed.Rounds(11, 4)] {
		t.Run(fmt.Sprint(at), func(t *testing.T) {
			var l *losable
			l = openLosable(t, 1, 512<<10, faultdev.Rule{Skip: at, Times: 1, Effect: faultdev.Do(func(string, int64) {
				l.gpus[0].Lose(errFellOff)
			})})
			words := wordList(1, 1500)
			record := func(i int) arrow.RecordBatch { return numberedRecord(int64(i), 500+i*10, words) }
			ctx, cancel := context.WithTimeoutCause(t.Context(), time.Minute, errors.New("it takes for ever"))
			defer cancel()
			var all sync.WaitGroup
			for p := range putters {
				all.Go(func() {
					for i := p * each; i < (p+1)*each; i++ {
						if err := l.repo.Put(ctx, i, record(i)); err != nil {
							t.Errorf("putting record %d: %v", i, err)
						}
					}
				})
			}
			all.Wait()
			l.gpus[0].Lose(errFellOff) // there may have been fewer operations
			<-l.told
			for i := range putters * each {
				b, ok := l.repo.Peek(i)
				if !ok {
					t.Errorf("batch %d is not there", i)
					continue
				}
				if b.Info().Space != lostGPU {
					l.same(b, record(i))
					continue
				}
				_, err := openedFrom(t, l.eng, b)
				isLost(t, "opening what was there", err)
			}
			l.end(putters * each)
			if n := l.log.count(""); n != 1 {
				t.Errorf("the log has %d warnings: %s", n, l.log.b.String())
			}
		})
	}
}
