package cuda_test

import (
	"testing"

	"golang.org/x/sys/unix"
)

// mapped returns memory that is not Go's.
func mapped(t testing.TB, n int) []byte {
	t.Helper()
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	ok(t, err)
	t.Cleanup(func() { ok(t, unix.Munmap(b)) })
	return b
}
