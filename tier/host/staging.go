package host

import (
	"context"
	"fmt"

	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// Staging lends chunks of one pinned buffer, for moves that pass through host
// memory a chunk at a time. Chunks are lent in no order; those who wait are served
// in the order in which they came. It is safe for concurrent use.
type Staging struct {
	buf   *tier.Buffer
	chunk int64
	count int
	free  chan []byte
	done  chan struct{} // closed by Close

	mu struct {
		lockrank.Mutex[lockrank.Backend]
		lent   map[*byte]bool // by first byte; false: here
		out    int
		closed bool
	}
}

// NewStaging cuts buf, a buffer in a host space, into chunks of chunk bytes, a
// multiple of 4096 above 0; it panics if these are not what they must be. What an
// extent of buf has left over is not used, so an owner that wants all of it allows
// buf to be split at multiples of chunk only. Chunks begin at a multiple of 4096, as
// direct I/O wants it, if buf is a multiple of that, or above 8 KiB, long. The staging
// owns buf.
func NewStaging(buf *tier.Buffer, chunk int64) *Staging {
	if chunk <= 0 || chunk%tier.Page != 0 {
		panic(fmt.Sprintf("host: staging chunks of %d bytes: want a multiple of %d", chunk, tier.Page))
	}
	s := &Staging{buf: buf, chunk: chunk, done: make(chan struct{})}
	s.mu.lent = make(map[*byte]bool)
	var chunks [][]byte
	if buf != nil { // a buffer of 0 bytes is nil
		for _, e := range buf.Memory().(tier.HostMemory).Extents() {
			for ; int64(len(e)) >= chunk; e = e[chunk:] {
				chunks = append(chunks, e[:chunk:chunk])
			}
		}
	}
	s.count = len(chunks)
	s.free = make(chan []byte, s.count)
	for _, c := range chunks {
		s.mu.lent[&c[0]] = false
		s.free <- c
	}
	return s
}

// Chunk returns the length of a chunk in bytes.
func (s *Staging) Chunk() int64 { return s.chunk }

// Count returns how many chunks there are, lent or not.
func (s *Staging) Count() int { return s.count }

// Borrow waits for a chunk. The caller must Return it once, with nothing working
// on it any more. After Close it returns tier.ErrClosed; where there is no chunk to
// wait for, a *tier.NoSpaceError.
func (s *Staging) Borrow(ctx context.Context) ([]byte, error) {
	if s.count == 0 {
		return nil, &tier.NoSpaceError{Space: s.space(), Requested: s.chunk, Available: s.buf.Size(), Hint: "a larger staging buffer"}
	}
	select { // a chunk that is here is had also if ctx has ended
	case c := <-s.free:
		return s.lend(c)
	default:
	}
	select {
	case c := <-s.free:
		return s.lend(c)
	case <-s.done:
		return nil, tier.ErrClosed
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// TryBorrow lends a chunk if one is here now, under the same terms.
func (s *Staging) TryBorrow() ([]byte, bool) {
	select {
	case c := <-s.free:
		c, err := s.lend(c)
		return c, err == nil
	default:
		return nil, false
	}
}

func (s *Staging) space() tier.ID {
	if s.buf == nil {
		return tier.ID{Kind: tier.Host}
	}
	return s.buf.Space().ID()
}

// lend notes that c is out, unless Close came first.
func (s *Staging) lend(c []byte) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return nil, tier.ErrClosed
	}
	s.mu.lent[&c[0]] = true
	s.mu.out++
	return c, nil
}

// Return gives a borrowed chunk back: the slice that Borrow returned, or any that
// starts where it does. Anything else is a panic.
func (s *Staging) Return(c []byte) {
	closed, last := s.takeBack(c)
	switch {
	case last:
		_ = s.buf.Release() // the only release: Close left it to the last chunk
	case !closed:
		s.free <- c[:s.chunk:s.chunk] // never blocks: there is room for all
	}
}

// takeBack notes that c is here again. last says that the caller must release the
// buffer.
func (s *Staging) takeBack(c []byte) (closed, last bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if cap(c) == 0 || !s.mu.lent[&c[:1][0]] {
		panic("host: a chunk was returned that is not borrowed")
	}
	s.mu.lent[&c[:1][0]] = false
	s.mu.out--
	return s.mu.closed, s.mu.closed && s.mu.out == 0
}

// Close wakes those who wait, with tier.ErrClosed, and releases the buffer. If
// chunks are still borrowed it says so, and the return of the last one releases the
// buffer. A second Close returns tier.ErrClosed.
func (s *Staging) Close() error {
	s.mu.Lock()
	if s.mu.closed {
		s.mu.Unlock()
		return tier.ErrClosed
	}
	s.mu.closed = true
	out := s.mu.out
	s.mu.Unlock()
	close(s.done)
	if out > 0 {
		return fmt.Errorf("host: staging closed while %d of %d chunks are borrowed", out, s.count)
	}
	return s.buf.Release()
}
