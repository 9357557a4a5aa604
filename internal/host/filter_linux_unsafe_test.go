//go:build linux && !race

package host

import (
	"errors"
	"fmt"
	"io/fs"
	"runtime"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/tier"
)

// filter has the kernel refuse to this thread, for good, what container runtimes and old
// kernels refuse: mbind with EPERM, mlock2 with ENOSYS, and MADV_POPULATE_WRITE with EINVAL.
func filter() error {
	const (
		load          = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		equal         = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		give          = unix.BPF_RET | unix.BPF_K
		number, third = 0, 16 + 2*8 // of struct seccomp_data: the call, and its third argument
		refuse, allow = 0x00050000, 0x7fff0000
	)
	if *(*[2]byte)(unsafe.Pointer(&[]uint16{1}[0])) != [2]byte{1, 0} {
		return errors.New("the filter is for little-endian machines")
	}
	program := []unix.SockFilter{
		{Code: load, K: number},
		{Code: equal, K: unix.SYS_MBIND, Jf: 1},
		{Code: give, K: refuse | uint32(unix.EPERM)},
		{Code: equal, K: unix.SYS_MLOCK2, Jf: 1},
		{Code: give, K: refuse | uint32(unix.ENOSYS)},
		{Code: equal, K: unix.SYS_MADVISE, Jf: 3},
		{Code: load, K: third},
		{Code: equal, K: unix.MADV_POPULATE_WRITE, Jf: 1},
		{Code: give, K: refuse | uint32(unix.EINVAL)},
		{Code: give, K: allow},
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	fprog := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	const modeFilter = 2 // SECCOMP_MODE_FILTER
	_, _, errno := unix.Syscall(unix.SYS_PRCTL, unix.PR_SET_SECCOMP, modeFilter, uintptr(unsafe.Pointer(&fprog)))
	if errno != 0 {
		return errno
	}
	return nil
}

var errNoFilter = errors.New("system calls cannot be filtered here")

// TestUnderAFilter works where the kernel really refuses. The thread that has the filter ends
// with its goroutine.
func TestUnderAFilter(t *testing.T) {
	ended := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocks it
		ended <- underFilter()
	}()
	if err := <-ended; errors.Is(err, errNoFilter) {
		t.Skip("needs a filter of system calls: ", err)
	} else if err != nil {
		t.Error(err)
	}
}

func underFilter() (err error) {
	if err := filter(); err != nil {
		return fmt.Errorf("%w: %v", errNoFilter, err)
	}
	m, err := reserve(2 * step)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.Release()) }()
	if err := bindTo(m.Bytes(), 0); !errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("bound: %v", err)
	}
	if err := m.lock(m.Bytes()); !errors.Is(err, errors.ErrUnsupported) {
		return fmt.Errorf("locked: %v", err)
	}
	if err := m.Touch(m.Bytes()); err != nil {
		return fmt.Errorf("not made present: %w", err)
	}
	if !poison {
		if present, err := presentPages(m.Bytes()); err != nil || present != 2*step/tier.Page {
			return fmt.Errorf("%d pages are present, %v", present, err)
		}
	}
	a, err := NewArena(Config{Capacity: step, Node: -1, Lock: true})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, a.Close()) }()
	if w := a.Stats().Warnings; len(w) != 1 || w[0].Cause != causes.System || !w[0].Info {
		return fmt.Errorf("warnings: %v", w)
	}
	return nil
}

// presentPages counts the pages of b that are in memory.
func presentPages(b []byte) (n int, err error) {
	pages := make([]byte, len(b)/tier.Page)
	_, _, errno := unix.Syscall(unix.SYS_MINCORE, extent.Address(b), uintptr(len(b)),
		uintptr(unsafe.Pointer(&pages[0])))
	if errno != 0 {
		return 0, errno
	}
	for _, p := range pages {
		n += int(p & 1)
	}
	return n, nil
}
