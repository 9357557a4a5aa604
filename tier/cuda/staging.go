package cuda

import (
	"fmt"
	"math/bits"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

const (
	smallestChunk = 64      // so that two never share a line of the caches
	blockBytes    = 1 << 20 // what small chunks are cut from
	wordBytes     = 4
)

// staging is pinned memory by way of which bytes go from and to memory that is not pinned. Its chunks are as
// long as powers of two. It grows with what is under way, and is given back when the device is closed.
type staging struct {
	dev *cuda.Device

	mu struct {
		lockrank.Mutex[lockrank.Device]
		idle   [64][][]byte // by the logarithm of their length
		blocks [][]byte     // what the driver has allocated
	}
}

// class returns the logarithm of the length of chunks for n bytes.
func class(n int64) int { return bits.Len64(uint64(max(n, smallestChunk) - 1)) }

// get returns n > 0 bytes of pinned memory with any contents.
func (g *staging) get(n int64) ([]byte, error) {
	k := class(n)
	if b := g.reuse(k); b != nil {
		return b[:n], nil
	}
	size := max(int64(1)<<k, blockBytes)
	var at uintptr
	err := g.dev.Here(func(c *cuda.Calls) (err error) { at, err = c.AllocHost(size); return err })
	if err != nil {
		return nil, fmt.Errorf("cuda: pinning %d bytes for copies of memory that is not pinned: %w: %w", size, tier.ErrNoSpace, err)
	}
	block := cuda.HostBytes(at, size)
	g.mu.Lock()
	defer g.mu.Unlock()
	g.mu.blocks = append(g.mu.blocks, block)
	for off := int64(1) << k; off < size; off += 1 << k {
		g.mu.idle[k] = append(g.mu.idle[k], block[off:off+1<<k:off+1<<k])
	}
	return block[: n : 1<<k], nil
}

func (g *staging) reuse(k int) []byte {
	g.mu.Lock()
	defer g.mu.Unlock()
	idle := g.mu.idle[k]
	if len(idle) == 0 {
		return nil
	}
	g.mu.idle[k] = idle[:len(idle)-1]
	return idle[len(idle)-1]
}

// put takes a chunk back.
func (g *staging) put(b []byte) {
	g.mu.Lock()
	defer g.mu.Unlock()
	k := class(int64(cap(b)))
	g.mu.idle[k] = append(g.mu.idle[k], b[:cap(b)])
}

func (g *staging) close(c *cuda.Calls) error {
	g.mu.Lock()
	blocks := g.mu.blocks
	g.mu.blocks, g.mu.idle = nil, [64][][]byte{}
	g.mu.Unlock()
	var errs []error
	for _, b := range blocks {
		errs = append(errs, c.FreeHost(cuda.AddressOf(b)))
	}
	return firstOf(errs)
}
