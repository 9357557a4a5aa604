//go:build linux || darwin

package leases_test

import (
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// newSharedWord makes a file with a word in it that processes share.
func newSharedWord(t *testing.T) string {
	path := filepath.Join(t.TempDir(), "word")
	if err := os.WriteFile(path, make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func sharedWord(path string) (*atomic.Int64, func(), error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	page, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, nil, err
	}
	return (*atomic.Int64)(unsafe.Pointer(&page[0])), func() { _ = unix.Munmap(page) }, nil
}
