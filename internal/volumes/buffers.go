package volumes

import (
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// buffers lends memory to requests whose bytes cannot go directly between the caller and the disk:
// unaligned ones, and all requests of a volume that encrypts. The memory is mapped huge pages, because
// the kernel splits a direct request of 2 MiB from small pages: it is then read at half the speed (1.1
// and 2.5 GiB/s; BenchmarkEncrypt). Up to kept buffers stay mapped for further requests. It is safe for
// concurrent use.
type buffers struct {
	length int64 // of a buffer, a multiple of a page
	kept   int

	mu struct {
		lockrank.Mutex[lockrank.Device]
		free []buffer // the last was used most recently, and is still in the caches
	}
}

// buffer is memory that begins on a page.
type buffer struct {
	bytes   []byte
	mapping []byte // nil: it is from the heap
}

const (
	// beyondRequest is the room of a buffer for the rest of a request's first and last block, and
	// for a tag.
	beyondRequest = 2*blockSize + tier.Page

	// EncryptionBuffers is how many bytes of buffers a volume that encrypts keeps by default.
	EncryptionBuffers = helpersPerDepth * DefaultDepth * (DefaultRequest + beyondRequest)
)

// borrow returns a buffer. The caller must give it back.
func (b *buffers) borrow() (p buffer) {
	b.mu.Lock()
	if n := len(b.mu.free); n > 0 {
		p, b.mu.free = b.mu.free[n-1], b.mu.free[:n-1]
	}
	b.mu.Unlock()
	if p.bytes == nil {
		p.bytes, p.mapping = mapHuge(b.length)
	}
	if p.bytes == nil {
		p.bytes = extent.Aligned(int(b.length))
	}
	return p
}

// giveBack takes a buffer back.
func (b *buffers) giveBack(p buffer) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.mu.free) < b.kept {
		b.mu.free = append(b.mu.free, p)
	} else {
		unmapHuge(p.mapping)
	}
}

// unmap ends all mappings. No buffer is in use.
func (b *buffers) unmap() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, p := range b.mu.free {
		unmapHuge(p.mapping)
	}
	b.mu.free = nil
}
