package transfer

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/address"
	"github.com/spillway-db/spillway/internal/fairqueue"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/pump"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

const (
	// BlockSize is how long a lane's block is: a run, compressed or not, and a frame, each on
	// pages.
	BlockSize = payload.RunSize + payload.RunSize/4 + payload.FrameSize
	// layingSize is that of a lane that lays out, too: a block, and a run as it is.
	layingSize = BlockSize + payload.RunSize
	// ScratchShare is the part of host memory that all blocks may take together: an eighth, as
	// staging does. leastBlocks are had in any case: one compresses while the other is written.
	ScratchShare = 8
	LeastBlocks  = 2
	// mostBlocks are enough where there is much memory, or two for each processor: two transfers
	// at full depth.
	mostBlocks = 2 * StagedUnderWay
	// ledgerShare is the part of a space that blocks may take of it; more comes from the heap.
	ledgerShare = 4
)

// scratch lends the memory that runs are compressed and uncompressed in: no more at a time
// than a share of host memory. As far as there is room it is drawn from a host space, and so
// in its ledger, and it goes back at the end of each transfer. Where there is none it is of the
// heap, because room is made by transfers that need scratch.
//
// A waiter for scratch waits for transfers that have some. Those wait for chunks, disks and
// devices, and for nothing else, so this ends; first come, first served. The zero value lends
// leastBlocks of the heap. It is safe for concurrent use.
type scratch struct {
	Mu    sync.Mutex // a leaf: nothing is called under it
	most  int64      // bytes
	Lent  int64
	waits fairqueue.Queue[*scratchWait]
	hosts []*hostScratch

	heap sync.Pool // *[]byte of layingSize; what is idle is the collector's
}

// scratchWait is a wait for scratch.
type scratchWait struct {
	bytes int64
	done  chan struct{} // closed when they are lent
}

// hostScratch is a host space that blocks are drawn from.
type hostScratch struct {
	space *tier.Space
	from  *reservation.Manager
	drawn atomic.Int64
}

// block is lent memory in one piece, which begins on a page.
type block struct {
	p    []byte
	back func()
}

// Bind sets from which host spaces blocks are drawn. It is called before the first borrow.
func (s *scratch) Bind(m *reservation.Manager) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	s.hosts = s.hosts[:0]
	total := int64(0)
	for _, h := range m.Spaces().InTier(tier.Host) {
		s.hosts = append(s.hosts, &hostScratch{space: h, from: m})
		total += h.Limit()
	}
	s.most = min(total/ScratchShare, int64(max(mostBlocks, 2*runtime.GOMAXPROCS(0)))*BlockSize)
}

// borrow waits for n bytes near a NUMA node. The caller must give them back.
func (s *scratch) borrow(ctx context.Context, node int, n int64) (*block, error) {
	s.Mu.Lock()
	if s.tryLocked(n) {
		s.Mu.Unlock()
		return s.draw(node, n), nil
	}
	w := &scratchWait{n, make(chan struct{})}
	place := s.waits.Push(w)
	s.Mu.Unlock()
	select {
	case <-w.done:
		return s.draw(node, n), nil
	case <-ctx.Done():
	}
	s.Mu.Lock()
	gaveUp := place.Waits() // else the bytes were lent at the same moment
	if gaveUp {
		place.Remove()
		s.grantLocked() // those behind it may need less
	}
	s.Mu.Unlock()
	if gaveUp {
		return nil, context.Cause(ctx)
	}
	return s.draw(node, n), nil
}

// tryLocked lends n bytes if they are there and there are no waiters.
func (s *scratch) tryLocked(n int64) bool {
	ok := s.waits.Len() == 0 && s.fitsLocked(n)
	if ok {
		s.Lent += n
	}
	return ok
}

// tryBorrow is borrow without waiting. It does not pass waiters.
func (s *scratch) tryBorrow(node int, n int64) (*block, bool) {
	s.Mu.Lock()
	ok := s.tryLocked(n)
	s.Mu.Unlock()
	if !ok {
		return nil, false
	}
	return s.draw(node, n), true
}

// wanted reports whether there are waiters.
func (s *scratch) wanted() bool {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	return s.waits.Len() > 0
}

func (s *scratch) fitsLocked(n int64) bool {
	return s.Lent == 0 || s.Lent+n <= max(s.most, LeastBlocks*BlockSize)
}

func (s *scratch) grantLocked() {
	for place := range s.waits.All() {
		w := place.Value
		if !s.fitsLocked(w.bytes) {
			return
		}
		place.Remove()
		s.Lent += w.bytes
		close(w.done)
	}
}

func (s *scratch) giveBack(n int64) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	s.Lent -= n
	s.grantLocked()
}

// draw returns the memory of n bytes that are lent.
func (s *scratch) draw(node int, n int64) *block {
	s.Mu.Lock()
	hosts := s.hosts
	s.Mu.Unlock()
	for _, near := range []bool{true, false} {
		for _, h := range hosts {
			if (h.space.Node() == node) != near {
				continue
			}
			if p, free := h.draw(n); p != nil {
				return &block{p, func() { free(); s.giveBack(n) }}
			}
		}
	}
	p, ok := s.heap.Get().(*[]byte)
	if !ok {
		made := make([]byte, layingSize+tier.Page)
		made = made[-address.Of(made)%tier.Page:][:layingSize]
		p = &made
	}
	return &block{(*p)[:n:n], func() { s.heap.Put(p); s.giveBack(n) }}
}

// draw returns n bytes of the space, if there is room; else nil.
func (h *hostScratch) draw(n int64) (p []byte, free func()) {
	if h.drawn.Add(n) > h.space.Limit()/ledgerShare {
		h.drawn.Add(-n)
		return nil, nil
	}
	buf, p := h.alloc(n)
	if p == nil {
		h.drawn.Add(-n)
		return nil, nil
	}
	return p, func() {
		_ = buf.Release() // the only one
		h.drawn.Add(-n)
	}
}

// alloc returns n bytes in one piece, and nil if there are none or their pool fails. No batch is
// moved to make one: that move would wait for scratch.
func (h *hostScratch) alloc(n int64) (buf *tier.Buffer, p []byte) {
	err := safely(func() error {
		r, err := h.from.TryReserve(reservation.Specific(h.space.ID()), n, reservation.WithoutClearing())
		if err != nil {
			return err
		}
		buf, err = r.Alloc(n)
		return errors.Join(err, r.Release())
	})
	if err == nil {
		err = safely(func() error { p = buf.Memory().(tier.HostMemory).Extents()[0]; return nil })
	}
	if err != nil {
		_ = buf.Release() // it is not used then
		return nil, nil
	}
	return buf, p
}

// lane is what one of several goroutines of a transfer works with. It has its block
// from the beginning to the end, and waits for at most one chunk of the pinned ones with it: so
// lanes of several transfers do not hold each other up for ever.
type lane struct {
	b     *Builtin
	pool  Staging
	chunk []byte // pinned; nil until it is needed
	block *block
}

// inLanes calls f for each of n runs, in as many lanes as there is scratch for, and one at
// least.
func (b *Builtin) inLanes(ctx context.Context, node, n int, f func(ctx context.Context, l *lane, run int) error) error {
	return b.inLanesOf(ctx, BlockSize, node, n, nil, f)
}

// inLanesOf is inLanes for lanes with so many bytes of scratch. begin, which may be nil, is called
// before f, in the order of the runs and one at a time.
func (b *Builtin) inLanesOf(ctx context.Context, size int64, node, n int, begin func(l *lane, run int) error,
	f func(ctx context.Context, l *lane, run int) error) error {
	if n == 0 {
		return nil
	}
	pool, err := b.Staging(node)
	if err != nil {
		return err
	}
	job := pump.Job[*lane]{Pieces: n, Lanes: StagedUnderWay, Pool: &lanes{b, pool, node, size}, End: f}
	if begin != nil {
		job.Begin = func(_ context.Context, l *lane, run int) (func() error, error) { return nil, begin(l, run) }
	}
	return run(ctx, job)
}

// lanes is a pump.Pool of scratch. A lane that has a run has its scratch, so that it can wait for
// lanes that took theirs before.
type lanes struct {
	b    *Builtin
	pool Staging
	node int
	size int64
}

func (p *lanes) Borrow(ctx context.Context) (*lane, error) {
	block, err := p.b.Scratch.borrow(ctx, p.node, p.size)
	return &lane{b: p.b, pool: p.pool, block: block}, err
}

func (p *lanes) TryBorrow() (*lane, bool) {
	block, ok := p.b.Scratch.tryBorrow(p.node, p.size)
	return &lane{b: p.b, pool: p.pool, block: block}, ok
}

func (p *lanes) Yield(l *lane) (*lane, bool) {
	if !p.b.Scratch.wanted() {
		return l, true
	}
	l.close()
	return nil, false
}

func (p *lanes) Return(l *lane) { l.close() }

// close gives back what the lane has.
func (l *lane) close() {
	if l.chunk != nil {
		l.pool.Return(l.chunk)
		l.chunk = nil
	}
	if l.block != nil {
		l.block.back()
		l.block = nil
	}
}

// pinned returns the lane's chunk.
func (l *lane) pinned(ctx context.Context) (_ []byte, err error) {
	if l.chunk == nil {
		l.chunk, err = l.pool.Borrow(ctx)
	}
	return l.chunk, err
}

// memory returns the lane's own memory, which begins on a page: room for a run, and behind it for
// a frame.
func (l *lane) memory() (run, frame []byte) {
	const at = BlockSize - payload.FrameSize
	return l.block.p[:at:at], l.block.p[at:BlockSize:BlockSize]
}

// spare is memory's room for a run, while there is no run in it.
func (l *lane) spare() []byte {
	run, _ := l.memory()
	return run
}

// run returns memory for a run beside the other, of a lane that lays out.
func (l *lane) run() []byte { return l.block.p[BlockSize:layingSize] }
