package sumcopy

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/zeebo/xxh3"
)

func random(n int, seed uint64) []byte {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(seed)})
	r.Read(b)
	return b
}

// TestSumIsXXH3 compares sum and copy with the library, for all lengths of a few
// blocks and some long ones, in one piece and in random ones, at aligned and
// unaligned addresses.
func TestSumIsXXH3(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, blocks := range []int{1, 2, 3, 4, 5, 7, 16, 63, 1024} {
		for _, shift := range []int{0, 1, 8, 32, 33} {
			n := blocks * Block
			src := random(n+shift, uint64(blocks))[shift:]
			want := xxh3.Hash(src)
			for _, whole := range []bool{true, false} {
				all := make([]byte, n+128)
				dst := all[64-shift : 64-shift+n]
				var s Sum
				s.Reset(int64(n))
				var got uint64
				for off := 0; off < n; {
					m := n - off
					if !whole {
						m = (1 + rng.IntN(m/Block)) * Block
					}
					if got != 0 {
						t.Error("a sum before the end of the run")
					}
					got = s.Copy(dst[off:off+m], src[off:off+m], Lower{})
					off += m
				}
				if got != want {
					t.Errorf("%d blocks, shift %d, whole %v: sum %x, want %x", blocks, shift, whole, got, want)
				}
				if !bytes.Equal(dst, src) {
					t.Errorf("%d blocks, shift %d, whole %v: the copy differs", blocks, shift, whole)
				}
				if !zero(all[:64-shift]) || !zero(all[64-shift+n:]) {
					t.Errorf("%d blocks, shift %d, whole %v: wrote beyond the destination", blocks, shift, whole)
				}
			}
		}
	}
}

func zero(b []byte) bool { return len(bytes.TrimLeft(b, "\x00")) == 0 }

// TestSub does the same with copies that subtract.
func TestSub(t *testing.T) {
	const n = 37 * Block
	src := random(n, 5)
	const base = 0x1234_5678_9abc_def1
	for _, fusedOn := range []bool{fused, false} {
		for _, shift := range []int{0, 8} {
			for _, width := range []int{4, 8} {
				want := make([]byte, n)
				for i := 0; i < n; i += width {
					if width == 4 {
						binary.LittleEndian.PutUint32(
							want[i:],
							binary.LittleEndian.Uint32(src[i:])-uint32(base&0xffffffff),
						)
					} else {
						binary.LittleEndian.PutUint64(want[i:], binary.LittleEndian.Uint64(src[i:])-base)
					}
				}
				dst := make([]byte, n+shift)[shift:]
				var s Sum
				s.Reset(n)
				s.fused = fusedOn
				s.hash.Reset()
				var got uint64
				for _, p := range [][2]int{{0, Block}, {Block, 30 * Block}, {30 * Block, n}} {
					got = s.Copy(dst[p[0]:p[1]], src[p[0]:p[1]], Lower{int64(width), base})
				}
				if !bytes.Equal(dst, want) || got != xxh3.Hash(want) {
					t.Errorf("fused %v, shift %d, %d-byte words: wrong", fusedOn, shift, width)
				}
			}
		}
	}
}

// TestBothWays holds the assembly and the portable way to the same sums, also
// where only one of them is used.
func TestBothWays(t *testing.T) {
	if !fused {
		t.Skip("needs a build with another way than the portable one")
	}
	src, dst := random(64*Block, 3), make([]byte, 64*Block)
	var s Sum
	s.Reset(64 * Block)
	s.fused = false
	s.hash.Reset()
	if got, want := s.Copy(dst, src, Lower{}), xxh3.Hash(src); got != want {
		t.Errorf("sum %x, want %x", got, want)
	}
}

func TestMisusePanics(t *testing.T) {
	for name, f := range map[string]func(){
		"no length":      func() { new(Sum).Reset(0) },
		"half a block":   func() { new(Sum).Reset(Block / 2) },
		"too much":       func() { var s Sum; s.Reset(Block); s.Copy(make([]byte, 2*Block), make([]byte, 2*Block), Lower{}) },
		"odd piece":      func() { var s Sum; s.Reset(Block); s.Copy(make([]byte, 8), make([]byte, 8), Lower{}) },
		"unlike lengths": func() { var s Sum; s.Reset(2 * Block); s.Copy(make([]byte, Block), make([]byte, 2*Block), Lower{}) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			f()
		})
	}
}

func FuzzSum(f *testing.F) {
	f.Add([]byte("seed"), uint16(3), uint16(1), uint8(5))
	f.Fuzz(func(t *testing.T, data []byte, blocks, piece uint16, shift uint8) {
		n := (1 + int(blocks%200)) * Block
		src := make([]byte, n+256)[shift:]
		src = src[:n]
		for i := range src {
			if len(data) > 0 {
				src[i] = data[i%len(data)] + byte(i>>10)
			}
		}
		step := (1 + int(piece%64)) * Block
		dst := make([]byte, n)
		var s Sum
		s.Reset(int64(n))
		var got uint64
		for off := 0; off < n; off += step {
			end := min(n, off+step)
			got = s.Copy(dst[off:end], src[off:end], Lower{})
		}
		if got != xxh3.Hash(src) || !bytes.Equal(dst, src) {
			t.Fatalf("%d bytes by %d", n, step)
		}
	})
}

// BenchmarkCopy: the limit is memmove, which runs beside it.
func BenchmarkCopy(b *testing.B) {
	const n = 128 << 20
	src, dst := random(n, 9), random(n, 8)
	for _, way := range []string{"memmove", "sum", "sum-sub32"} {
		b.Run(fmt.Sprintf("%s/%dMiB", way, n>>20), func(b *testing.B) {
			b.SetBytes(n)
			var s Sum
			for b.Loop() {
				if way == "memmove" {
					copy(dst, src)
					continue
				}
				for off := 0; off < n; off += 1 << 20 {
					s.Reset(1 << 20)
					if way == "sum" {
						s.Copy(dst[off:off+1<<20], src[off:off+1<<20], Lower{})
					} else {
						s.Copy(dst[off:off+1<<20], src[off:off+1<<20], Lower{4, 77})
					}
				}
			}
		})
	}
}

// TestGatherCopiesAll: copies of all lengths, alone and many, end where they should.
func TestGatherCopiesAll(t *testing.T) {
	const gap = 96
	rng := rand.New(rand.NewPCG(1, 2))
	lengths := [][]int{nil, {0}, {5}, {0, 1, 0, 0, 1023, 0}, {3*spreadPart + 7}, {minFused - 1, 1}}
	for range 6 {
		var many []int
		for range 300 {
			many = append(many, rng.IntN(rng.IntN(80_000)+1))
		}
		lengths = append(lengths, append(many, 2*spreadPart, 0, 9))
	}
	for i, all := range lengths {
		total := gap
		for _, n := range all {
			total += n + gap
		}
		src, dst, want := make([]byte, total), make([]byte, total), make([]byte, total)
		for j := range src {
			src[j] = byte(j*7 + j>>9 + 1)
		}
		var copies []Copy
		at, from := gap, total
		for _, n := range all { // in the other order, so that sides are aligned in different ways
			from -= n + gap
			copies = append(copies, Copy{dst[at : at+n], src[from : from+n]})
			copy(want[at:at+n], src[from:from+n])
			at += n + gap
		}
		Gather(copies)
		if !bytes.Equal(dst, want) {
			t.Errorf("list %d of %d copies", i, len(all))
		}
	}
}

func TestSpreadCopiesAll(t *testing.T) {
	for _, n := range []int{0, 1, 1023, minFused - 1, minFused, minFused + 1, 3*minFused + 777, 9*spreadPart + 5} {
		src, dst := make([]byte, n), make([]byte, n+100)
		for i := range src {
			src[i] = byte(i*7 + i>>9)
		}
		if got := Spread(dst, src); got != n || !bytes.Equal(dst[:n], src) {
			t.Errorf("%d bytes spread: copied %d, equal: %v", n, got, bytes.Equal(dst[:n], src))
		}
		for i, b := range dst[n:] {
			if b != 0 {
				t.Fatalf("%d bytes: byte %d behind the end was written", n, i)
			}
		}
	}
}
