package convert

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/internal/transfer"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// lent says how much scratch is lent.
func (m *machine) lent() int64 { return m.mover.cfg.Builtin.Scratch.Lent() }

// watched calls look at each transfer with the disk.
func (m *machine) watched(look func()) (remove func()) {
	return m.files.Add(faultfs.Rule{Ops: []string{"write", "read"}, Effect: faultfs.Do(func(string, string) { look() })})
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
			live := host.State().Live - m.base
			for n := most.Load(); live > n && !most.CompareAndSwap(n, live); n = most.Load() {
			}
			for n := least.Load(); live < n && !least.CompareAndSwap(n, live); n = least.Load() {
			}
		})
		for _, k := range []tier.Kind{tier.Disk, tier.GPU} {
			m.move(t, b, k)
			if m.lent() != 0 || host.State().Used() != m.base {
				t.Errorf("%s: %d bytes are lent, host memory holds %d beside the %d of staging",
					codec, m.lent(), host.State().Used()-m.base, m.base)
			}
		}
		remove()
		if least.Load() < transfer.BlockSize || most.Load() > transfer.MinBlocks*transfer.BlockSize {
			t.Errorf("%s: between %d and %d bytes were in the ledger, want %d to %d", codec,
				least.Load(), most.Load(), transfer.BlockSize, transfer.MinBlocks*transfer.BlockSize)
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
		if m.lent() != 0 || host.State().Used() != m.base {
			t.Errorf("%s: after an ingest host memory holds %d", codec, host.State().Used()-m.base)
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
		var all *reservation.Reservation
		if full {
			var err error
			free := m.spaces[tier.Host].State().Available
			if all, err = m.reservations.TryReserve(reservation.AnyInTier(tier.Host), free, nil); err != nil {
				t.Fatal(err)
			}
		}
		var over, seen atomic.Int64
		remove := m.watched(func() {
			seen.Add(1)
			if n := m.lent(); n == 0 || n > transfer.MinBlocks*transfer.BlockSize {
				over.Store(n)
			}
		})
		var wg sync.WaitGroup
		for _, b := range batches {
			wg.Go(func() {
				for _, k := range []tier.Kind{tier.Disk, tier.GPU, tier.Disk} {
					if err := m.mover.Move(t.Context(), b, reservation.AnyInTier(k)); err != nil {
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
				if err := m.mover.Move(t.Context(), b, reservation.AnyInTier(k)); err != nil {
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
		if got := m.form(t, c); got != batch.CompressedImage {
			t.Fatalf("it is a %s", got)
		}
		read = append(read, c)
	}
	var wg sync.WaitGroup
	for _, b := range moved {
		wg.Go(func() {
			for range testseed.Rounds(4, 2) {
				for _, k := range []tier.Kind{tier.Disk, tier.GPU} {
					if err := m.mover.Move(ctx, b, reservation.AnyInTier(k)); err != nil {
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
