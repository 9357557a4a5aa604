package cuda_test

import (
	"testing"

	"golang.org/x/sys/unix"
)

// page returns mapped memory, which a driver may pin, as it may not what is Go's.
func page(t testing.TB) []byte {
	t.Helper()
	return pages(t, 2)
}

// pages returns n pages of 4 KiB.
func pages(t testing.TB, n int) []byte {
	t.Helper()
	b, err := unix.Mmap(-1, 0, n*4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Munmap(b); err != nil {
			t.Error(err)
		}
	})
	return b
}
