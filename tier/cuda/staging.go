package cuda

import (
	"fmt"
	"math/bits"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

const (
	// shortestChunk is a page, the least that a driver pins.
	shortestChunk = 4 << 10
	// stagingRest is how much is kept when nothing is under way: what may wait for an event in each
	// direction. To pin that anew at each copy would take longer than the copy.
	stagingRest = 2 * maxStaged
)

// staging is pinned memory by way of which bytes go from and to memory that is not pinned. The
// driver allocates each chunk by itself, as long as a power of two. Chunks that are not in use are
// kept. All but a rest are given back when none is in use any more: not earlier, or what is under
// way all the time would be pinned all the time.
type staging struct {
	dev *gpu

	mu struct {
		lockrank.Mutex[lockrank.Device]
		idle  [64][][]byte // by the logarithm of their length
		bytes int64        // of all chunks
		used  int          // chunks in use, without the words of streams
	}
}

// get returns n > 0 bytes of pinned memory with any contents.
func (g *staging) get(n int64) ([]byte, error) {
	k := bits.Len64(uint64(max(n, shortestChunk) - 1))
	g.mu.Lock()
	if idle := g.mu.idle[k]; len(idle) > 0 {
		defer g.mu.Unlock()
		last := len(idle) - 1
		g.mu.idle[k] = idle[:last]
		g.mu.used++
		return idle[last][:n], nil
	}
	g.mu.Unlock()
	var chunk []byte
	err := g.dev.dev.Here(func(c *cuda.Calls) error {
		at, err := c.AllocHost(1 << k)
		if err == nil {
			chunk = cuda.HostBytes(at, 1<<k)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("cuda: pinning %d bytes for copies of memory that is not pinned: %w: %w",
			int64(1)<<k, tier.ErrNoSpace, err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.mu.bytes += 1 << k
	g.mu.used++
	return chunk[:n], nil
}

// put takes chunks back.
func (g *staging) put(chunks ...[]byte) {
	if len(chunks) == 0 {
		return
	}
	var surplus [][]byte
	g.mu.Lock()
	for _, b := range chunks {
		k := bits.Len(uint(cap(b) - 1))
		g.mu.idle[k] = append(g.mu.idle[k], b[:cap(b)])
	}
	g.mu.used -= len(chunks)
	if g.mu.used == 0 {
		surplus = g.takeIdleLocked(stagingRest)
	}
	g.mu.Unlock()
	if len(surplus) > 0 {
		// Not here, which may be the device's thread: a driver may wait for the GPU before it
		// frees.
		g.dev.waits.Go(func() { // ends with the driver's calls; the device's Close waits for it
			labels.GPU.Set()
			// Refused, it goes with the context.
			_ = g.dev.dev.Surely(func(c *cuda.Calls) error { return freeHost(c, surplus) })
		})
	}
}

// count changes how many chunks are in use. Streams call it for their words, which they have for as
// long as they are open: meanwhile the other chunks are to be given back. A word is put back, and
// not freed with its stream, because a driver may wait for the GPU before it frees, and so for
// streams that wait for others.
func (g *staging) count(n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.mu.used += n
}

// takeIdleLocked takes out chunks that are not in use, long ones first, until no more than rest
// bytes are left.
func (g *staging) takeIdleLocked(rest int64) (chunks [][]byte) {
	for k := len(g.mu.idle) - 1; k >= 0; k-- {
		for n := len(g.mu.idle[k]); n > 0 && g.mu.bytes > rest; n-- {
			chunks = append(chunks, g.mu.idle[k][n-1])
			g.mu.idle[k] = g.mu.idle[k][:n-1]
			g.mu.bytes -= 1 << k
		}
	}
	return chunks
}

func freeHost(c *cuda.Calls, chunks [][]byte) error {
	var errs []error
	for _, b := range chunks {
		errs = append(errs, c.FreeHost(extent.Address(b)))
	}
	return firstOf(errs)
}

// close gives everything up. No chunk is in use.
func (g *staging) close(c *cuda.Calls) error {
	g.mu.Lock()
	chunks := g.takeIdleLocked(0)
	g.mu.Unlock()
	return freeHost(c, chunks)
}
