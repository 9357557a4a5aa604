//go:build linux && !race

package sim

import (
	"errors"
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/spillway-db/spillway/internal/address"
	"github.com/spillway-db/spillway/internal/ahead"
)

// arena is the device's memory: mapped, and given page frames when it is first
// written. It is not the garbage collector's, and no GOMEMLIMIT counts it.
type arena struct {
	bytes   []byte
	touched atomic.Int64 // how many of the bytes touch has come to
}

// newArena maps size bytes. They take no memory before they are touched or written, also where the
// system counts on all that is mapped being used (MAP_NORESERVE).
func newArena(size int64) (*arena, error) {
	b, err := unix.Mmap(-1, 0, int(size), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("sim: mapping %d bytes: %w", size, err)
	}
	// Huge pages are what a copy at full speed needs. A kernel without them
	// refuses, and the device works all the same.
	_ = unix.Madvise(b, unix.MADV_HUGEPAGE)
	return &arena{bytes: b}, nil
}

func (a *arena) close() error { return unix.Munmap(a.bytes) }

// touchStep is how much is touched between two looks at stop: two huge pages,
// about a millisecond's worth, because closing a device waits for one step and so does
// an unmapping elsewhere in the process.
const touchStep = 4 << 20

// touch has the kernel give the arena its page frames, as far as the window goes, until
// stop is closed. What the arena holds does not change, so copies may go on meanwhile.
func (a *arena) touch(w *ahead.Window, stop <-chan struct{}) {
	for b := a.bytes; len(b) > 0; {
		if !w.Wait(int64(len(a.bytes)-len(b)), stop) {
			return
		}
		part := b[:min(touchStep, len(b))]
		b = b[len(part):]
		err := unix.Madvise(part, unix.MADV_POPULATE_WRITE)
		if errors.Is(err, unix.EINVAL) { // before Linux 5.14
			address.Touch(part)
		} else if err != nil {
			return // no memory for it now: first writes will show
		}
		a.touched.Add(int64(len(part)))
	}
}
