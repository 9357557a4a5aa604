package tier_test

import (
	"encoding/binary"
	"math/bits"
	"math/rand/v2"
	"testing"

	"github.com/spillway-db/spillway/tier"
)

// digestByDefinition computes what the documentation says, word by word.
func digestByDefinition(b []byte, first int64) (d tier.Digest) {
	b = append(append([]byte(nil), b...), make([]byte, -len(b)&7)...)
	for i := 0; i < len(b); i += 8 {
		w := binary.LittleEndian.Uint64(b[i:])
		position := uint64(first) + uint64(i/8)
		d.Sum += w
		d.Hash += bits.RotateLeft64((w^(position+1)*0x9e3779b97f4a7c15)*0xbf58476d1ce4e5b9, 31) * 0x9e3779b97f4a7c15
	}
	return d
}

func randomBytes(n int, seed uint64) []byte {
	r := rand.New(rand.NewPCG(seed, 3))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

func TestDigestIsWhatItSays(t *testing.T) {
	for n := range 200 {
		b := randomBytes(n, uint64(n))
		for _, first := range []int64{0, 1, 1 << 40} {
			if got, want := tier.DigestBytes(b, first), digestByDefinition(b, first); got != want {
				t.Fatalf("%d bytes from position %d: %x, want %x", n, first, got, want)
			}
		}
	}
	if d := tier.DigestBytes(nil, 5); d != (tier.Digest{}) {
		t.Errorf("no bytes: %x", d)
	}
	// Written down, so that digests of different versions can be compared.
	want := tier.Digest{Hash: 0xf9cfe7265ebf3a5d, Sum: 0x7961eadcd1cedb73}
	if got := tier.DigestBytes([]byte("Spillway keeps"), 0); got != want {
		t.Errorf("of a known text: %#x, want %#x", got, want)
	}
}

func TestDigestPadsTheTail(t *testing.T) {
	for n := 1; n < 40; n++ {
		b := randomBytes(n, 1)
		padded := append(append([]byte(nil), b...), make([]byte, -n&7)...)
		if got, want := tier.DigestBytes(b, 9), tier.DigestBytes(padded, 9); got != want {
			t.Errorf("%d bytes: %x, padded with zeros %x", n, got, want)
		}
	}
}

func TestDigestPartsAddUp(t *testing.T) {
	b := randomBytes(8*500+3, 2)
	whole := tier.DigestBytes(b, 100)
	r := rand.New(rand.NewPCG(1, 1))
	for range 50 {
		var parts []tier.Digest
		for at := 0; at < len(b); {
			n := min(8*(1+r.IntN(100)), len(b)-at)
			parts = append(parts, tier.DigestBytes(b[at:at+n], 100+int64(at/8)))
			at += n
		}
		r.Shuffle(len(parts), func(i, j int) { parts[i], parts[j] = parts[j], parts[i] })
		var sum tier.Digest
		for _, p := range parts {
			sum = sum.Add(p)
		}
		if sum != whole {
			t.Fatalf("%d parts add up to %x, the whole is %x", len(parts), sum, whole)
		}
	}
}

// TestDigestSeesChanges: a bit that flips, and words that change places, which
// the sum alone would not see.
func TestDigestSeesChanges(t *testing.T) {
	b := randomBytes(1024, 4)
	want := tier.DigestBytes(b, 0)
	for i := range 8 * len(b) {
		b[i/8] ^= 1 << (i % 8)
		if got := tier.DigestBytes(b, 0); got.Hash == want.Hash || got.Sum == want.Sum {
			t.Fatalf("bit %d flipped: %x, and was %x", i, got, want)
		}
		b[i/8] ^= 1 << (i % 8)
	}
	for i := 8; i < len(b); i += 8 {
		swapped := append([]byte(nil), b...)
		copy(swapped, b[i:i+8])
		copy(swapped[i:], b[:8])
		if got := tier.DigestBytes(swapped, 0); got.Hash == want.Hash || got.Sum != want.Sum {
			t.Fatalf("words 0 and %d changed places: %x, and was %x", i/8, got, want)
		}
	}
	if tier.DigestBytes(b, 1).Hash == want.Hash {
		t.Error("the position does not matter")
	}
}

func BenchmarkDigest(b *testing.B) {
	data := randomBytes(1<<20, 1)
	b.SetBytes(int64(len(data)))
	b.ReportAllocs()
	for b.Loop() {
		tier.DigestBytes(data, 0)
	}
}
