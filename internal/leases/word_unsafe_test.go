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
	if _, done, err := createWords(path); err != nil {
		t.Fatal(err)
	} else {
		done()
	}
	return path
}

func sharedWord(path string) (*atomic.Int64, func(), error) {
	w, done, err := mapWords(path)
	if err != nil {
		return nil, nil, err
	}
	return &w.held[0], done, nil
}

func createWords(path string) (*stormWords, func(), error) {
	if err := os.WriteFile(path, make([]byte, unsafe.Sizeof(stormWords{})), 0o600); err != nil {
		return nil, nil, err
	}
	return mapWords(path)
}

func mapWords(path string) (*stormWords, func(), error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	page, err := unix.Mmap(int(f.Fd()), 0, int(unsafe.Sizeof(stormWords{})), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED)
	if err != nil {
		return nil, nil, err
	}
	return (*stormWords)(unsafe.Pointer(&page[0])), func() { _ = unix.Munmap(page) }, nil
}
