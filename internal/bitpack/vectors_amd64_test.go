package bitpack

import (
	"bytes"
	"math/rand/v2"
	"testing"
)

// TestWithoutAVX2: processors without AVX2 make the same bytes of the same words, and the words of them.
func TestWithoutAVX2(t *testing.T) {
	if !hasAVX2 {
		t.Skip("needs a processor with AVX2")
	}
	rng := rand.New(rand.NewPCG(5, 5))
	for range 2000 {
		width, n := 8<<rng.IntN(4), rng.IntN(3*blockSize)
		base, span, step := int64(rng.Uint64()), int64(1)<<rng.IntN(63), rng.Int64N(3)*rng.Int64N(1000)
		by := []int64{1, 3, 60e6}[rng.IntN(3)]
		src := words(n, width, func(i int) int64 { return base + int64(i)*step + by*rng.Int64N(span) })
		with := Encode(nil, src)
		hasAVX2 = false
		without := Encode(nil, src)
		back := make([]byte, n)
		err := Decode(back, with)
		hasAVX2 = true
		if !bytes.Equal(with, without) || err != nil || !bytes.Equal(back, src) {
			t.Fatalf("%d bytes of %d bits: from %d, %d apart, span %d by %d: %v", n, width, base, step, span, by, err)
		}
	}
}
