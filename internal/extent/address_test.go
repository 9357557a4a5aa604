package extent_test

import (
	"testing"

	"github.com/spillway-db/spillway/internal/extent"
)

func TestAligned(t *testing.T) {
	for _, n := range []int{0, 1, 4095, 4096, 10000} {
		b := extent.Aligned(n)
		if len(b) != n || cap(b) != n || extent.Address(b)%4096 != 0 {
			t.Errorf("%d bytes are %d of %d, at %#x", n, len(b), cap(b), extent.Address(b))
		}
	}
	if b := extent.Aligned(100); extent.Address(b[10:])-extent.Address(b) != 10 {
		t.Error("the tenth byte is elsewhere")
	}
}
