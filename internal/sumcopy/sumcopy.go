// Package sumcopy copies bytes and makes their XXH3 checksum on the way. It can
// also subtract a number from the words that it copies, which is how the offsets of
// a slice are moved.
//
// A copy of much memory waits for the memory. The checksum's arithmetic fits into that wait if both
// are done in one loop; done afterwards it costs a third of the speed. Measured on one core of an
// AMD EPYC 9005 over 256 MiB, as shares of Go's memmove: copy 1 MiB and then hash what was written
// 0.59, hash what was read 0.70–0.75, both in pieces of 8 KiB to 256 KiB 0.50–0.74, one loop 1.07
// (it prefetches a little better than memmove does). A pure Go loop cannot do it: below 1 MiB
// memmove stores through the cache, which alone is 0.80.
//
// On amd64 with AVX2 the loop is assembly; elsewhere Sum copies and then hashes.
package sumcopy

import (
	"encoding/binary"
	"math/bits"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/zeebo/xxh3"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/labels"
)

// Block is the granule of Copy, in bytes: XXH3 mixes its state once a block.
const Block = 1024

// Sum is the XXH3 checksum, 64 bits wide and without a seed, of a run of bytes
// that is copied piece by piece. Reset begins a run. A Sum is not safe for
// concurrent use.
type Sum struct {
	blocks int64 // left in the run
	length int64
	fused  bool
	acc    [8]uint64   // fused
	hash   xxh3.Hasher // not fused
}

// minFused is from where on a copy takes the loop: below it memmove writes through the cache, which
// is what short copies want. The race detector looks at each byte of memmove's.
var minFused = func() int {
	if invariants.Race {
		return 16 << 10
	}
	return 1 << 20
}()

// Spread copies src to dst, which must not overlap, and returns how many bytes, as the built-in copy
// does. Much memory goes through the loop of Sum, without a use for its sum: between arenas that
// several goroutines take turns with, it was 0.95 to 1.02 of a bare memmove where memmove itself came
// to 0.86 to 0.92 (64 and 16 MiB, the same processor). As many goroutines copy as there are
// processors, where there is enough for each: one core does not use all the bandwidth of the memory.
func Spread(dst, src []byte) int {
	n := min(len(dst), len(src))
	if n < minFused {
		return copy(dst, src)
	}
	Gather([]Copy{{dst[:n], src[:n]}})
	return n
}

// spreadPart is what a goroutine of Gather copies at a time.
const spreadPart = 1 << 20

// Copy is one of the copies of Gather.
type Copy struct{ Dst, Src []byte }

// pastLeast is how long a copy of Gather must be to go past the cache, if all are much together.
const pastLeast = 16 << 10

// Gather does what Spread does for many copies, which must not overlap, as if their bytes were one
// run: 500 copies of 130 KiB are too short for Spread each by itself. A Copy's sides are of the same
// length.
func Gather(copies []Copy) {
	total := 0
	for _, c := range copies {
		total += len(c.Src)
	}
	if total < minFused {
		for _, c := range copies {
			copy(c.Dst, c.Src)
		}
		return
	}
	var next atomic.Int64 // bytes of all copies that were taken
	work := func() {
		i, begin := 0, 0 // of the copy that the next byte is in
		for {
			at := int(next.Add(spreadPart)) - spreadPart
			if at >= total {
				break
			}
			for end := min(total, at+spreadPart); at < end; {
				for at >= begin+len(copies[i].Src) {
					begin += len(copies[i].Src)
					i++
				}
				c := copies[i]
				from, to := at-begin, min(len(c.Src), end-begin)
				past(c.Dst[from:to], c.Src[from:to])
				at = begin + to
			}
		}
		Fence()
	}
	var wg sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), total/(2*spreadPart)) - 1 {
		wg.Go(func() {
			labels.Copy.Set()
			work()
		})
	}
	work()
	wg.Wait()
}

// past copies past the cache, unless that is too little. It does not fence.
func past(dst, src []byte) {
	whole := len(src) / Block * Block
	if !fused || whole < pastLeast {
		copy(dst, src)
		return
	}
	var s Sum
	s.Reset(int64(whole))
	s.Copy(dst[:whole], src[:whole], Lower{})
	copy(dst[whole:], src[whole:])
}

// Reset begins a run of length bytes, a multiple of Block above 0.
func (s *Sum) Reset(length int64) {
	if length <= 0 || length%Block != 0 {
		panic("sumcopy: a run must be a multiple of 1024 bytes and above 0")
	}
	s.length, s.blocks = length, length/Block
	s.fused = fused
	if !s.fused {
		s.hash.Reset()
		return
	}
	s.acc = [8]uint64{
		prime32x3, prime64x1, prime64x2, prime64x3,
		prime64x4, prime32x2, prime64x5, prime32x1,
	}
}

// Lower is a number that is subtracted from each little-endian word of Width bytes, 4 or 8. The zero
// value leaves bytes as they are.
type Lower struct {
	Width int64
	Base  uint64
}

// Copy copies the next bytes of the run from src to dst, less by, which are of the same length, a
// multiple of Block, and must not overlap. If dst is aligned to 32 bytes it is written past the
// cache, as memmove does with much memory; Fence must be called before other goroutines read it. When the
// run is complete, Copy returns its checksum; before that, 0.
func (s *Sum) Copy(dst, src []byte, by Lower) uint64 {
	n := int64(len(src)) / Block
	if len(dst) != len(src) || n*Block != int64(len(src)) || n > s.blocks {
		panic("sumcopy: a piece that does not fit the run")
	}
	s.blocks -= n
	if n == 0 {
		return 0
	}
	if !s.fused {
		by.Copy(dst, src)
		s.hash.Write(dst) // never fails
		if s.blocks > 0 {
			return 0
		}
		return s.hash.Sum64()
	}
	invariants.Reads(src)
	invariants.Writes(dst)
	blocks, last := uint64(n), uint64(0)
	if s.blocks == 0 { // the run's last block is mixed differently
		blocks, last = blocks-1, 1
	}
	switch by.Width {
	case 0:
		copyBlocks(&s.acc, &dst[0], &src[0], blocks, last)
	case 4:
		copyBlocksSub32(&s.acc, &dst[0], &src[0], blocks, last, uint32(by.Base))
	default:
		copyBlocksSub64(&s.acc, &dst[0], &src[0], blocks, last, by.Base)
	}
	if last == 0 {
		return 0
	}
	h := uint64(s.length) * prime64x1
	for i := range 4 {
		high, low := bits.Mul64(s.acc[2*i]^binary.LittleEndian.Uint64(secret[11+16*i:]),
			s.acc[2*i+1]^binary.LittleEndian.Uint64(secret[19+16*i:]))
		h += high ^ low
	}
	h ^= h >> 37
	h *= 0x165667919e3779f9
	return h ^ h>>32
}

// Copy copies the words of src to dst, which may be src, each less Base. It leaves out a rest of less
// than a word.
func (by Lower) Copy(dst, src []byte) {
	high, base := uint64(1<<63), by.Base // the highest bits of the words in eight bytes, and Base for each
	switch by.Width {
	case 0:
		copy(dst, src)
		return
	case 4:
		high, base = 1<<63|1<<31, by.Base<<32|by.Base&(1<<32-1)
	}
	rest, not := base&^high, ^base
	for len(src) >= 32 && len(dst) >= 32 { // no word borrows from the next one's bits
		a, b := binary.LittleEndian.Uint64(src), binary.LittleEndian.Uint64(src[8:])
		c, d := binary.LittleEndian.Uint64(src[16:]), binary.LittleEndian.Uint64(src[24:])
		binary.LittleEndian.PutUint64(dst, (a|high-rest)^(a^not)&high)
		binary.LittleEndian.PutUint64(dst[8:], (b|high-rest)^(b^not)&high)
		binary.LittleEndian.PutUint64(dst[16:], (c|high-rest)^(c^not)&high)
		binary.LittleEndian.PutUint64(dst[24:], (d|high-rest)^(d^not)&high)
		src, dst = src[32:], dst[32:]
	}
	for n := int(by.Width); len(src) >= n && len(dst) >= n; src, dst = src[n:], dst[n:] {
		if n == 4 {
			binary.LittleEndian.PutUint32(dst, binary.LittleEndian.Uint32(src)-uint32(by.Base))
		} else {
			binary.LittleEndian.PutUint64(dst, binary.LittleEndian.Uint64(src)-by.Base)
		}
	}
}

// The constants of XXH3, from https://github.com/Cyan4973/xxHash
// (doc/xxhash_spec.md); secret is the beginning of its default secret.
const (
	prime32x1 = 0x9e3779b1
	prime32x2 = 0x85ebca77
	prime32x3 = 0xc2b2ae3d
	prime64x1 = 0x9e3779b185ebca87
	prime64x2 = 0xc2b2ae3d27d4eb4f
	prime64x3 = 0x165667b19e3779f9
	prime64x4 = 0x85ebca77c2b2ae63
	prime64x5 = 0x27d4eb2f165667c5
)

var secret = []byte("" +
	"\xb8\xfe\x6c\x39\x23\xa4\x4b\xbe\x7c\x01\x81\x2c\xf7\x21\xad\x1c" +
	"\xde\xd4\x6d\xe9\x83\x90\x97\xdb\x72\x40\xa4\xa4\xb7\xb3\x67\x1f" +
	"\xcb\x79\xe6\x4e\xcc\xc0\xe5\x78\x82\x5a\xd0\x7d\xcc\xff\x72\x21" +
	"\xb8\x08\x46\x74\xf7\x43\x24\x8e\xe0\x35\x90\xe6\x81\x3a\x26\x4c" +
	"\x3c\x28\x52\xbb\x91\xc3\x00\xcb\x88\xd0\x65\x8b\x1b\x53\x2e\xa3" +
	"\x71\x64\x48\x97\xa2\x0d\xf9\x4e\x38\x19\xef\x46\xa9\xde\xac\xd8" +
	"\xa8\xfa\x76\x3f\xe3\x9c\x34\x3f\xf9\xdc\xbb\xc7\xc7\x0b\x4f\x1d" +
	"\x8a\x51\xe0\x4b\xcd\xb4\x59\x31\xc8\x9f\x7e\xc9\xd9\x78\x73\x64" +
	"\xea\xc5\xac\x83\x34\xd3\xeb\xc3\xc5\x81\xa0\xff\xfa\x13\x63\xeb" +
	"\x17\x0d\xdd\x51\xb7\xf0\xda\x49\xd3\x16\x55\x26\x29\xd4\x68\x9e" +
	"\x2b\x16\xbe\x58\x7d\x47\xa1\xfc\x8f\xf8\xb8\xd1\x7a\xd0\x31\xce" +
	"\x45\xcb\x3a\x8f\x95\x16\x04\x28\xaf\xd7\xfb\xca\xbb\x4b\x40\x7e")
