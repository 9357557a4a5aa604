package bitpack

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"golang.org/x/sys/unix"
)

// fence is memory between two pages that nobody may touch.
type fence []byte

func newFence(t *testing.T, size int) fence {
	t.Helper()
	page := unix.Getpagesize()
	size = (size + page - 1) / page * page
	all, err := unix.Mmap(-1, 0, size+2*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Munmap(all); err != nil {
			t.Error(err)
		}
	})
	for _, end := range [][]byte{all[:page], all[page+size:]} {
		if err := unix.Mprotect(end, unix.PROT_NONE); err != nil {
			t.Fatal(err)
		}
	}
	return all[page : page+size]
}

// last returns the last n bytes, and first those n that come first.
func (f fence) last(n int) []byte  { return f[len(f)-n:] }
func (f fence) first(n int) []byte { return f[:n:n] }

// TestBounds: nothing is read or written before or behind a block and what it is packed in, whatever
// the words, their width and their number; wherever they begin.
func TestBounds(t *testing.T) {
	const room = blockSize + 64
	blocks, packs := newFence(t, room), newFence(t, room)
	rng := rand.New(rand.NewPCG(6, 6))
	for _, width := range []int{8, 16, 32, 64} {
		for bits := range width + 1 {
			for _, n := range []int{1, 2, 3, 5, 8, 31, 33, 64, blockSize / 8} {
				n *= 8
				step := rng.Int64N(2) * rng.Int64N(1<<40)
				src := words(n, width, func(i int) int64 { return int64(rng.Uint64()&(1<<bits-1)) + int64(i)*step })
				want := Encode(nil, src)
				size := len(want)
				for _, pair := range [][2][]byte{
					{blocks.last(n), packs.last(size)},
					{blocks.first(n), packs.first(size)},
					{blocks[1:][:n:n], packs[3:][:size:size]},
				} {
					block, packed := pair[0], pair[1]
					copy(block, src)
					clear(packed)
					if got := Encode(packed[:0], block); &got[0] != &packed[0] || !bytes.Equal(got, want) {
						t.Fatalf("%d bytes, %d of %d bits: they are packed otherwise", n, bits, width)
					}
					clear(block)
					if err := Decode(block, packed); err != nil || !bytes.Equal(block, src) {
						t.Fatalf("%d bytes, %d of %d bits: they are unpacked otherwise: %v", n, bits, width, err)
					}
				}
			}
		}
	}
}

// TestMalformed: of what Encode made, with any byte of a header otherwise, or cut off
// anywhere, nothing is read behind its end, and nothing is written outside of what is to be filled.
func TestMalformed(t *testing.T) {
	froms, tos := newFence(t, 2*blockSize), newFence(t, 2*blockSize)
	rng := rand.New(rand.NewPCG(7, 7))
	for _, n := range []int{1, 31, 32, 64, 1000, blockSize + 96} {
		for _, width := range []int{8, 16, 32, 64} {
			step := rng.Int64N(1 << 40)
			src := Encode(nil, words(n, width, func(i int) int64 { return int64(i)*step + rng.Int64N(30) }))
			for at := range min(len(src), 26) {
				for _, b := range []byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 32, 33, 63, 64, 65, 127, 128, 255} {
					from := froms.last(len(src))
					copy(from, src)
					from[at] = b
					_ = Decode(tos.last(n), from)
					_ = Decode(tos.first(n), from)
				}
			}
			for cut := range min(len(src), 100) {
				from := froms.last(len(src) - cut)
				copy(from, src)
				if err := Decode(tos.last(n), from); (err == nil) != (cut == 0) {
					t.Fatalf("%d of %d bytes: %v", len(from), len(src), err)
				}
			}
		}
	}
}
