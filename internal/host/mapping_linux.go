//go:build linux && !race

package host

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

const noReserve = unix.MAP_NORESERVE

func (m *mapped) huge() error {
	if err := unix.Madvise(m.mem, unix.MADV_HUGEPAGE); err != nil {
		return err
	}
	return hugeOff(hugeSettings)
}

func (m *mapped) bind(node int) error {
	nodes, err := memoryNodes()
	if err != nil {
		return err
	}
	if !nodes[node] {
		return fmt.Errorf("the machine has no memory on it")
	}
	if len(nodes) == 1 {
		return nil
	}
	return bindTo(m.mem, node)
}

// lock uses MLOCK_ONFAULT: the limit is charged at once and no page is made
// present, which is the toucher's work.
func (m *mapped) lock(b []byte) error { return lockOnFault(b) }

// touch asks the kernel to make the pages present (Linux 5.14), else adds 0 to a
// word of each.
func (m *mapped) touch(b []byte) error {
	err := unix.Madvise(b, unix.MADV_POPULATE_WRITE)
	if errors.Is(err, unix.EINVAL) {
		if !poison { // a hidden page would fault
			touchPages(b)
		}
		return nil
	}
	return err
}

// discard drops the pages. Locked ones need MADV_DONTNEED_LOCKED (Linux 5.18) or
// to be unlocked for as long.
func (m *mapped) discard(b []byte) error {
	err := unix.Madvise(b, unix.MADV_DONTNEED)
	if !errors.Is(err, unix.EINVAL) {
		return err
	}
	if err := unix.Madvise(b, unix.MADV_DONTNEED_LOCKED); !errors.Is(err, unix.EINVAL) {
		return err
	}
	if err := unix.Munlock(b); err != nil {
		return err
	}
	return errors.Join(unix.Madvise(b, unix.MADV_DONTNEED), m.lock(b))
}
