package test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow/array"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/memdir"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// TestRandomClaims lets many goroutines claim, read, write and move the batches of small memories:
// two GPUs, two host memories and two disks, of which one persists, and of which some transfers fail. At the
// end every batch that was put and not consumed is there, with its bytes, and the books are zero.
func TestRandomClaims(t *testing.T) {
	t.Parallel()
	for seed := range testseed.Each(t, testseed.Rounds(4, 1)) {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) { runRandomClaims(t, seed) })
	}
}

func runRandomClaims(t *testing.T, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 0))
	kib := func(least, most int) spillway.Amount {
		return spillway.Bytes(int64(least+rng.IntN(most-least)) << 10)
	}
	node := []int{0, 1}
	cfg := spillway.Config{
		Hosts:         []spillway.HostConfig{{Memory: kib(512, 1024), Node: 0}, {Memory: kib(2100, 3000), Node: 0}},
		MonitorPeriod: time.Millisecond, Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	}
	var files []*faultfs.FS
	for i := range 2 {
		cfg.GPUs = append(cfg.GPUs, spillway.GPUConfig{Backend: spillway.Sim, Memory: kib(256, 1024), Node: &node[i]})
		dir := memdir.New(t)
		files = append(files, faultfs.New(memdir.FS(dir, nil), seed))
		cfg.Disks = append(cfg.Disks, spillway.DiskConfig{
			Dir: dir, FS: files[i], Capacity: spillway.Bytes(256 << 20), Persist: i == 1 && runtime.GOOS == "linux",
		})
	}
	eng, err := spillway.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	plan, err := eng.Plan("random")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := plan.Manager().Create(repository.Key{Operator: "scan"}, repository.Options{ByRows: seed%2 == 1})
	if err != nil {
		t.Fatal(err)
	}
	run := &randomRun{eng: eng, repo: repo, words: wordList(seed, 1500), sources: make(map[int64]*source)}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute) // only a stall takes so long
	defer cancel()
	held := make(map[tier.ID]int64) // what the engine itself has in use: staging
	for _, s := range eng.Stats().Spaces {
		held[s.ID] = s.Live
	}
	var remove []func()
	for _, f := range files {
		fails := faultfs.Rule{Ops: []string{"read", "write", "allocate"}, Probability: 0.01, Effect: faultfs.Fail(syscall.EIO)}
		remove = append(remove, f.Add(fails))
	}
	var wg sync.WaitGroup
	for w := range 2 * randomWorkers {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(w+1)))
			for op := range testseed.Rounds(80, 40) { // by each worker
				if err := run.claimStep(ctx, rng); err != nil {
					t.Errorf("worker %d, operation %d: %v", w, op, err)
					cancel()
					return
				}
				checkBooks(t, eng)
			}
		})
	}
	wg.Wait()
	for _, f := range remove {
		f()
	}
	if err := ctx.Err(); err != nil && !t.Failed() { // to the workers it is as if they had given up
		t.Errorf("the workers have stalled: %v", err)
	}
	if t.Failed() {
		_ = eng.Close() // what is wrong has been reported
		return
	}
	run.checkConserved(ctx, t, held)
	repo.CloseInput()
	for p := range randomPartitions {
		for repo.Len(p) > 0 {
			// A disk that has failed is tried again only now and then. Once ctx has ended all reads fail.
			err := run.read(ctx, p, 1<<30)
			if ended := ctx.Err(); ended != nil || err != nil && !errors.Is(err, tier.ErrNoSpace) {
				t.Fatalf("%d batches of partition %d are left: %v", repo.Len(p), p, errors.Join(err, ended))
			}
		}
	}
	lost := run.unread.Load()
	for n, s := range run.sources {
		if !s.consumed {
			if lost--; lost < 0 {
				t.Errorf("batch number %d was lost", n)
			}
		}
	}
	closeClean(t, eng)
	for _, s := range eng.Stats().Spaces {
		if s.Cached != 0 {
			t.Errorf("%s ends with %+v", s.ID, s.Usage)
		}
	}
	for i, f := range files {
		if n := f.Open(); n != 0 {
			t.Errorf("%d files of disk %d are open", n, i)
		}
	}
}

// claimStep does one random thing. Failed transfers, and claims of others, are no errors.
func (r *randomRun) claimStep(ctx context.Context, rng *rand.Rand) error {
	if rng.IntN(8) == 0 { // a caller gives up now and then
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(rng.IntN(2000))*time.Microsecond)
		defer cancel()
	}
	partition := rng.IntN(randomPartitions)
	var err error
	switch n := rng.IntN(100); {
	case n < 25:
		err = r.put(ctx, rng, partition)
	case n < 35:
		err = r.write(ctx, rng, partition)
	case n < 42:
		err = r.consume(ctx, rng, partition)
	case n < 47:
		err = r.drain(ctx, rng, partition)
	case n < 52:
		err = r.read(ctx, partition, 1+rng.IntN(3))
	case n < 65:
		err = r.claim(ctx, rng, partition)
	case n < 75:
		err = r.task(ctx, rng, partition)
	case n < 80:
		err = r.process(ctx, rng, partition)
	case n < 88:
		err = r.shift(ctx, rng, partition)
	case n < 94:
		err = r.ahead(ctx, rng, partition)
	case n < 96:
		if b := r.pick(rng, partition); b != nil {
			err = r.eng.Mover().Ahead(ctx, b, reservation.AnyInTier(tier.GPU))
		}
	default:
		if rng.IntN(2) == 0 {
			r.eng.Mover().DropCopies()
		}
		err = r.hold(ctx, rng)
	}
	if ctx.Err() != nil && errors.Is(err, context.Cause(ctx)) {
		return nil
	}
	for _, expected := range []error{
		syscall.EIO, tier.ErrNoSpace, tier.ErrNotSupported, reservation.ErrDeadlock, reservation.ErrExceeded,
		repository.ErrClaimed, batch.ErrState,
	} {
		if errors.Is(err, expected) {
			return nil
		}
	}
	return err
}

// write puts a record as one batch, through a Writer.
func (r *randomRun) write(ctx context.Context, rng *rand.Rand, partition int) (err error) {
	n := r.numbers.Add(1)
	rec := numberedRecord(n, rng.IntN(1000), r.words)
	r.mu.Lock()
	r.sources[n] = &source{rec: rec}
	r.mu.Unlock()
	defer func() {
		if err != nil { // nothing was put
			r.mu.Lock()
			delete(r.sources, n)
			r.mu.Unlock()
		}
	}()
	w, err := r.repo.Writer(ctx, partition, rec.Schema(), 128<<10)
	if err != nil {
		return err
	}
	for from := int64(0); from < rec.NumRows() && err == nil; {
		to := min(rec.NumRows(), from+1+rng.Int64N(300))
		err = w.Append(ctx, rec, from, to)
		from = to
	}
	if err == nil && rng.IntN(10) > 0 {
		err = w.Flush(ctx)
	} else if err == nil {
		err = context.Canceled // given up
		return errors.Join(err, w.Close(), batch.ErrState)
	}
	if closing := w.Close(); closing != nil {
		panic(closing)
	}
	return err
}

// read consumes batches as records.
func (r *randomRun) read(ctx context.Context, partition, limit int) error {
	if r.repo.Len(partition) == 0 {
		return nil
	}
	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	defer watching.Wait()
	defer cancel()
	watching.Go(func() { // others may take the last one, and a Reader waits for more
		often := time.NewTicker(50 * time.Millisecond)
		defer often.Stop()
		for ctx.Err() == nil {
			select {
			case <-often.C:
				if r.repo.Len(partition) == 0 {
					cancel()
				}
			case <-ctx.Done():
			}
		}
	})
	rd, err := r.repo.Reader(ctx, partition)
	if err != nil && ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return err
	}
	defer rd.Release()
	for ; limit > 0 && r.repo.Len(partition) > 0; limit-- {
		if !rd.Next() {
			if ctx.Err() != nil {
				return nil
			}
			return rd.Err()
		}
		rec := rd.RecordBatch()
		if err := r.same(rec.Column(0).(*array.Int64).Value(0), rec, true); err != nil {
			return err
		}
	}
	return nil
}

// claim works on a few batches, and consumes or restores them.
func (r *randomRun) claim(ctx context.Context, rng *rand.Rand, partition int) error {
	var c *repository.Claim
	var err error
	switch rng.IntN(3) {
	case 0:
		c, err = r.repo.Claim(ctx, partition, 1+rng.IntN(4), repository.NoWait())
	case 1:
		ctx, cancel := context.WithTimeout(ctx, time.Duration(rng.IntN(5000))*time.Microsecond)
		defer cancel()
		least := rng.Int64N(256 << 10)
		c, err = r.repo.ClaimBytes(ctx, partition, least, least+rng.Int64N(256<<10)+1)
		if ctx.Err() != nil && err != nil {
			return nil
		}
	default:
		c, err = r.repo.ClaimAll(ctx, partition)
		if errors.Is(err, io.EOF) {
			return nil
		}
	}
	if err != nil || c == nil {
		return err
	}
	var numbers []int64
	for _, b := range c.Batches()[:min(len(c.Batches()), 4)] {
		h, err := r.eng.Mover().Acquire(ctx, b, reservation.AnyInTier(anyKind(rng)))
		var n int64
		if err == nil {
			n, err = r.number(ctx, h)
			err = errors.Join(err, r.compare(context.WithoutCancel(ctx), h, false), h.Close())
		}
		if err != nil {
			return errors.Join(err, c.Restore())
		}
		numbers = append(numbers, n)
	}
	if len(numbers) < len(c.Batches()) || rng.IntN(2) == 0 {
		return c.Restore()
	}
	r.consumed(numbers)
	return c.Consume()
}

// task runs a task on claimed batches in some memory.
func (r *randomRun) task(ctx context.Context, rng *rand.Rand, partition int) error {
	c, err := r.repo.Claim(ctx, partition, 1+rng.IntN(3), repository.NoWait())
	if err != nil || c == nil {
		return err
	}
	ins := []reservation.Strategy{
		nil, reservation.AnyInTier(tier.Host), reservation.AnyInTier(tier.GPU),
		reservation.Specific(tier.ID{Kind: tier.GPU, Ordinal: 1}), reservation.Specific(tier.ID{Kind: tier.Host}),
	}
	errTask := fmt.Errorf("the task gives up: %w", batch.ErrState)
	var numbers []int64
	t := spillway.Task{
		Operator: "task", Inputs: []*repository.Claim{c}, In: ins[rng.IntN(len(ins))],
		Output: int64(1 + rng.IntN(64<<10)), Overhead: spillway.None,
	}
	return r.eng.RunTask(ctx, t, func(ctx context.Context, g *spillway.Grant, in []*spillway.Handle) error {
		numbers = numbers[:0]
		for _, h := range in {
			n, err := r.number(ctx, h)
			if err := errors.Join(err, r.compare(context.WithoutCancel(ctx), h, false)); err != nil {
				return err
			}
			numbers = append(numbers, n)
		}
		if rng.IntN(3) == 0 {
			return errTask
		}
		r.consumed(numbers)
		return nil
	})
}

// number returns the number of the batch.
func (r *randomRun) number(ctx context.Context, h *batch.Handle) (int64, error) {
	rec, err := r.eng.Mover().Record(context.WithoutCancel(ctx), h)
	if err != nil {
		return 0, err
	}
	defer rec.Release()
	return rec.Column(0).(*array.Int64).Value(0), nil
}

// consumed notes that batches are about to be consumed.
func (r *randomRun) consumed(numbers []int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, n := range numbers {
		r.sources[n].consumed = true
	}
}
