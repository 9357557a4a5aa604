package address_test

import (
	"testing"

	"github.com/spillway-db/spillway/internal/address"
)

func TestAligned(t *testing.T) {
	for _, n := range []int{0, 1, 4095, 4096, 10000} {
		b := address.Aligned(n)
		if len(b) != n || cap(b) != n || address.Of(b)%4096 != 0 {
			t.Errorf("%d bytes are %d of %d, at %#x", n, len(b), cap(b), address.Of(b))
		}
	}
	if b := address.Aligned(100); address.Of(b[10:])-address.Of(b) != 10 {
		t.Error("the tenth byte is elsewhere")
	}
}
