package bitpack

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"
)

// words makes n bytes of words of so many bits.
func words(n, width int, f func(i int) int64) []byte {
	var out []byte
	for i := 0; len(out) < n; i++ {
		v := uint64(f(i))
		switch width {
		case 8:
			out = append(out, byte(v))
		case 16:
			out = binary.LittleEndian.AppendUint16(out, uint16(v))
		case 32:
			out = binary.LittleEndian.AppendUint32(out, uint32(v))
		default:
			out = binary.LittleEndian.AppendUint64(out, v)
		}
	}
	return out[:n]
}

// round packs src and unpacks it, and returns how much was left.
func round(t testing.TB, src []byte) int {
	t.Helper()
	before := []byte("before")
	out := Encode(bytes.Clone(before), src)
	if !bytes.HasPrefix(out, before) {
		t.Fatal("what was there is gone")
	}
	out = out[len(before):]
	if most := len(src) + len(src)/blockSize + 2; len(out) > most { // a byte a block, and what fills no vector is one more
		t.Fatalf("%d bytes became %d", len(src), len(out))
	}
	back := make([]byte, len(src))
	if err := Decode(back, out); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(back, src) {
		t.Fatalf("%d bytes came back otherwise", len(src))
	}
	cuts := 50
	if testing.Short() {
		cuts = 5
	}
	for cut := 1; cut <= len(out); cut += 1 + len(out)/cuts {
		if err := Decode(back, out[:len(out)-cut]); err == nil {
			t.Fatalf("%d bytes less were enough", cut)
		}
	}
	if err := Decode(back, append(out, 0)); err == nil {
		t.Fatal("there was one byte too many")
	}
	return len(out)
}

// TestSchemes: each kind of words is stored in no more than it needs, and a header a block.
func TestSchemes(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	const n = 5 * blockSize
	for _, c := range []struct {
		name  string
		width int
		f     func(i int) int64
		bits  float64 // of a word
	}{
		{"all the same", 64, func(int) int64 { return -77 }, 0},
		{"small", 64, func(int) int64 { return rng.Int64N(1000) - 100 }, 10},
		{"whole minutes", 64, func(int) int64 { return 1e15 + 60e6*rng.Int64N(1<<17) }, 17},
		{"even steps", 64, func(i int) int64 { return 5 + 3*int64(i) }, 0},
		{"uneven steps", 64, func(i int) int64 { return 1000*int64(i) + rng.Int64N(64) }, 7},
		{"steps of whole seconds", 64, func(i int) int64 { return 1e6 * (100*int64(i) + rng.Int64N(16)) }, 5},
		{"nearly all bits", 64, func(int) int64 { return rng.Int64N(1<<62) - 1<<61 }, 62},
		{"32 bits", 32, func(int) int64 { return rng.Int64N(5000) - 2500 }, 13},
		{"32 bits at even steps", 32, func(i int) int64 { return 7 * int64(i) }, 0},
		{"32 bits at uneven steps", 32, func(i int) int64 { return 100*int64(i) + rng.Int64N(30) }, 6},
		{"16 bits", 16, func(int) int64 { return rng.Int64N(500) - 250 }, 9},
		{"letters", 8, func(int) int64 { return 'A' + rng.Int64N(26) }, 5},
		{"noise", 64, func(int) int64 { return int64(rng.Uint64()) }, 64},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := round(t, words(n, c.width, c.f))
			if most := int(c.bits*n/float64(c.width)) + 5*(26+8); got > most {
				t.Errorf("%d bytes became %d, want at most %d", n, got, most)
			}
		})
	}
}

// TestEveryWidth: words of each width that there is, at the ends of what they can be.
func TestEveryWidth(t *testing.T) {
	rng := rand.New(rand.NewPCG(2, 2))
	for _, width := range []int{8, 16, 32, 64} {
		for bits := range width + 1 {
			for _, base := range []int64{0, -1, 1, 1 << 62, -1 << 63, rng.Int64()} {
				for _, by := range []int64{1, 2, 3, 60e6, 1 << 40} {
					round(t, words(blockSize+8*5, width, func(i int) int64 {
						v := int64(rng.Uint64())
						if bits < 64 {
							v &= 1<<bits - 1
						}
						return base + v*by
					}))
				}
			}
		}
	}
}

// TestLengths: of any length, what ends within a word too.
func TestLengths(t *testing.T) {
	for _, n := range []int{0, 1, 7, 8, 9, 15, 16, 24, 4096, blockSize - 8, blockSize - 1, blockSize, blockSize + 1, blockSize + 8, 4*blockSize + 4096} {
		round(t, words(n, 64, func(i int) int64 { return int64(i) }))
	}
}

// TestColumnsOneAfterAnother: what changes from block to block, and within one.
func TestColumnsOneAfterAnother(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 3))
	for range 200 {
		var src []byte
		for len(src) < 8*blockSize {
			span := int64(1) << rng.IntN(60)
			base := int64(rng.Uint64())
			step := rng.Int64N(3) * rng.Int64N(1000)
			src = append(src, words(8*rng.IntN(3000), 8<<rng.IntN(4), func(i int) int64 { return base + int64(i)*step + rng.Int64N(span) })...)
		}
		round(t, src)
	}
}

// FuzzDecode: what Encode did not make is an error or other bytes, and no panic; what it
// made comes back.
func FuzzDecode(f *testing.F) {
	f.Add(Encode(nil, words(2*blockSize, 64, func(i int) int64 { return int64(i) * 3 })), uint16(2*blockSize))
	f.Add(Encode(nil, words(blockSize, 8, func(i int) int64 { return 'a' + int64(i%9) })), uint16(blockSize))
	f.Add([]byte{2, 65, 1, 2, 3, 4, 5, 6, 7, 8, 9}, uint16(16))
	f.Fuzz(func(t *testing.T, b []byte, n uint16) {
		back := make([]byte, n)
		_ = Decode(back, b)
		again := make([]byte, len(b))
		if err := Decode(again, Encode(nil, b)); err != nil || !bytes.Equal(again, b) {
			t.Fatal("it came back otherwise", err)
		}
	})
}

// BenchmarkFlights packs and unpacks what columns of flights look like, 256 KiB at a time.
func BenchmarkFlights(b *testing.B) {
	rng := rand.New(rand.NewPCG(4, 4))
	const n = 256 << 10
	for _, c := range []struct {
		name string
		src  []byte
	}{
		{"time", words(n, 64, func(int) int64 { return 978307200e6 + 60e6*rng.Int64N(90*1440) })},
		{"delay", words(n, 64, func(int) int64 { return rng.Int64N(1200) - 60 })},
		{"offsets", words(n, 64, func(i int) int64 { return 3 * int64(i) })},
		{"letters", words(n, 8, func(int) int64 { return 'A' + rng.Int64N(26) })},
		{"int32", words(n, 32, func(int) int64 { return rng.Int64N(5000) })},
		{"int16", words(n, 16, func(int) int64 { return rng.Int64N(900) - 60 })},
		{"noise", words(n, 64, func(int) int64 { return int64(rng.Uint64()) })},
	} {
		dst := make([]byte, 0, 2*n)
		out := Encode(dst, c.src)
		back := make([]byte, n)
		b.Run(fmt.Sprintf("%s/pack", c.name), func(b *testing.B) {
			b.SetBytes(n)
			b.ReportAllocs()
			for b.Loop() {
				Encode(dst, c.src)
			}
			b.ReportMetric(float64(len(out))/n, "ratio")
		})
		b.Run(fmt.Sprintf("%s/unpack", c.name), func(b *testing.B) {
			b.SetBytes(n)
			b.ReportAllocs()
			for b.Loop() {
				if err := Decode(back, out); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// TestTooWide: a header with more bits for a word than the word has is malformed, though as many bytes
// follow, of other blocks.
func TestTooWide(t *testing.T) {
	for _, kind := range kinds {
		for width := int(kind&^1) + 1; width < 256; width++ {
			for _, n := range []int{32, blockSize} {
				src := make([]byte, headerSize+33*n) // enough for 255 bits of each byte
				src[0], src[1] = kind, byte(width)
				if err := Decode(make([]byte, 2*n), src); err != ErrMalformed {
					t.Fatalf("%d bytes, %d bits of words of %d: %v", n, width, kind&^1, err)
				}
			}
		}
	}
}
