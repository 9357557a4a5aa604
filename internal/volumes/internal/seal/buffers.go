package seal

import (
	"errors"
	"sync"

	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// Buffers are what sealed requests pass through, each with room for one and a page for a tag.
// They are mapped memory of huge pages: a direct request of 2 MiB from small pages is cut into
// many by the kernel, and is read at half the speed (1.1 and 2.5 GiB/s; BenchmarkEncrypt of
// package disk). They stay until Unmap. Where there is no such memory, or more are in use than
// Slabs × Slab, they are of the heap.
type Buffers struct {
	Request int64      // the most bytes of one
	Slab    int        // buffers that are mapped together
	Slabs   int        // at most
	Heap    *sync.Pool // of *[]byte, longer than Request and a page

	mu struct {
		lockrank.Mutex[lockrank.Device]
		free  []*[]byte // used last, taken first: it is still in the caches
		slabs [][]byte
		begun int // slabs, with those being mapped
	}
}

func (b *Buffers) stride() int64 { return b.Request + tier.Page }

// take returns a buffer, which the caller must put back.
func (b *Buffers) take() *[]byte {
	b.mu.Lock()
	if n := len(b.mu.free); n > 0 {
		p := b.mu.free[n-1]
		b.mu.free = b.mu.free[:n-1]
		b.mu.Unlock()
		return p
	}
	more := b.mu.begun < b.Slabs
	if more {
		b.mu.begun++
	}
	b.mu.Unlock()
	if more {
		if p := b.mapSlab(); p != nil {
			return p
		}
	}
	return b.Heap.Get().(*[]byte)
}

func (b *Buffers) put(p *[]byte) {
	if int64(len(*p)) != b.stride() { // of the heap
		b.Heap.Put(p)
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.free = append(b.mu.free, p)
}

// mapSlab maps more buffers and returns one of them; nil if it cannot.
func (b *Buffers) mapSlab() *[]byte {
	memory, slab := mapHuge(int64(b.Slab) * b.stride())
	if slab == nil {
		return nil
	}
	all := make([]*[]byte, b.Slab)
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

// Mapped returns how many bytes are mapped.
func (b *Buffers) Mapped() (n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, s := range b.mu.slabs {
		n += int64(len(s))
	}
	return n
}

// Unmap ends all that was mapped. No buffer is in use, nor will be.
func (b *Buffers) Unmap() error {
	b.mu.Lock()
	slabs := b.mu.slabs
	b.mu.slabs, b.mu.free = nil, nil
	b.mu.Unlock()
	var all []error
	for _, s := range slabs {
		all = append(all, unmapHuge(s))
	}
	return errors.Join(all...)
}
