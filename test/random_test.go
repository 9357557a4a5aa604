package test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/test/testfs"
	"github.com/spillway-db/spillway/tier"
)

// TestRandomOperations lets many goroutines do everything at once to one small
// engine whose data is several times its GPU and host memory, with random
// budgets and cancellations, while the books are checked all the time. At the
// end every batch that was put and not consumed must be there, with its bytes.
func TestRandomOperations(t *testing.T) {
	t.Parallel()
	for seed := range testseed.Each(t, testseed.Rounds(6, 1)) {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			runRandomOperations(t, seed, spillway.Config{GPUs: []spillway.GPUConfig{{Backend: spillway.Sim}}})
		})
	}
}

const (
	randomWorkers    = 8
	randomPartitions = 3
)

// randomRun is what the workers of one run share.
type randomRun struct {
	eng  *spillway.Engine
	repo *repository.Repository

	words   arrow.Array // the dictionary of every other record
	numbers atomic.Int64
	lowered atomic.Bool  // a limit was lowered
	unread  atomic.Int64 // batches that were dropped without having been read
	mu      sync.Mutex
	sources map[int64]*source // by the number in column 0
}

// source is what was put. It stays known when its batch is consumed, for others
// may be reading that batch still.
type source struct {
	rec      arrow.RecordBatch
	consumed bool
}

// runRandomOperations fills in the sizes of cfg.
func runRandomOperations(t *testing.T, seed uint64, cfg spillway.Config) {
	rng := rand.New(rand.NewPCG(seed, 0))
	kib := func(least, most int) int64 { return int64(least+rng.IntN(most-least)) << 10 }
	dir := t.TempDir()
	if cfg.GPUs[0].Backend != spillway.Sim { // which have been on the disk
		dir = testfs.MemoryDir(t)
	}
	cfg.GPUs[0].Memory = spillway.Bytes(kib(256, 1024))
	cfg.HostMemory = spillway.Bytes(kib(384, 1024))
	cfg.Disks = []spillway.DiskConfig{
		{
			Dir:      dir,
			FS:       testfs.DiskFS(dir, nil),
			Capacity: spillway.Bytes(256 << 20),
			Persist:  seed%2 == 0 && runtime.GOOS == "linux",
		},
	}
	cfg.MonitorPeriod = time.Millisecond
	cfg.Policy, _ = monitor.ByName(monitor.Names()[seed%uint64(len(monitor.Names()))])
	cfg.Logger = slog.New(slog.NewTextHandler(io.Discard, nil))
	eng, err := spillway.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	plan, err := eng.Plan("random")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := plan.Repository("scan", 0)
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
	watching, stop := context.WithCancel(ctx)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		often := time.NewTicker(time.Duration(testseed.Rounds(100, 500)) * time.Microsecond)
		defer often.Stop()
		for watching.Err() == nil {
			checkBooks(t, eng)
			<-often.C
		}
	}()
	var wg sync.WaitGroup
	for w := range randomWorkers {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(w+1)))
			for op := range testseed.Rounds(150, 80) { // by each worker
				if err := run.step(ctx, rng); err != nil {
					t.Errorf("worker %d, operation %d: %v", w, op, err)
					cancel()
					return
				}
			}
		})
	}
	wg.Wait()
	stop()
	<-watched
	if t.Failed() {
		_ = eng.Close() // what is wrong has been reported
		return
	}

	if err := run.raise(); err != nil {
		t.Fatal(err)
	}
	run.checkConserved(ctx, t, held)

	// Everything that is left must come out once, and be what was put.
	for p := range randomPartitions {
		for h, err := range repo.Drain(ctx, p, []tier.Kind{tier.GPU, tier.Host}[p%2]) {
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(run.compare(ctx, h, true), h.Close()); err != nil {
				t.Fatal(err)
			}
		}
	}
	for n, s := range run.sources {
		if !s.consumed {
			t.Errorf("batch number %d was lost", n)
		}
	}
	if err := eng.Close(); err != nil {
		t.Error(err)
	}
	for _, s := range eng.Stats().Spaces {
		if s.Used() != 0 || s.Cached != 0 {
			t.Errorf("%s ends with %+v", s.ID, s.Usage)
		}
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 0 {
		t.Errorf("the spill directory holds %v, %v", left, err)
	}
}

// checkBooks looks at every space once.
func checkBooks(t *testing.T, eng *spillway.Engine) {
	for _, s := range eng.Stats().Spaces {
		if s.Used() > s.Capacity || s.Peak > s.Capacity || s.Live < 0 || s.Retired < 0 || s.Reserved < 0 ||
			s.Cached < 0 {
			t.Errorf("%s breaks its books: %+v of %d", s.ID, s.Usage, s.Capacity)
		}
	}
}

// checkConserved waits until the monitor is idle, and checks that what is in use in each space is
// what its batches and their dictionaries are charged, and nothing more.
func (r *randomRun) checkConserved(ctx context.Context, t *testing.T, held map[tier.ID]int64) {
	t.Helper()
	for often := time.NewTicker(time.Millisecond); ; <-often.C {
		wrong := ""
		want, copied := make(map[tier.ID]int64), make(map[tier.ID]int64)
		for p := range randomPartitions {
			for b := range r.repo.Batches(p) {
				want[b.Info().Space] += b.Info().Bytes
				b.EachClean(func(p batch.Payload) { copied[p.Space().ID()] += p.Bytes() })
			}
		}
		for _, s := range r.eng.Stats().Spaces {
			n := want[s.ID] + held[s.ID] + r.eng.Mover().DictionaryBytes(s.ID)
			headers := int64(0) // of the files that persist, for which the space has a promise each
			if s.Disk != nil {
				headers = s.Disk.Used - s.Live - s.Cached
			}
			if s.Live != n || s.Retired != 0 || s.Reserved != headers || s.Cached != copied[s.ID] {
				wrong += fmt.Sprintf(
					"%s holds %+v, its batches %d, copies %d, and headers %d; ",
					s.ID,
					s.Usage,
					n,
					copied[s.ID],
					headers,
				)
			}
		}
		if wrong == "" {
			often.Stop()
			return
		}
		if ctx.Err() != nil {
			t.Fatal(wrong)
		}
	}
}

// step does one random thing.
func (r *randomRun) step(ctx context.Context, rng *rand.Rand) error {
	if rng.IntN(8) == 0 { // a caller gives up now and then
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(rng.IntN(2000))*time.Microsecond)
		defer cancel()
	}
	partition := rng.IntN(randomPartitions)
	var err error
	switch n := rng.IntN(100); {
	case n < 35:
		err = r.put(ctx, rng, partition)
	case n < 45:
		err = r.consume(ctx, rng, partition)
	case n < 50:
		err = r.drain(ctx, rng, partition)
	case n < 75:
		err = r.process(ctx, rng, partition)
	case n < 87:
		err = r.shift(ctx, rng, partition)
	case n < 90:
		err = r.ahead(ctx, rng, partition)
	case n < 95:
		err = r.clone(ctx, rng, partition)
	case n < 96:
		r.hint(rng, partition)
	case n < 97:
		r.eng.Mover().DropCopies()
	case n < 98:
		err = r.limit(rng)
	default:
		err = r.hold(ctx, rng)
	}
	if ctx.Err() != nil && errors.Is(err, context.Cause(ctx)) {
		return nil // given up, as asked
	}
	if r.lowered.Load() && errors.Is(err, reservation.ErrExceeded) {
		return nil // it may be more than a limit
	}
	return err
}

// limit lowers what a space may use, not below what it does, or takes that back.
func (r *randomRun) limit(rng *rand.Rand) error {
	spaces := r.eng.Spaces()
	s := spaces[rng.IntN(len(spaces))]
	limit := s.Capacity
	if least := max(s.State().Used(), limit/4*3); rng.IntN(2) == 0 {
		r.lowered.Store(true)
		limit = least + rng.Int64N(limit-least+1)
	}
	return s.SetLimit(limit)
}

// raise takes back all that limit has done.
func (r *randomRun) raise() (err error) {
	for _, s := range r.eng.Spaces() {
		err = errors.Join(err, s.SetLimit(s.Capacity))
	}
	return err
}

func (r *randomRun) put(ctx context.Context, rng *rand.Rand, partition int) error {
	n := r.numbers.Add(1)
	words := r.words
	if n%2 == 0 { // one of its own, mostly too large to lie in the batch's body
		words = wordList(uint64(n), 1+rng.IntN(800))
	}
	rec := numberedRecord(n, rng.IntN(2000), words)
	r.mu.Lock()
	r.sources[n] = &source{rec: rec}
	r.mu.Unlock()
	var opts []repository.PutOption
	if rng.IntN(2) == 0 {
		opts = append(opts, repository.WithPlacement(reservation.AnyInTier(anyKind(rng))))
	}
	err := r.repo.Put(ctx, partition, rec, opts...)
	if err != nil {
		r.mu.Lock()
		delete(r.sources, n)
		r.mu.Unlock()
	}
	return err
}

// consume takes a batch for good.
func (r *randomRun) consume(ctx context.Context, rng *rand.Rand, partition int) error {
	b, err := r.repo.Take(ctx, partition, batch.TaskCreated, repository.NoWait())
	if err != nil || b == nil {
		return err
	}
	h, err := r.eng.Mover().Acquire(ctx, b, reservation.AnyInTier(anyKind(rng)))
	if err != nil { // given up: back into the repository, or nowhere if that is closed
		err = errors.Join(err, b.CancelTask())
		if e := r.repo.PutBatch(partition, b); e != nil {
			err = errors.Join(err, e, b.Discard(context.WithoutCancel(ctx)))
		}
		return err
	}
	return errors.Join(r.compare(context.WithoutCancel(ctx), h, true), b.Drop(), h.Close())
}

// process works on a batch in its place in the repository.
// drain consumes a few batches, while those that come next are read ahead.
func (r *randomRun) drain(ctx context.Context, rng *rand.Rand, partition int) error {
	left := 1 + rng.IntN(3)
	for h, err := range r.repo.Drain(ctx, partition, []tier.Kind{tier.GPU, tier.Host}[rng.IntN(2)], repository.Unordered()) {
		if err != nil {
			return err
		}
		if err := errors.Join(r.compare(context.WithoutCancel(ctx), h, true), h.Close()); err != nil {
			return err
		}
		if left--; left == 0 {
			break
		}
	}
	return nil
}

func (r *randomRun) process(ctx context.Context, rng *rand.Rand, partition int) error {
	b := r.pick(rng, partition)
	if b == nil {
		return nil
	}
	h, err := r.eng.Mover().Acquire(ctx, b, reservation.AnyInTier(anyKind(rng)))
	if isState(err) { // consumed by another goroutine meanwhile
		return nil
	}
	if err != nil {
		return err
	}
	return errors.Join(r.compare(context.WithoutCancel(ctx), h, false), h.Close())
}

// ahead copies a batch to disk, if nobody uses that.
func (r *randomRun) ahead(ctx context.Context, rng *rand.Rand, partition int) error {
	b := r.pick(rng, partition)
	if b == nil {
		return nil
	}
	_, err := r.eng.Mover().WriteAhead(ctx, b, 0)
	if errors.Is(err, tier.ErrNoSpace) || errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// hint says something of a batch's next use, true or not.
func (r *randomRun) hint(rng *rand.Rand, partition int) {
	if b := r.pick(rng, partition); b != nil {
		soon := time.Now().Add(time.Duration(rng.IntN(1000)) * time.Millisecond).UnixNano()
		b.Hint([]int64{0, soon, batch.Never, batch.Stay}[rng.IntN(4)])
	}
}

// shift moves a batch up or down, as the monitor or as work would.
func (r *randomRun) shift(ctx context.Context, rng *rand.Rand, partition int) error {
	b := r.pick(rng, partition)
	if b == nil {
		return nil
	}
	to, work := anyKind(rng), rng.IntN(3) == 0
	var err error
	if work {
		err = r.eng.Mover().Move(ctx, b, reservation.AnyInTier(to))
	} else {
		err = r.eng.Mover().Evict(ctx, []*batch.Batch{b}, tier.ID{Kind: to}, convert.ReasonDemand)[0]
	}
	if isState(err) || (!work && errors.Is(err, tier.ErrNoSpace)) {
		return nil
	}
	return err
}

func (r *randomRun) clone(ctx context.Context, rng *rand.Rand, partition int) error {
	b := r.pick(rng, partition)
	if b == nil {
		return nil
	}
	c, err := r.eng.Mover().Clone(ctx, b, nil)
	if isState(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if c.ID() == b.ID() {
		err = fmt.Errorf("the clone of batch %d has its id", b.ID())
	}
	return errors.Join(err, c.Discard(context.WithoutCancel(ctx)))
}

// hold takes room that has nothing to do with batches, for a moment.
func (r *randomRun) hold(ctx context.Context, rng *rand.Rand) error {
	res, err := r.eng.Reserve(ctx, reservation.AnyInTier(anyKind(rng)), int64(rng.IntN(128<<10)))
	if err != nil {
		return err
	}
	buf, err := res.Alloc(res.Bytes() / 2)
	if errors.Is(err, tier.ErrNoSpace) { // in pieces
		err = nil
	}
	return errors.Join(err, res.Release(), buf.Release())
}

// compare checks the held batch's bytes against the record that was put, and
// notes whether the batch is consumed.
func (r *randomRun) compare(ctx context.Context, h *batch.Handle, consumed bool) error {
	rec, err := r.eng.Mover().Record(ctx, h)
	for r.lowered.Load() && errors.Is(err, reservation.ErrExceeded) { // by a limit, which others lower again
		if err := r.raise(); err != nil {
			return err
		}
		rec, err = r.eng.Mover().Record(ctx, h)
	}
	if err != nil {
		if consumed {
			r.unread.Add(1)
		}
		return err
	}
	defer rec.Release()
	return r.same(rec.Column(0).(*array.Int64).Value(0), rec, consumed)
}

// same checks that rec is the record that was put with the number n, and notes whether it is
// consumed.
func (r *randomRun) same(n int64, rec arrow.RecordBatch, consumed bool) error {
	r.mu.Lock()
	src := r.sources[n]
	twice := src != nil && consumed && src.consumed
	if src != nil && consumed {
		src.consumed = true
	}
	r.mu.Unlock()
	switch {
	case src == nil:
		return fmt.Errorf("a batch holds number %d, which was never put", n)
	case twice:
		return fmt.Errorf("batch number %d was consumed twice", n)
	}
	return convert.Equal(src.rec, rec)
}

func (r *randomRun) pick(rng *rand.Rand, partition int) *batch.Batch {
	var all []*batch.Batch
	for b := range r.repo.Batches(partition) {
		all = append(all, b)
	}
	if len(all) == 0 {
		return nil
	}
	return all[rng.IntN(len(all))]
}

func isState(err error) bool { return errors.Is(err, batch.ErrState) }

func anyKind(rng *rand.Rand) tier.Kind {
	kinds := tier.Kinds()
	return kinds[rng.IntN(len(kinds))]
}

// numberedRecord makes a record whose first column starts with n, and whose
// last is coded by words.
func numberedRecord(n int64, rows int, words arrow.Array) arrow.RecordBatch {
	coded := &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int32, ValueType: arrow.BinaryTypes.String}
	schema := arrow.NewSchema([]arrow.Field{
		{Name: "n", Type: arrow.PrimitiveTypes.Int64},
		{Name: "s", Type: arrow.BinaryTypes.String, Nullable: true},
		{Name: "f", Type: arrow.PrimitiveTypes.Float64},
		{Name: "c", Type: arrow.PrimitiveTypes.Int32},
	}, nil)
	// By slices and not by row: a call for each value is most of some tests' time.
	count := rows + 1
	ns, fs, codes := make([]int64, count), make([]float64, count), make([]int32, count)
	valid, offsets, text := make([]byte, (count+7)/8), make([]int32, count+1), make([]byte, 0, count*24)
	of := fmt.Appendf(nil, " of batch %d", n)
	nulls := 0
	for i := range count {
		ns[i], fs[i], codes[i] = n+int64(i), float64(n)/float64(i+1), int32((i+int(n))%words.Len())
		if i%7 == 3 {
			nulls++
		} else {
			valid[i/8] |= 1 << (i % 8)
			text = append(strconv.AppendInt(text, int64(i), 10), of...)
		}
		offsets[i+1] = int32(len(text))
	}
	b := array.NewRecordBuilder(memory.DefaultAllocator, schema)
	defer b.Release()
	b.Field(0).(*array.Int64Builder).AppendValues(ns, nil)
	b.Field(1).AppendNulls(count) // in whose place its buffers are
	b.Field(2).(*array.Float64Builder).AppendValues(fs, nil)
	b.Field(3).(*array.Int32Builder).AppendValues(codes, nil)
	cols := slices.Clone(b.NewRecordBatch().Columns())
	cols[1] = array.NewStringData(array.NewData(arrow.BinaryTypes.String, count, []*memory.Buffer{
		memory.NewBufferBytes(
			valid,
		),
		memory.NewBufferBytes(arrow.Int32Traits.CastToBytes(offsets)),
		memory.NewBufferBytes(text),
	}, nil, nulls, 0))
	dict := array.NewDictionaryArray(coded, cols[3], words)
	dict.Dictionary() // makes it, so that several may compare with the record at once
	cols[3] = dict
	fields := schema.Fields()
	fields[3].Type = coded
	return array.NewRecordBatch(arrow.NewSchema(fields, nil), cols, int64(count))
}

// wordList makes the dictionary number n: so many strings of about 16 bytes.
func wordList(n uint64, count int) arrow.Array {
	b := array.NewStringBuilder(memory.DefaultAllocator)
	defer b.Release()
	for i := range count {
		b.Append(fmt.Sprintf("word %d of %d", i, n))
	}
	return b.NewArray()
}
