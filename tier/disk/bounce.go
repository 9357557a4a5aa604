package disk

import (
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// buffers are what an encrypted volume's requests pass through, each with room for one
// and a page for a tag. They are mapped memory of huge pages, Depth of them at a time, when
// so many are needed: a direct request of 2 MiB from small pages is cut into many by the
// kernel, and a volume that encrypts reads at half the speed (1.1 and 2.5 GiB/s; see
// BenchmarkEncrypt). They stay until the volume ends.
// Where there is no such memory, or more requests are under way than a volume has
// workers, they are of the heap.
type buffers struct {
	v *Volume

	mu struct {
		lockrank.Mutex[lockrank.Device]
		free  []*[]byte // used last, taken first: it is still in the caches
		slabs [][]byte
		begun int // slabs, with those being mapped
	}
}

// stride is how far buffers of a slab are apart.
func (b *buffers) stride() int64 { return b.v.cfg.Request + tier.Page }

// take returns a buffer, which the caller must put back.
func (b *buffers) take() *[]byte {
	b.mu.Lock()
	if n := len(b.mu.free); n > 0 {
		p := b.mu.free[n-1]
		b.mu.free = b.mu.free[:n-1]
		b.mu.Unlock()
		return p
	}
	more := b.mu.begun < workersPerDepth
	if more {
		b.mu.begun++
	}
	b.mu.Unlock()
	if more {
		if p := b.mapSlab(); p != nil {
			return p
		}
	}
	return b.v.bounces.Get().(*[]byte)
}

// put takes a buffer back.
func (b *buffers) put(p *[]byte) {
	if int64(len(*p)) != b.stride() { // of the heap, which are longer
		b.v.bounces.Put(p)
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.free = append(b.mu.free, p)
}

// mapSlab makes Depth more buffers and returns one of them; nil if it cannot.
func (b *buffers) mapSlab() *[]byte {
	n := int64(b.v.cfg.Depth)
	memory, slab := mapHuge(n * b.stride())
	if slab == nil {
		return nil
	}
	all := make([]*[]byte, n)
	for i := range all {
		p := memory[:b.stride():b.stride()]
		memory, all[i] = memory[b.stride():], &p
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.slabs = append(b.mu.slabs, slab)
	b.mu.free = append(b.mu.free, all[1:]...)
	return all[0]
}

// unmap ends all that was mapped. No buffer is in use, nor will be.
func (b *buffers) unmap() (err error) {
	b.mu.Lock()
	slabs := b.mu.slabs
	b.mu.slabs, b.mu.free = nil, nil
	b.mu.Unlock()
	for _, s := range slabs {
		err = also(err, unmapHuge(s))
	}
	return err
}
