//go:build amd64 && !race

package bitpack

import (
	"bytes"
	"math/rand/v2"
	"testing"
)

// TestLanesAgree: the loops for wide registers do, bit for bit, what those for every
// processor do, whatever the scheme, the width and the numbers.
func TestLanesAgree(t *testing.T) {
	if !wide {
		t.Skip("needs AVX2")
	}
	rng := rand.New(rand.NewPCG(5, 5))
	for s := for64; s < schemes; s++ {
		most := lanes[s]
		if s == for8 {
			most = 8
		}
		for width := range most + 1 {
			for range 40 {
				p := plan{scheme: s, width: width, base: rng.Uint64(), first: rng.Uint64(), divisor: 1}
				if lanes[s] == 64 && rng.IntN(2) == 0 {
					p.divisor = []uint64{2, 3, 60e6, 1 << 40, rng.Uint64() | 1}[rng.IntN(5)]
				}
				block := make([]byte, vector*(1+rng.IntN(blockSize/vector)))
				packed := make([]byte, p.packed(len(block)))
				for i := range packed {
					packed[i] = byte(rng.Uint32())
				}
				want := bytes.Clone(block)
				p.unpack(block, packed)
				p.unpackWords(want, packed)
				if !bytes.Equal(block, want) {
					t.Fatalf("%+v: %d bytes are unpacked otherwise", p, len(block))
				}
				again, fits := make([]byte, len(packed)), p.pack(packed, block)
				if wantFits := p.packWords(again, block); fits != wantFits || fits && !bytes.Equal(packed, again) {
					t.Fatalf("%+v: %d bytes are packed otherwise: %v, want %v", p, len(block), fits, wantFits)
				}
				if at := rng.IntN(len(block)); width < most || p.divisor != 1 { // something that does not fit, perhaps
					block[at] ^= byte(1 + rng.IntN(255))
					if got, want := p.pack(packed, block), p.packWords(again, block); got != want {
						t.Fatalf("%+v: a byte otherwise: %v, want %v", p, got, want)
					}
				}
				lo, hi := span(s, block)
				least, largest := spanWords(s, block)
				if s != for8 && (lo != least || hi != largest) || s == for8 && (lo < least || hi > largest) {
					t.Fatalf("%v, %d bytes: from %d to %d, want %d to %d", s, len(block), lo, hi, least, largest)
				}
			}
		}
	}
}

// TestNarrow runs what other processors do on this one.
func TestNarrow(t *testing.T) {
	defer func(was bool) { wide = was }(wide)
	wide = false
	t.Run("schemes", TestSchemes)
	t.Run("widths", TestEveryWidth)
	t.Run("lengths", TestLengths)
	t.Run("columns", TestColumnsOneAfterAnother)
}
