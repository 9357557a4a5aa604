// Package headroom divides the memory of the process between the spaces of an engine, which locks or
// touches them before use, and Go's heap.
//
//	limit = spaces + overhead (code, stacks, page tables) + heap
//
// The kernel kills a process that exceeds its cgroup's limit, without a message. So Divide refuses
// spaces that cannot fit, the heap has a limit, and decoders call Admit before they allocate.
//
// A Plan is a value. Its methods are safe for concurrent use; only the command's own goroutine calls
// Apply, which changes the process.
package headroom

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"time"

	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/topology"
)

const (
	// The overhead is memory outside the spaces and the heap. Measured in a cgroup it is below 16 MiB;
	// page tables and other structures of the kernel grow with the memory, by 1/overheadShare of it.
	overhead      = 16 << 20
	overheadShare = 64

	// LeastHeap is the smallest heap with which the command can process batches of a few MiB. With
	// the default flags 40 MiB were enough.
	LeastHeap = 56 << 20

	// Admit checks a full heap patience times, with pauses between: for two seconds, in which a slow
	// machine compresses and writes a batch.
	patience = 40
	pause    = 50 * time.Millisecond

	// smallest is the smallest allocation for which Admit reads the size of the heap.
	smallest = 128 << 10
)

// TooSmallError reports that spaces leave too little of the process's memory. Sizes are in bytes.
type TooSmallError struct {
	Spaces int64  // of the spaces together
	Others int64  // of the command's other memory, outside the heap
	Limit  int64  // of the process's memory
	Source string // of Limit, such as "memory.max"
	Fit    int64  // the largest size of the spaces that fits; 0: none
}

func (e *TooSmallError) Error() string {
	s := fmt.Sprintf("the process may have %s of memory (%s), which is too little for the command",
		size.Approx(e.Limit), e.Source)
	if e.Spaces > 0 {
		s += fmt.Sprintf(" with host memory and simulated GPU memory of %s together", size.Approx(e.Spaces))
	}
	if e.Others > 0 {
		s += fmt.Sprintf(", and %s for its own buffers", size.Approx(e.Others))
	}
	return s
}

// Plan is a division of the process's memory. The zero value has no limits.
type Plan struct {
	Heap int64 // bytes for Go's heap and runtime; 0: there is no limit
}

// Divide returns the plan for spaces and others of so many bytes, as in TooSmallError. If the limit is
// not known, the plan has none. It returns a *TooSmallError if too little is left for the heap.
func Divide(limits topology.Limits, spaces, others int64) (Plan, error) {
	if limits.MemoryBytes <= 0 {
		return Plan{}, nil
	}
	room := limits.MemoryBytes - overhead - limits.MemoryBytes/overheadShare - others
	if spaces > room-LeastHeap {
		return Plan{}, &TooSmallError{
			Spaces: spaces, Others: others, Limit: limits.MemoryBytes, Source: limits.MemorySource,
			Fit: max(0, room-LeastHeap),
		}
	}
	return Plan{Heap: room - spaces}, nil
}

// Apply limits Go's heap as planned. It does not raise a limit.
func (p Plan) Apply() {
	if p.Heap > 0 {
		debug.SetMemoryLimit(min(debug.SetMemoryLimit(-1), p.Heap))
	}
}

// Held returns how many bytes of decoded batches may wait to be put; 0: any number. The rest of the
// heap is for the batch that is being decoded and for the work.
func (p Plan) Held() int64 { return p.Heap / 4 }

// Admit waits until the heap has room for n more bytes. It returns a *FullError if the bytes in use do
// not become fewer, for which moves in progress may need some time.
func (p Plan) Admit(n int64) error { return p.admit(n, inUse, collect) }

func (p Plan) admit(n int64, inUse func() int64, collect func(tries int)) error {
	if p.Heap == 0 || n < smallest {
		return nil
	}
	used := inUse()
	for tries := 0; used > p.Heap-n; tries++ {
		if tries == patience {
			return &FullError{Requested: n, Used: used, Heap: p.Heap}
		}
		collect(tries)
		used = inUse()
	}
	return nil
}

// collect frees garbage. From the second try on it first waits, so that the users of the rest can
// release it. Two collections also free the contents of pools.
func collect(tries int) {
	if tries > 0 {
		time.Sleep(pause)
	} else {
		runtime.GC()
	}
	runtime.GC()
}

// FullError reports that the heap has no room for an allocation. Sizes are in bytes.
type FullError struct {
	Requested, Used, Heap int64
}

func (e *FullError) Error() string {
	return fmt.Sprintf(
		"it needs %s more of the process's memory at once, and of the %s beside the engine's spaces %s are in use",
		size.Approx(e.Requested), size.Approx(e.Heap), size.Approx(e.Used))
}

// inUse returns the bytes that the runtime has mapped and that are not free. The runtime compares the
// same number with its memory limit.
func inUse() (bytes int64) {
	s := []metrics.Sample{
		{Name: "/memory/classes/total:bytes"},
		{Name: "/memory/classes/heap/released:bytes"},
		{Name: "/memory/classes/heap/free:bytes"},
	}
	metrics.Read(s)
	return int64(s[0].Value.Uint64() - s[1].Value.Uint64() - s[2].Value.Uint64())
}
