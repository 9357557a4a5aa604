package volumes

import (
	"sync"

	"github.com/spillway-db/spillway/internal/address"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/volumes/internal/seal"
	"github.com/spillway-db/spillway/tier"
)

// buffers lends memory to requests whose bytes cannot go directly between the caller and the disk:
// unaligned ones, and all requests of a volume that encrypts. Of those at most mapped have buffers of
// mapped huge pages, because the kernel splits a direct request of 2 MiB from small pages: it is then
// read at half the speed (1.1 and 2.5 GiB/s; BenchmarkEncrypt). Further buffers are from the heap. The
// zero value maps nothing. It is safe for concurrent use.
type buffers struct {
	length int64 // of a buffer, a multiple of a page
	mapped int   // how many buffers to map when the first is borrowed
	heap   sync.Pool

	mu struct {
		lockrank.Mutex[lockrank.Device]
		free    [][]byte // mapped ones. The last was used most recently, and is still in the caches
		mapping []byte
		tried   bool
	}
}

const (
	// beyondRequest is the room of a buffer for the rest of a request's first and last block, and
	// for a tag.
	beyondRequest = 2*seal.BlockSize + tier.Page

	// EncryptionBuffers is how many bytes of buffers a volume that encrypts maps by default.
	EncryptionBuffers = helpersPerDepth * DefaultDepth * (DefaultRequest + beyondRequest)
)

// borrow returns a buffer that begins on a page. The caller must give it back.
func (b *buffers) borrow() []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.mu.tried {
		b.mu.tried = true
		var memory []byte
		if b.mapped > 0 {
			memory, b.mu.mapping = mapHuge(int64(b.mapped) * b.length)
		}
		for off := int64(0); off < int64(len(memory)); off += b.length {
			b.mu.free = append(b.mu.free, memory[off:off+b.length:off+b.length])
		}
	}
	if n := len(b.mu.free); n > 0 {
		p := b.mu.free[n-1]
		b.mu.free = b.mu.free[:n-1]
		return p
	}
	if p, ok := b.heap.Get().(*[]byte); ok {
		return *p
	}
	return address.Aligned(int(b.length))
}

// giveBack takes a buffer back.
func (b *buffers) giveBack(p []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	begin := address.Of(b.mu.mapping)
	if at := address.Of(p); begin <= at && at < begin+uintptr(len(b.mu.mapping)) {
		b.mu.free = append(b.mu.free, p)
	} else {
		b.heap.Put(&p)
	}
}

// unmap ends the mapping. No buffer is in use.
func (b *buffers) unmap() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	mapping := b.mu.mapping
	b.mu.free, b.mu.mapping = nil, nil
	if mapping == nil {
		return nil
	}
	return unmapHuge(mapping)
}
