package transfer

import (
	"context"
	"errors"
	"runtime"
	"sync"

	"github.com/spillway-db/spillway/internal/address"
	"github.com/spillway-db/spillway/internal/fairqueue"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

const (
	// storedRoom is how long a run may become while it is compressed, before it is stored as it is.
	storedRoom = payload.RunSize + payload.RunSize/4
	// BlockSize is how long a lane's block is: a run as it is stored, and a run as it is, each on
	// pages.
	BlockSize = storedRoom + payload.RunSize
	// ScratchShare is the part of host memory that all blocks may take together: an eighth, as
	// staging does. LeastBlocks are had in any case: one compresses while the other is written.
	ScratchShare = 8
	LeastBlocks  = 2
	// maxBlocks are enough where there is much memory, or two for each processor: two transfers
	// at full depth.
	maxBlocks = 2 * StagedUnderWay
	// smallShare is the part of a host space that LeastBlocks may be at most. A smaller space has no
	// room to spare, and batches would be evicted for them: blocks come from the heap then.
	smallShare = 3
)

// scratch lends the blocks that runs are compressed and uncompressed in: no more at a time than a
// share of host memory. As far as there is room they are drawn from a host space, and so in its
// books, and go back at the end of each transfer. Where there is none they are of the heap, because
// room is made by transfers that need scratch.
//
// A waiter for scratch waits for transfers that have some. Those wait for chunks, disks and
// devices, and for nothing else, so this ends; first come, first served. The zero value lends
// LeastBlocks of the heap. It is safe for concurrent use.
type scratch struct {
	Mu    sync.Mutex // a leaf: nothing is called under it
	max   int64      // bytes
	Lent  int64
	waits fairqueue.Queue[chan struct{}] // closed when a block is lent
	from  *reservation.Manager           // of the host spaces that blocks are drawn from; nil: there are none

	heap sync.Pool // *[]byte of BlockSize; what is idle is the collector's
}

// block is lent memory in one piece, which begins on a page.
type block struct {
	stored, raw []byte // a run as it is stored, and as it is
	free        func()
}

// Bind sets from which host spaces blocks are drawn. It is called before the first borrow.
func (s *scratch) Bind(m *reservation.Manager) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	s.from = m
	total := int64(0)
	for _, h := range m.Spaces().InTier(tier.Host) {
		total += h.Limit()
	}
	s.max = min(total/ScratchShare, int64(max(maxBlocks, 2*runtime.GOMAXPROCS(0)))*BlockSize)
}

// tryBorrow lends a block near a NUMA node, if there is one and there are no waiters.
func (s *scratch) tryBorrow(node int) (*block, bool) {
	s.Mu.Lock()
	ok := s.waits.Len() == 0 && s.fitsLocked()
	if ok {
		s.Lent += BlockSize
	}
	s.Mu.Unlock()
	if !ok {
		return nil, false
	}
	return s.draw(node), true
}

// borrow waits for a block near a NUMA node. The caller must give it back.
func (s *scratch) borrow(ctx context.Context, node int) (*block, error) {
	if b, ok := s.tryBorrow(node); ok {
		return b, nil
	}
	s.Mu.Lock()
	lent := make(chan struct{})
	place := s.waits.Push(lent)
	s.grantLocked() // one may have come back
	s.Mu.Unlock()
	select {
	case <-lent:
		return s.draw(node), nil
	case <-ctx.Done():
	}
	s.Mu.Lock()
	gaveUp := place.Waits() // else the block was lent at the same moment
	if gaveUp {
		place.Remove()
	}
	s.Mu.Unlock()
	if gaveUp {
		return nil, context.Cause(ctx)
	}
	return s.draw(node), nil
}

// wanted reports whether there are waiters.
func (s *scratch) wanted() bool {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	return s.waits.Len() > 0
}

func (s *scratch) fitsLocked() bool { return s.Lent+BlockSize <= max(s.max, LeastBlocks*BlockSize) }

func (s *scratch) grantLocked() {
	for place := range s.waits.All() {
		if !s.fitsLocked() {
			return
		}
		place.Remove()
		s.Lent += BlockSize
		close(place.Value)
	}
}

func (s *scratch) giveBack(b *block) {
	b.free()
	s.Mu.Lock()
	defer s.Mu.Unlock()
	s.Lent -= BlockSize
	s.grantLocked()
}

// draw returns the memory of a block that is lent: of the host space of the node, of another one, or
// of the heap. It asks each host space that is large enough for one piece, and moves no batch to make
// room: that move would wait for scratch.
func (s *scratch) draw(node int) *block {
	s.Mu.Lock()
	from := s.from
	s.Mu.Unlock()
	var all, hosts []*tier.Space
	if from != nil {
		all = from.Spaces().InTier(tier.Host)
	}
	for _, near := range []bool{true, false} {
		for _, h := range all {
			if (h.Node() == node) == near && LeastBlocks*BlockSize <= h.Limit()/smallShare {
				hosts = append(hosts, h)
			}
		}
	}
	for _, h := range hosts {
		var buf *tier.Buffer
		var p []byte
		err := safely(func() error {
			r, err := from.TryReserve(reservation.Specific(h.ID()), BlockSize, reservation.WithoutClearing())
			if err != nil {
				return err
			}
			buf, err = r.Alloc(BlockSize)
			if err = errors.Join(err, r.Release()); err == nil {
				p = buf.Memory().(tier.HostMemory).Extents()[0]
			}
			return err
		})
		if err == nil {
			return newBlock(p, func() { _ = buf.Release() }) // the only one
		}
		_ = buf.Release()
	}
	p, ok := s.heap.Get().(*[]byte)
	if !ok {
		made := make([]byte, BlockSize+tier.Page)
		made = made[-address.Of(made)%tier.Page:][:BlockSize]
		p = &made
	}
	return newBlock(*p, func() { s.heap.Put(p) })
}

func newBlock(p []byte, free func()) *block {
	return &block{stored: p[:storedRoom:storedRoom], raw: p[storedRoom:BlockSize:BlockSize], free: free}
}

// lane is what one of several goroutines of a transfer works with. A lane with a block has it from
// the beginning to the end, and waits for at most one pinned chunk with it: so lanes of several
// transfers do not hold each other up for ever.
type lane struct {
	chunk []byte // pinned; nil until it is needed
	block *block // nil unless the transfer compresses or uncompresses
}

// lanes is a pump.Pool of lanes, with chunks or with blocks. A lane that has a run has its block, so
// that it can wait for lanes that took theirs before.
type lanes struct {
	b      *Builtin
	chunks Staging
	node   int
	blocks bool
}

func (p *lanes) Borrow(ctx context.Context) (*lane, error) {
	l := new(lane)
	var err error
	if p.blocks {
		l.block, err = p.b.Scratch.borrow(ctx, p.node)
	} else {
		_, err = p.pinned(ctx, l)
	}
	return l, err
}

func (p *lanes) TryBorrow() (l *lane, ok bool) {
	l = new(lane)
	if p.blocks {
		l.block, ok = p.b.Scratch.tryBorrow(p.node)
	} else {
		l.chunk, ok = p.chunks.TryBorrow()
	}
	return l, ok
}

func (p *lanes) Yield(l *lane) (*lane, bool) {
	if p.blocks && !p.b.Scratch.wanted() {
		return l, true
	}
	p.Return(l)
	if p.blocks {
		return nil, false
	}
	return p.TryBorrow()
}

func (p *lanes) Return(l *lane) {
	if l.chunk != nil {
		p.chunks.Return(l.chunk)
	}
	if l.block != nil {
		p.b.Scratch.giveBack(l.block)
	}
	*l = lane{}
}

// pinned returns the lane's chunk.
func (p *lanes) pinned(ctx context.Context, l *lane) (_ []byte, err error) {
	if l.chunk == nil {
		l.chunk, err = p.chunks.Borrow(ctx)
	}
	return l.chunk, err
}
