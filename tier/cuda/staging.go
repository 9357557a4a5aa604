package cuda

import (
	"cmp"
	"fmt"
	"math/bits"
	"slices"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

const (
	smallestChunk = 64      // so that two never share a line of the caches
	blockBytes    = 1 << 20 // what small chunks are cut from
	wordBytes     = 4
	// stagingRest is how much is kept when nothing is under way: what may wait for an event in each
	// direction. To pin that anew at each copy would take longer than the copy.
	stagingRest = 2 * mostStaged
)

// staging is pinned memory by way of which bytes go from and to memory that is not pinned. Its
// chunks are as long as powers of two. It grows with what is under way, and is given back except
// for a rest when nothing is any more: not earlier, or what is under way all the time would be
// pinned all the time.
type staging struct {
	dev *gpu

	mu struct {
		lockrank.Mutex[lockrank.Device]
		blocks []*block     // by address
		rooms  [64][]*block // those that are not full, by the logarithm of a chunk's length
		bytes  int64        // of all blocks
		out    int          // chunks in use
		words  int          // of these, those that streams have for as long as they are open
	}
}

// block is what the driver has allocated in one piece, for chunks of one length.
type block struct {
	mem  []byte
	k    int // the logarithm of that
	cut  int // how much of mem was made into chunks so far
	idle [][]byte
	out  int
	gone bool // to be given back
}

func (b *block) addr() uintptr { return cuda.AddressOf(b.mem) }

// full reports that each of the block's chunks is in use.
func (b *block) full() bool { return len(b.idle) == 0 && b.cut == len(b.mem) }

// take returns a chunk of a block that is not full.
func (b *block) take() []byte {
	if n := len(b.idle); n > 0 {
		chunk := b.idle[n-1]
		b.idle = b.idle[:n-1]
		return chunk
	}
	begin := b.cut
	b.cut += 1 << b.k
	return b.mem[begin:b.cut:b.cut]
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
	err := g.dev.dev.Here(func(c *cuda.Calls) (err error) { at, err = c.AllocHost(size); return err })
	if err != nil {
		return nil, fmt.Errorf(
			"cuda: pinning %d bytes for copies of memory that is not pinned: %w: %w",
			size,
			tier.ErrNoSpace,
			err,
		)
	}
	b := &block{mem: cuda.HostBytes(at, size), k: k}
	g.mu.Lock()
	defer g.mu.Unlock()
	i, _ := g.placeLocked(at)
	g.mu.blocks = slices.Insert(g.mu.blocks, i, b)
	g.mu.rooms[k] = append(g.mu.rooms[k], b)
	g.mu.bytes += size
	return g.takeLocked(k)[:n], nil
}

// placeLocked returns where the block that begins at addr is, or would be.
func (g *staging) placeLocked(addr uintptr) (int, bool) {
	return slices.BinarySearchFunc(
		g.mu.blocks,
		addr,
		func(b *block, addr uintptr) int { return cmp.Compare(b.addr(), addr) },
	)
}

func (g *staging) reuse(k int) []byte {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.takeLocked(k)
}

// takeLocked returns a chunk, nil if none is idle.
func (g *staging) takeLocked(k int) []byte {
	room := g.mu.rooms[k]
	if len(room) == 0 {
		return nil
	}
	b := room[len(room)-1]
	chunk := b.take()
	if b.full() {
		g.mu.rooms[k] = room[:len(room)-1]
	}
	b.out++
	g.mu.out++
	return chunk
}

// word returns a word for a stream to have; it is not counted as under way.
func (g *staging) word() ([]byte, error) {
	b, err := g.get(wordBytes)
	if err == nil {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.mu.words++
	}
	return b, err
}

// putWord takes a word back.
func (g *staging) putWord(b []byte) {
	g.mu.Lock()
	g.mu.words--
	g.mu.Unlock()
	g.put(b)
}

// put takes a chunk back.
func (g *staging) put(chunk []byte) {
	g.mu.Lock()
	i, exact := g.placeLocked(cuda.AddressOf(chunk))
	if !exact {
		i--
	}
	b := g.mu.blocks[i]
	if b.full() {
		g.mu.rooms[b.k] = append(g.mu.rooms[b.k], b)
	}
	b.idle = append(b.idle, chunk[:cap(chunk)])
	b.out--
	g.mu.out--
	var surplus []*block
	if g.mu.out == g.mu.words && g.mu.bytes > stagingRest {
		surplus = g.surplusLocked()
	}
	g.mu.Unlock()
	if len(surplus) > 0 {
		// Not here, which may be the device's thread: a driver may wait for the GPU before it
		// frees.
		g.dev.waits.Go(func() { // ends with the driver's calls; the device's Close waits for it
			labels.GPU.Set()
			_ = g.dev.dev.Surely(
				func(c *cuda.Calls) error { return free(c, surplus) },
			) // refused, it goes with the context
		})
	}
}

// drop takes back the chunks of work that was not put on a stream.
func (g *staging) drop(work due) {
	for _, b := range work.spent {
		g.put(b)
	}
	for _, o := range work.outs {
		g.put(o.from)
	}
	for _, x := range work.sums {
		g.put(x.from)
	}
}

// surplusLocked takes out blocks that are not in use, until no more than the rest is left.
func (g *staging) surplusLocked() (surplus []*block) {
	for _, b := range g.mu.blocks {
		if b.gone = b.out == 0 && g.mu.bytes > stagingRest; b.gone {
			surplus = append(surplus, b)
			g.mu.bytes -= int64(len(b.mem))
		}
	}
	gone := func(b *block) bool { return b.gone }
	g.mu.blocks = slices.DeleteFunc(g.mu.blocks, gone)
	for k := range g.mu.rooms {
		g.mu.rooms[k] = slices.DeleteFunc(g.mu.rooms[k], gone)
	}
	return surplus
}

func free(c *cuda.Calls, blocks []*block) error {
	var errs []error
	for _, b := range blocks {
		errs = append(errs, c.FreeHost(b.addr()))
	}
	return firstOf(errs)
}

func (g *staging) close(c *cuda.Calls) error {
	g.mu.Lock()
	blocks := g.mu.blocks
	g.mu.blocks, g.mu.rooms = nil, [64][]*block{}
	g.mu.Unlock()
	return free(c, blocks)
}
