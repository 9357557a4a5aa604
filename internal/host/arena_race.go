//go:build race || !(linux || darwin || freebsd)

package host

import (
	"errors"
	"runtime"

	"github.com/spillway-db/spillway/internal/extent"
)

// poison reports whether freed extents are made unreadable: the heap cannot be.
const poison = false

// onHeap says that the arena is Go memory.
const onHeap = true

// heap is memory of the Go heap, which the race detector sees.
type heap struct{ mem []byte }

func reserve(size int64) (Mapping, error) {
	whole := make([]byte, size+step)
	skip := (step - int64(extent.Address(whole)%step)) % step
	return &heap{whole[skip : skip+size : skip+size]}, nil
}

func (h *heap) Bytes() []byte { return h.mem }
func (h *heap) huge() error   { return nil }
func (h *heap) bind(int) error {
	return nil
}

// lock is refused: the collector's heap is not to be pinned.
func (h *heap) lock([]byte) error    { return errors.ErrUnsupported }
func (h *heap) unlock([]byte) error  { return nil }
func (h *heap) Touch([]byte) error   { runtime.Gosched(); return nil }
func (h *heap) discard([]byte) error { return nil }
func (h *heap) hide([]byte) error    { return nil }
func (h *heap) show([]byte) error    { return nil }
func (h *heap) Release() error       { return nil }
