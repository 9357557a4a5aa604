package convert

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// lent says how much scratch is lent.
func (m *machine) lent() int64 {
	s := &m.mover.cfg.Builtin.scratch
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lent
}

// watched calls look at each transfer with the disk.
func (m *machine) watched(look func()) (remove func()) {
	return m.files.Add(faultfs.Rule{Ops: []faultfs.Op{faultfs.Write, faultfs.Read}, Effect: faultfs.Do(func(faultfs.Op, string) { look() })})
}

// What runs are compressed and uncompressed in is in the ledger of host memory while a batch
// moves, no more than a share of it, and is given back when it has moved.
func TestScratchIsInTheLedger(t *testing.T) {
	for _, codec := range []Codec{CodecS2, CodecZstd, CodecBitpack} {
		m := newMachine(t, machineConfig{gpu: 8 << 20, host: 16 << 20, codec: codec})
		host := m.spaces[tier.Host]
		b := m.put(t, arrowgen.Flights(1, 60_000), tier.GPU)
		var most, least atomic.Int64
		least.Store(1 << 40)
		remove := m.watched(func() {
			live := host.Usage().Live - m.base
			for n := most.Load(); live > n && !most.CompareAndSwap(n, live); n = most.Load() {
			}
			for n := least.Load(); live < n && !least.CompareAndSwap(n, live); n = least.Load() {
			}
		})
		for _, k := range []tier.Kind{tier.Disk, tier.GPU} {
			m.move(t, b, k)
			if m.lent() != 0 || host.Used() != m.base {
				t.Errorf("%s: %d bytes are lent, host memory holds %d beside the %d of staging", codec, m.lent(), host.Used()-m.base, m.base)
			}
		}
		remove()
		if least.Load() < blockSize || most.Load() > leastBlocks*blockSize {
			t.Errorf("%s: between %d and %d bytes were in the ledger, want %d to %d", codec, least.Load(), most.Load(), blockSize, leastBlocks*blockSize)
		}
		m.whole(t, b, tier.GPU)
		// Laying out takes a run more.
		p, err := m.mover.Ingest(t.Context(), m.records[b.ID()], reservation.AnyInTier(tier.Disk))
		if err != nil {
			t.Fatal(err)
		}
		m.settle()
		if err := p.Release(); err != nil {
			t.Error(err)
		}
		if m.lent() != 0 || host.Used() != m.base {
			t.Errorf("%s: after an ingest host memory holds %d", codec, host.Used()-m.base)
		}
	}
}

// Many transfers at once share the scratch that there is.
func TestScratchIsBounded(t *testing.T) {
	recs := make([]arrow.RecordBatch, testseed.Rounds(8, 4))
	for i := range recs {
		recs[i] = arrowgen.Flights(uint64(i), 20_000)
	}
	for _, full := range []bool{false, true} { // then the heap is what it is of
		m := newMachine(t, machineConfig{gpu: 24 << 20, host: 16 << 20, codec: CodecZstd, disk: 48 << 20})
		var batches []*batch.Batch
		for _, rec := range recs {
			batches = append(batches, m.put(t, rec, tier.GPU))
		}
		var all reservation.Reservation
		if full {
			var err error
			if all, err = m.reservations.TryReserve(reservation.AnyInTier(tier.Host), m.spaces[tier.Host].Available()); err != nil {
				t.Fatal(err)
			}
		}
		var over, seen atomic.Int64
		remove := m.watched(func() {
			seen.Add(1)
			if n := m.lent(); n == 0 || n > leastBlocks*blockSize {
				over.Store(n)
			}
		})
		var wg sync.WaitGroup
		for _, b := range batches {
			wg.Go(func() {
				for _, k := range []tier.Kind{tier.Disk, tier.GPU, tier.Disk} {
					if err := m.mover.Move(t.Context(), b, reservation.AnyInTier(k), ReasonWork); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		remove()
		if seen.Load() == 0 || over.Load() != 0 {
			t.Errorf("%d bytes were lent at one of %d transfers", over.Load(), seen.Load())
		}
		if m.lent() != 0 {
			t.Errorf("%d bytes are lent at the end", m.lent())
		}
		if err := all.Release(); err != nil {
			t.Error(err)
		}
		for _, b := range batches {
			if err := m.same(t.Context(), b); err != nil {
				t.Error(err)
			}
		}
	}
}

// What compressing needs of the heap is the collector's when nothing is compressed.
func TestScratchIsNotKept(t *testing.T) {
	heap := func() int64 {
		runtime.GC()
		runtime.GC() // pools keep what they have for one
		var s runtime.MemStats
		runtime.ReadMemStats(&s)
		return int64(s.HeapAlloc)
	}
	m := newMachine(t, machineConfig{gpu: 24 << 20, host: 4 << 20, codec: CodecZstd, disk: 48 << 20})
	var batches []*batch.Batch
	for i := range 8 {
		batches = append(batches, m.put(t, arrowgen.Flights(uint64(i), 20_000), tier.GPU))
	}
	before := heap()
	var wg sync.WaitGroup
	for _, b := range batches {
		wg.Go(func() {
			for _, k := range []tier.Kind{tier.Disk, tier.GPU} {
				if err := m.mover.Move(t.Context(), b, reservation.AnyInTier(k), ReasonWork); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if kept := heap() - before; kept > 1<<20 {
		t.Errorf("%d bytes of the heap are kept", kept)
	}
}

// Scratch is lent in the order in which it was asked for; who needs little does not pass who
// needs much, and who gives up waiting is forgotten.
func TestScratchIsLentInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s scratch
		one, err := s.borrow(t.Context(), 0, blockSize)
		if err != nil {
			t.Fatal(err)
		}
		two, ok := s.tryBorrow(0, blockSize)
		if !ok {
			t.Fatal("there is no scratch for a second lane")
		}
		if &one.p[0] == &two.p[0] || addressOf(one.p)%tier.Page != 0 || int64(len(one.p)) != blockSize {
			t.Error("the blocks are one, or not on pages")
		}
		ours := errors.New("ours")
		ctx, cancel := context.WithCancelCause(t.Context())
		var order []string
		var mu sync.Mutex
		ask := func(ctx context.Context, name string, n int64, want error) {
			go func() {
				b, err := s.borrow(ctx, 0, n)
				if !errors.Is(err, want) {
					t.Errorf("%s: %v", name, err)
				}
				if err != nil {
					return
				}
				mu.Lock()
				order = append(order, name)
				mu.Unlock()
				time.Sleep(time.Second) // of the bubble's
				b.back()
			}()
			synctest.Wait()
		}
		ask(ctx, "large and gives up", layingSize, ours)
		ask(t.Context(), "large", layingSize, nil)
		ask(t.Context(), "small", blockSize, nil)
		if !s.wanted() {
			t.Error("nobody is said to wait")
		}
		one.back()
		synctest.Wait()
		if _, ok := s.tryBorrow(0, blockSize); ok || len(order) > 0 {
			t.Errorf("those who wait were passed: %v", order)
		}
		cancel(ours)
		synctest.Wait()
		two.back()
		time.Sleep(time.Minute)
		synctest.Wait()
		if len(order) != 2 || order[0] != "large" || order[1] != "small" || s.lent != 0 || s.wanted() {
			t.Errorf("lent in the order %v; %d bytes are still", order, s.lent)
		}
	})
}

// A waiter in front that gives up lets those behind it go on, who need less.
func TestScratchAfterOneGaveUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s scratch
		one, _ := s.borrow(t.Context(), 0, blockSize)
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			if _, err := s.borrow(ctx, 0, layingSize); err == nil {
				t.Error("there was scratch for it")
			}
		}()
		synctest.Wait()
		got := false
		go func() {
			b, err := s.borrow(t.Context(), 0, blockSize)
			if err == nil {
				got = true
				b.back()
			}
		}()
		synctest.Wait()
		cancel()
		synctest.Wait()
		if !got {
			t.Error("it waits although there is scratch")
		}
		one.back()
		if s.lent != 0 {
			t.Errorf("%d bytes are lent", s.lent)
		}
	})
}

// Transfers that have scratch wait for chunks, and columns that look strings up need both: none
// holds what the other waits for.
func TestScratchAndChunksInOneOrder(t *testing.T) {
	m := newMachine(t, machineConfig{gpu: 16 << 20, host: 12 << 20, disk: 48 << 20, codec: CodecS2})
	ctx, cancel := context.WithTimeoutCause(t.Context(), time.Minute, errors.New("they wait for each other"))
	defer cancel()
	var moved, read []*batch.Batch // all, before anything runs
	for i := range uint64(4) {
		moved = append(moved, m.put(t, arrowgen.Flights(i, 20_000), tier.GPU))
	}
	rec := mixed(1, 60_000)
	for range 2 {
		c := m.put(t, rec, tier.Disk)
		if got := m.form(t, c); got != batch.DiskPacked {
			t.Fatalf("it is a %s", got)
		}
		read = append(read, c)
	}
	var wg sync.WaitGroup
	for _, b := range moved {
		wg.Go(func() {
			for range testseed.Rounds(4, 2) {
				for _, k := range []tier.Kind{tier.Disk, tier.GPU} {
					if err := m.mover.Move(ctx, b, reservation.AnyInTier(k), ReasonWork); err != nil {
						t.Error(err)
						return
					}
				}
			}
		})
	}
	for _, c := range read {
		for i := range 8 {
			wg.Go(func() {
				for n := range testseed.Rounds(6, 3) {
					from := int64(i*3000 + n*100)
					if err := m.columnsOf(ctx, c, image.Selection{From: from, To: from + 20_000}); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
	}
	wg.Wait()
	if m.lent() != 0 {
		t.Errorf("%d bytes are lent", m.lent())
	}
}

// TestLanesShareScratch: a transfer has a lane for each block that there is, up to as many as its
// permit is for. After each run its lanes give their scratch to those who wait, and only the first
// of them waits for more.
func TestLanesShareScratch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for blocks, want := range map[int64]int64{2: 2, 3 * stagedUnderWay: stagedUnderWay} {
			b := &Builtin{Staging: func(int) (Staging, error) { return nil, nil }}
			b.scratch.most = blocks * blockSize
			var running atomic.Int64
			goOn := make(chan struct{})
			done := make(chan error, 1)
			n := int(want) + 1
			if blocks > want {
				n = 100
			}
			go func() {
				done <- b.inLanes(t.Context(), -1, n, func(context.Context, *lane, int) error {
					running.Add(1)
					<-goOn
					return nil
				})
			}()
			synctest.Wait()
			if got := running.Load(); got != want {
				t.Errorf("%d blocks: %d lanes, want %d", blocks, got, want)
			}
			if blocks > want {
				close(goOn)
				if err := <-done; err != nil || running.Load() != int64(n) {
					t.Errorf("%d of %d runs: %v", running.Load(), n, err)
				}
				continue
			}
			// Two others wait. They get both blocks when both lanes have ended a run.
			others := make(chan *block, 2)
			for range 2 {
				go func() {
					block, err := b.scratch.borrow(t.Context(), -1, blockSize)
					if err != nil {
						t.Error(err)
					}
					others <- block
				}()
				synctest.Wait()
			}
			goOn <- struct{}{}
			goOn <- struct{}{}
			synctest.Wait()
			if len(others) != 2 || running.Load() != want || b.scratch.waits.Len() != 1 {
				t.Fatalf("%d of 2 who waited have scratch, %d runs have begun, and %d lanes wait", len(others), running.Load(), b.scratch.waits.Len())
			}
			(<-others).back()
			goOn <- struct{}{} // of the last run, for which one block is enough
			if err := <-done; err != nil {
				t.Error(err)
			}
			(<-others).back()
			if b.scratch.lent != 0 {
				t.Errorf("%d bytes are lent at the end", b.scratch.lent)
			}
		}
	})
}
