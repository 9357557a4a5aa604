package test

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/tier"
)

// pieces is an engine with a GPU of 1 MiB whose free room lies between batches.
type pieces struct {
	*spillway.Engine
	repo  *repository.Repository
	gpu   *tier.Space
	words arrow.Array
	sizes int64 // of each batch
	need  int64 // more than any piece, and less than there is
}

// openPieces puts as many batches as fit below the trigger, and moves every other one away.
func openPieces(t *testing.T) *pieces {
	t.Helper()
	eng, repo := openTasks(t, 1<<20, 8<<20, 0, 0)
	p := &pieces{Engine: eng, repo: repo, gpu: gpuOf(t, eng), words: wordList(1, 10)}
	var all []int64
	for p.gpu.State().Used()+p.sizes < p.gpu.State().Trigger {
		n := int64(len(all))
		if err := repo.Put(t.Context(), 0, numberedRecord(n, 1000, p.words), in(tier.GPU)); err != nil {
			t.Fatal(err)
		}
		all = append(all, n)
		p.sizes = p.gpu.State().Used() / int64(len(all))
	}
	i := 0
	for b := range repo.Batches(0) {
		if i%2 == 1 {
			if err := eng.Mover().Move(t.Context(), b, reservation.AnyInTier(tier.Disk)); err != nil {
				t.Fatal(err)
			}
		}
		i++
	}
	t.Cleanup(func() { closeClean(t, eng) })
	p.need = p.gpu.State().Available * 2 / 3 / tier.Page * tier.Page
	if tail := p.gpu.Capacity - p.gpu.State().Trigger + 2*p.sizes; p.need <= tail {
		t.Fatalf("%d bytes fit into %d", p.need, tail)
	}
	return p
}

// same checks that all batches are what was put.
func (p *pieces) same(t *testing.T) {
	t.Helper()
	n := int64(0)
	for h, err := range p.repo.Drain(t.Context(), 0, tier.Host) {
		if err != nil {
			t.Fatal(err)
		}
		rec, err := p.Mover().Record(t.Context(), h)
		if err != nil {
			t.Fatal(err)
		}
		if err := convert.Equal(numberedRecord(n, 1000, p.words), rec); err != nil {
			t.Errorf("batch %d: %v", n, err)
		}
		n++
		rec.Release()
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestPromisedRoomInPieces: bytes that were promised can be drawn in one piece though they lie
// between batches at rest, which are moved out of the way; no more of them than need be, and those
// in use stay.
func TestPromisedRoomInPieces(t *testing.T) {
	t.Parallel()
	reserve := func(t *testing.T, p *pieces, bytes int64) *reservation.Reservation {
		r, err := p.Reserve(t.Context(), reservation.AnyInTier(tier.GPU), bytes)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	t.Run("at rest", func(t *testing.T) {
		p := openPieces(t)
		r := reserve(t, p, p.need)
		buf, err := r.Alloc(p.need)
		if err != nil {
			t.Fatal(err)
		}
		left := 0
		for b := range p.repo.Batches(0) {
			if b.Info().Space == p.gpu.ID() {
				left++
			}
		}
		if left == 0 {
			t.Error("all batches were moved away")
		}
		release(t, buf, r)
		p.same(t)
	})
	t.Run("in use", func(t *testing.T) {
		p := openPieces(t)
		var held []*spillway.Handle
		for b := range p.repo.Batches(0) {
			if b.Info().Space != p.gpu.ID() {
				continue
			}
			h, err := p.Mover().Acquire(t.Context(), b, reservation.Specific(p.gpu.ID()))
			if err != nil {
				t.Fatal(err)
			}
			held = append(held, h)
		}
		r := reserve(t, p, p.need)
		_, err := r.Alloc(p.need)
		var full *tier.NoSpaceError
		if !errors.As(err, &full) || full.Largest == 0 || full.Largest >= p.need || full.Available < p.need {
			t.Errorf("%v", err)
		}
		if r.Unused() != r.Bytes() {
			t.Errorf("%d of %d bytes are unused", r.Unused(), r.Bytes())
		}
		release(t, r)
		for _, h := range held {
			if err := h.Close(); err != nil {
				t.Error(err)
			}
		}
		p.same(t)
	})
	t.Run("at once", func(t *testing.T) {
		p := openPieces(t)
		var wg sync.WaitGroup
		for range 2 {
			r := reserve(t, p, p.need*3/4)
			wg.Go(func() {
				buf, err := r.Alloc(p.need * 3 / 4)
				if err != nil {
					t.Error(err)
				}
				release(t, buf, r)
			})
		}
		wg.Wait()
		p.same(t)
	})
	t.Run("task", func(t *testing.T) {
		p := openPieces(t)
		if err := p.repo.Put(t.Context(), 1, numberedRecord(0, 1000, p.words), in(tier.Host)); err != nil {
			t.Fatal(err)
		}
		c, err := p.repo.Claim(t.Context(), 1, 1)
		if err != nil {
			t.Fatal(err)
		}
		calls := 0
		task := spillway.Task{Operator: "aggregate", Inputs: []*repository.Claim{c}, Output: p.need, Overhead: admission.None}
		err = p.RunTask(t.Context(), task, func(_ context.Context, g *spillway.Grant, _ []*spillway.Handle) error {
			calls++
			buf, err := g.Alloc(p.need)
			if err != nil {
				return err
			}
			return buf.Release()
		})
		if err != nil || calls != 1 {
			t.Errorf("%d calls: %v", calls, err)
		}
		p.same(t)
	})
	t.Run("input of a task", func(t *testing.T) {
		p := openPieces(t)
		if err := p.repo.Put(t.Context(), 1, numberedRecord(0, int(1000*p.need/p.sizes), p.words), in(tier.Host)); err != nil {
			t.Fatal(err)
		}
		c, err := p.repo.Claim(t.Context(), 1, 1)
		if err != nil {
			t.Fatal(err)
		}
		task := spillway.Task{Operator: "join", Inputs: []*repository.Claim{c}, Output: admission.None, Overhead: admission.None}
		if err := p.RunTask(t.Context(), task, func(context.Context, *spillway.Grant, []*spillway.Handle) error { return nil }); err != nil {
			t.Fatal(err)
		}
		if s := p.Admitter().Stats(); s.Retried != 0 {
			t.Errorf("it was tried again %d times", s.Retried)
		}
		p.same(t)
	})
}

// TestScratchInPieces: batches are compressed on their way to disk where host memory has room in
// pieces only. To make one piece of it others would be moved, which needs memory to compress in,
// too.
func TestScratchInPieces(t *testing.T) {
	eng, err := spillway.Open(t.Context(), spillway.Config{
		GPUs:          []spillway.GPUConfig{}, // none
		HostMemory:    spillway.Bytes(16 << 20),
		Disks:         []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(64 << 20)}},
		Codec:         convert.CodecS2,
		MonitorPeriod: time.Hour,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeClean(t, eng) })
	plan, err := eng.Plan("pieces")
	if err != nil {
		t.Fatal(err)
	}
	var repos [2]*repository.Repository
	for i := range repos {
		if repos[i], err = plan.Repository("join", i); err != nil {
			t.Fatal(err)
		}
	}
	host := eng.Reservations().Spaces().InTier(tier.Host)[0]
	rec := numberedRecord(0, 5000, wordList(1, 10))
	n := 0
	for size := int64(0); host.State().Used()+2*size < host.State().Trigger; n++ {
		before := host.State().Used()
		if err := repos[n%2].Put(t.Context(), 0, rec, in(tier.Host)); err != nil {
			t.Fatal(err)
		}
		size = host.State().Used() - before
	}
	if err := repos[1].Close(t.Context()); err != nil { // half of the memory is free, but in pieces
		t.Fatal(err)
	}
	r, err := eng.Reserve(t.Context(), reservation.Specific(host.ID()), 2<<20)
	if err != nil {
		t.Fatal(err)
	}
	tail, err := r.Alloc(2 << 20) // where nothing has been yet
	if err != nil {
		t.Fatal(err)
	}
	defer release(t, tail, r)
	moved := 0
	for b := range repos[0].Batches(0) {
		if moved == 0 {
			if err := eng.Mover().Move(t.Context(), b, reservation.AnyInTier(tier.Disk)); err != nil {
				t.Fatal(err)
			}
		}
		if b.Info().Space != host.ID() {
			moved++
		}
	}
	if moved != 1 {
		t.Errorf("%d of %d batches were moved, not one", moved, n/2)
	}
}

// TestComposedMoveClearsNothing: a move by way of a third form needs room for that. Where the room
// lies in pieces, a move that is made to clear a space fails: it waited for its own end.
func TestComposedMoveClearsNothing(t *testing.T) {
	eng, err := spillway.Open(t.Context(), spillway.Config{
		GPUs:          []spillway.GPUConfig{}, // none
		HostMemory:    spillway.Bytes(16 << 20),
		Disks:         []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(64 << 20)}},
		MonitorPeriod: time.Hour,
		Logger:        slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	plan, err := eng.Plan("pieces")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := plan.Repository("join", 0)
	if err != nil {
		t.Fatal(err)
	}
	host := eng.Reservations().Spaces().InTier(tier.Host)[0]
	take := func(n int64) *tier.Buffer {
		r, err := eng.Reservations().TryReserve(reservation.Specific(host.ID()), n, &reservation.Options{NoClearing: true})
		if err != nil {
			t.Fatal(err)
		}
		buf, err := r.Alloc(n)
		if err := errors.Join(err, r.Release()); err != nil {
			t.Fatal(err)
		}
		return buf
	}
	reg := eng.Registry()
	var calls atomic.Int64 // by the monitor, and by the allocating goroutine
	toDisk, err := reg.Lookup(convert.ImageIn(tier.Host), convert.ImageIn(tier.Disk))
	if err != nil {
		t.Fatal(err)
	}
	err = reg.Register(asIsIn(tier.Host), convert.ImageIn(tier.Disk), func(ctx context.Context, src batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
		calls.Add(1)
		between := src.(*asIsSmall)
		room, err := eng.Reservations().TryReserve(reservation.Specific(host.ID()), between.desc.Body, &reservation.Options{NoClearing: true})
		if err != nil {
			return nil, err
		}
		img, err := imageOf(ctx, &between.asIs, room)
		if err != nil {
			return nil, errors.Join(err, room.Release())
		}
		out, err := toDisk(ctx, img, r)
		return out, errors.Join(err, img.Release(), room.Release())
	})
	if err != nil {
		t.Fatal(err)
	}
	// Host memory is in pieces where small memory keeps pages in use: a quarter of each 28 KiB stays.
	const size, gap, small = 256 << 10, 196 << 10, 7 << 10
	rec := numberedRecord(0, 56_000, wordList(1, 10)) // as an image it is larger than what lies beyond the limit
	desc := descriptorOf(t, rec)
	var gaps []*tier.Buffer
	for host.State().Available > 2*(size+gap) {
		b, err := eng.NewBatch(&asIsSmall{asIs{rec, take(size)}, desc})
		if err := errors.Join(err, repo.PutBatch(0, b)); err != nil {
			t.Fatal(err)
		}
		for range gap / small {
			gaps = append(gaps, take(small))
		}
	}
	tail := take(host.State().Available / tier.Page * tier.Page)
	var left []interface{ Release() error }
	for i, g := range gaps {
		if i%4 == 0 {
			left = append(left, g)
		} else {
			release(t, g)
		}
	}
	r, err := eng.Reserve(t.Context(), reservation.Specific(host.ID()), 7*size)
	if err != nil {
		t.Fatal(err)
	}
	buf, err := r.Alloc(7 * size) // more than lies beyond the limit
	if !errors.Is(err, tier.ErrNoSpace) || calls.Load() == 0 {
		t.Errorf("%d moves were tried: %v", calls.Load(), err)
	}
	release(t, append(left, buf, r, tail)...)
	closeClean(t, eng)
}

// asIsSmall is asIs in less memory than its image needs.
type asIsSmall struct {
	asIs
	desc *batch.Descriptor
}

func (p *asIsSmall) Descriptor() *batch.Descriptor { return p.desc }

func descriptorOf(t *testing.T, rec arrow.RecordBatch) *batch.Descriptor {
	t.Helper()
	l, err := convert.NewLayout(rec)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := l.WriteTo([][]byte{make([]byte, l.Desc.Body)}); err != nil {
		t.Fatal(err)
	}
	desc, err := l.Descriptor()
	if err != nil {
		t.Fatal(err)
	}
	return desc
}
