package transfer

import (
	"cmp"
	"context"
	"errors"
	"runtime"
	"sync"

	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

const (
	// storedRoom is the room for a compressed run. Data that does not shrink may become longer for
	// a moment, before it is stored uncompressed.
	storedRoom = payload.RunSize + payload.RunSize/4
	// BlockSize is how long a block is: a run as it is stored, and a run as it is, each on pages.
	BlockSize = storedRoom + payload.RunSize
	// ScratchShare is the part of host memory that all blocks may take together: an eighth, as
	// staging does. There are MinBlocks in any case: one compresses while the other is written.
	ScratchShare = 8
	MinBlocks    = 2
	// maxBlocks are enough where there is much memory, or two for each processor: two transfers
	// at full depth.
	maxBlocks = 2 * StagedUnderWay
	// smallShare is the part of a host space that MinBlocks may be at most. A smaller space has
	// no room to spare, and batches would be evicted for them: blocks come from the heap then.
	smallShare = 3
)

// Staging is a pool of pinned chunks of equal length, shared by the transfers of an engine. Package
// internal/host implements it.
type Staging interface {
	// Borrow waits for a chunk, or if wait is not set returns nil when none is free. It does not
	// bypass waiters. A wait ends with ctx.
	Borrow(ctx context.Context, wait bool) ([]byte, error)
	Return([]byte)
	Chunk() int64
}

// scratch lends the blocks that runs are compressed and uncompressed in: no more at a time than a
// share of host memory. A block is drawn from a host space, so it is counted in its books, and
// freed at the end of its transfer. If the space has no room, the block is taken from the heap: the
// moves that make room need blocks themselves, so they must not wait for room.
//
// The zero value lends nothing; Bind sets the limit and the spaces.
type scratch struct {
	lent chan struct{}        // has one element for each block that is lent; waiters are served in order
	from *reservation.Manager // of the host spaces that blocks are drawn from; nil: there are none
	heap sync.Pool            // *[]byte of BlockSize; idle blocks may be collected as garbage
}

// Bind sets from which host spaces blocks are drawn, and how many may be lent at a time: an eighth
// of these spaces' limits, between MinBlocks and what the processors can use. It must be called
// before the first transfer.
func (s *scratch) Bind(m *reservation.Manager) {
	total := int64(0)
	for _, h := range m.Spaces().InTier(tier.Host) {
		total += h.State().Limit
	}
	n := min(total/ScratchShare/BlockSize, int64(max(maxBlocks, 2*runtime.GOMAXPROCS(0))))
	s.from, s.lent = m, make(chan struct{}, max(n, MinBlocks))
}

// Lent returns how many bytes of blocks are lent.
func (s *scratch) Lent() int64 { return int64(len(s.lent)) * BlockSize }

// lane is the memory that one of several goroutines of a transfer works with. Only that goroutine
// uses it.
type lane struct {
	chunk       []byte // pinned; nil unless the transfer needs one
	stored, raw []byte // a block: a run as it is stored, and as it is; nil unless there is a codec
	free        func() // gives all of it back
}

// lanes is the goroutines of a transfer, and the memory that each of them works in. Only b is
// required: without blocks and chunks a lane has no memory of its own, and costs only a goroutine.
//
// A transfer takes as many lanes as there is memory for when it begins. It waits for the memory of
// the first lane only: for a block first, then for a chunk. With one lane every transfer makes
// progress, and no transfer can hold what many need while it waits for more. It returns everything
// when it ends. The holder of a block waits for a chunk, and that of a chunk for disks and devices
// only, so transfers do not wait for each other in a circle.
type lanes struct {
	b      *Builtin
	node   int // the NUMA node to which the memory is near
	blocks bool
	chunks Staging // nil: none are needed
}

// each calls do for the pieces from first to end, on at most most goroutines, of which the caller's
// is the first: so a single piece starts none. It calls begin, unless that is nil, before do for
// each piece: for one piece at a time, in order. The context of do ends when ctx does, or any piece
// fails.
//
// each returns when all goroutines have ended, with the first error, or with the cause of ctx's end
// if pieces were left. A panic of begin or do is an error, as in safely. Calls may follow one
// another.
func (w *lanes) each(
	ctx context.Context, first, end, most int,
	begin func(l *lane, i int) error, do func(ctx context.Context, l *lane, i int) error,
) error {
	// First take the lanes.
	var all []*lane
	for len(all) < min(most, end-first) {
		if lent := w.b.Scratch.lent; w.blocks && len(all) >= MinBlocks && len(lent) > cap(lent)/2 {
			break // the others are for transfers that begin meanwhile
		}
		l, err := w.borrow(ctx, len(all) == 0)
		if err != nil {
			return err
		}
		if l == nil {
			break
		}
		defer l.free()
		all = append(all, l)
	}
	if len(all) == 0 {
		return nil
	}
	// Only with several lanes does a failure have to end others.
	cancel := func(error) {}
	if len(all) > 1 {
		ctx, cancel = context.WithCancelCause(ctx)
		defer cancel(nil)
	}
	// Then work. A lane takes the next number under mu, and begin runs under it too: that is what
	// keeps pieces in order. Nothing else waits for mu but the other lanes of this transfer.
	var mu sync.Mutex // guards next and failed, and is held while a piece begins
	var failed error
	next := first
	work := func(l *lane) { // until there are no more pieces, or one has failed
		for {
			mu.Lock()
			i := next
			if failed == nil && i < end {
				if failed = context.Cause(ctx); failed == nil && begin != nil {
					failed = safely(func() error { return begin(l, i) })
				}
				next++
			}
			err := failed
			mu.Unlock()
			if err != nil {
				cancel(err)
			}
			if err != nil || i >= end {
				return
			}
			// The error is seen, and the context cancelled, at the next turn of this loop.
			if err := safely(func() error { return do(ctx, l, i) }); err != nil {
				mu.Lock()
				failed = cmp.Or(failed, err)
				mu.Unlock()
			}
		}
	}
	var others sync.WaitGroup
	for _, l := range all[1:] {
		others.Go(func() {
			labels.Transfer.Set()
			work(l)
		})
	}
	work(all[0])
	others.Wait()
	return failed
}

// borrow returns a lane with its memory, or nil if there is none now and wait is not set. It waits
// for a block and then for a chunk, each until ctx ends. The caller must call the lane's free.
//
// The memory of a block is from the host space of the node, or of the first one that has another
// node, or from the heap. No batch is moved to make room for it: that move would wait for a block.
func (w *lanes) borrow(ctx context.Context, wait bool) (*lane, error) {
	l, s := &lane{free: func() {}}, &w.b.Scratch
	if w.blocks {
		select {
		case s.lent <- struct{}{}:
		default:
			if !wait {
				return nil, nil
			}
			select {
			case s.lent <- struct{}{}:
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
		}
		// The right to a block is taken; now find memory for it.
		var near *tier.Space
		if s.from != nil {
			for _, h := range s.from.Spaces().InTier(tier.Host) {
				if near == nil || near.Node != w.node && h.Node == w.node {
					near = h
				}
			}
		}
		var block []byte
		if near != nil && MinBlocks*BlockSize <= near.State().Limit/smallShare {
			// TryReserve does not wait. With NoClearing the allocation moves no batches out of the
			// way.
			o := reservation.Options{NoClearing: true}
			r, err := s.from.TryReserve(reservation.Specific(near.ID()), BlockSize, &o)
			if err == nil {
				buf, err := r.Alloc(BlockSize)
				if err = errors.Join(err, r.Release()); err == nil {
					// Without cuts the memory is in one piece.
					block = buf.Memory().(tier.HostMemory).Extents()[0]
					l.free = func() {
						_ = buf.Release() // the only one
						<-s.lent
					}
				} else {
					_ = buf.Release()
				}
			}
		}
		if block == nil {
			p, ok := s.heap.Get().(*[]byte)
			if !ok {
				// Direct I/O needs memory that begins at a page.
				made := make([]byte, BlockSize+tier.Page)
				made = made[-extent.Address(made)%tier.Page:][:BlockSize]
				p = &made
			}
			block, l.free = *p, func() {
				s.heap.Put(p)
				<-s.lent
			}
		}
		l.stored, l.raw = block[:storedRoom:storedRoom], block[storedRoom:BlockSize:BlockSize]
	}
	if w.chunks == nil {
		return l, nil
	}
	chunk, err := w.chunks.Borrow(ctx, wait)
	// A lane without the chunk that it needs is none: its block goes back.
	freeBlock := l.free
	if chunk == nil {
		freeBlock()
		if !wait { // the transfer goes on with the lanes that it has
			err = nil
		}
		return nil, err
	}
	l.chunk, l.free = chunk, func() {
		w.chunks.Return(chunk)
		freeBlock()
	}
	return l, nil
}
