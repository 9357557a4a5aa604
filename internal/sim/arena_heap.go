//go:build !linux || race

package sim

import (
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/ahead"
)

// arena is the device's memory: on the heap, where the race detector sees it.
type arena struct {
	bytes   []byte
	touched atomic.Int64 // always 0
}

func newArena(size int64) (*arena, error) { return &arena{bytes: make([]byte, size)}, nil }

func (a *arena) close() error { return nil }

// touch does nothing: the heap is touched by the runtime.
func (a *arena) touch(*ahead.Window, <-chan struct{}) {}
