// Package headroom divides the memory that the process may have: between the spaces of
// an engine, which are locked or touched ahead of use, and Go's heap.
//
//	limit = spaces + beside (code, stacks, page tables) + heap
//
// A process that takes more than its cgroup may have is ended by the kernel without a
// word. So what cannot fit is refused before anything is taken, the heap has a limit, and
// what is decoded asks before it grows.
//
// A Plan is a value; its methods may be called from several goroutines. Apply changes
// the process, and belongs to the command's own goroutine.
package headroom

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"time"

	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/topology"
)

const (
	// beside is what neither the spaces nor the heap have: measured in a cgroup it is
	// below 16 MiB, and page tables and bookkeeping of the kernel's grow with the memory.
	beside      = 16 << 20
	besideShare = 64

	// LeastHeap is the smallest heap with which the command does its work in batches of
	// a few MiB: measured, with the default flags, 40 MiB are enough.
	LeastHeap = 56 << 20

	// patience is how often, and pause how far apart, a full heap is looked at: two seconds
	// in all, in which a batch is compressed and written on a slow machine.
	patience = 40
	pause    = 50 * time.Millisecond

	// smallest is the smallest allocation that is worth a look at the heap.
	smallest = 128 << 10
)

// ErrTooSmall matches a *TooSmallError.
var ErrTooSmall = errors.New("the process may not have so much memory")

// TooSmallError reports that spaces leave too little of the process's memory. Sizes are in
// bytes.
type TooSmallError struct {
	Spaces int64  // what the spaces take
	Others int64  // what the command takes beside them and the heap
	Limit  int64  // what the process may have
	Source string // where the figure comes from
	Fit    int64  // how large the spaces may be; 0: no size fits
}

func (e *TooSmallError) Error() string {
	s := fmt.Sprintf(
		"the process may have %s of memory (%s), which is too little for the command",
		size.Approx(e.Limit),
		e.Source,
	)
	if e.Spaces > 0 {
		s += fmt.Sprintf(" with host memory and simulated GPU memory of %s together", size.Approx(e.Spaces))
	}
	if e.Others > 0 {
		s += fmt.Sprintf(", and %s for its own buffers", size.Approx(e.Others))
	}
	return s
}

// Is reports whether target is ErrTooSmall.
func (e *TooSmallError) Is(target error) bool { return target == ErrTooSmall }

// Plan says what the process's memory is for. The zero value has no limits.
type Plan struct {
	Heap int64 // bytes for Go's heap and runtime; 0: there is no limit
}

// Divide plans the memory that limits allow, beside spaces and others of so many bytes: see
// TooSmallError. Where the limit is not known the plan has none. It is a *TooSmallError if
// too little is left.
func Divide(limits topology.Limits, spaces, others int64) (Plan, error) {
	if limits.MemoryBytes <= 0 {
		return Plan{}, nil
	}
	room := limits.MemoryBytes - beside - limits.MemoryBytes/besideShare - others
	if spaces > room-LeastHeap {
		return Plan{}, &TooSmallError{
			Spaces: spaces, Others: others, Limit: limits.MemoryBytes, Source: limits.MemorySource,
			Fit: max(0, room-LeastHeap),
		}
	}
	return Plan{Heap: room - spaces}, nil
}

// Apply limits Go's heap as planned, and returns what ends that. A lower limit that is
// set already stays.
func (p Plan) Apply() (undo func()) {
	before := debug.SetMemoryLimit(-1)
	if p.Heap > 0 {
		debug.SetMemoryLimit(min(before, p.Heap))
	}
	return func() { debug.SetMemoryLimit(before) }
}

// Held returns how many bytes of decoded batches may wait to be put: the rest is for the
// one that is being decoded, and for what the work needs; 0: any.
func (p Plan) Held() int64 { return p.Heap / 4 }

// Admit waits until n more bytes of the heap may be taken. If what is in use does not become
// less, which moves under way may take a while for, it is a *FullError.
func (p Plan) Admit(n int64) error { return p.admit(n, heap{inUse, collect}) }

func (p Plan) admit(n int64, h heap) error {
	if p.Heap == 0 || n < smallest {
		return nil
	}
	used := h.inUse()
	for tries := 0; used > p.Heap-n; tries++ {
		if tries == patience {
			return &FullError{Requested: n, Used: used, Heap: p.Heap}
		}
		h.collect(tries)
		used = h.inUse()
	}
	return nil
}

// heap is Go's.
type heap struct {
	inUse   func() int64
	collect func(tries int)
}

// collect frees what nothing refers to any more. From the second try on it first waits, so that the
// users of the rest can release it. Pools give up what they keep in the second collection.
func collect(tries int) {
	if tries > 0 {
		time.Sleep(pause)
	} else {
		runtime.GC()
	}
	runtime.GC()
}

// ErrFull matches a *FullError.
var ErrFull = errors.New("the heap is full")

// FullError reports that the heap has no room for an allocation. Sizes are in bytes.
type FullError struct {
	Requested, Used, Heap int64
}

func (e *FullError) Error() string {
	return fmt.Sprintf(
		"it needs %s more of the process's memory at once, and of the %s beside the engine's spaces %s are in use",
		size.Approx(e.Requested),
		size.Approx(e.Heap),
		size.Approx(e.Used),
	)
}

// Is reports whether target is ErrFull.
func (e *FullError) Is(target error) bool { return target == ErrFull }

// inUse returns what the runtime has of the system less what it could use again: what a
// memory limit is compared with.
func inUse() int64 {
	s := []metrics.Sample{
		{
			Name: "/memory/classes/total:bytes",
		}, {Name: "/memory/classes/heap/released:bytes"}, {Name: "/memory/classes/heap/free:bytes"},
	}
	metrics.Read(s)
	var n [3]uint64
	for i := range s {
		if s[i].Value.Kind() == metrics.KindUint64 {
			n[i] = s[i].Value.Uint64()
		}
	}
	return int64(min(n[0]-n[1]-n[2], math.MaxInt64))
}
