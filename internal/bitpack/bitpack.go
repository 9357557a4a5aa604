// Package bitpack compresses numbers that are wider than they need to be, as Arrow columns are full
// of: small values in 64 bits, offsets at even steps, timestamps in whole minutes, letters.
//
//	block of 8 KiB ── as words of 64, 32, 16 or 8 bits, or as differences of words of 64 or 32 bits
//	                  ── less the smallest, of 64 bits also divided by their greatest common divisor
//	                  ── in as few bits as the largest needs: github.com/parquet-go/bitpack
//
// It knows nothing of columns: it tries all schemes on a part of a block and takes the one that
// leaves the least. A block that none of them shortens is stored as it is. Decode returns exactly the
// bytes that Encode was given. The schemes are those of Lemire and Boytsov, "Decoding billions of
// integers per second through vectorization" (2015): frame of reference, and differences.
//
// Words are worked on 64 bits at a time: two of 32 bits, four of 16, or eight of 8. Decision 0018 has
// the speeds.
package bitpack

import (
	"encoding/binary"
	"errors"
	"math"
	"math/bits"
	"slices"

	"github.com/parquet-go/bitpack"
	"github.com/parquet-go/bitpack/unsafecast"
)

const (
	// blockSize is how many bytes have one scheme, and partSize how many of them the schemes are tried on.
	blockSize = 8 << 10
	partSize  = 1 << 10
	// lookAgain is after how many blocks all schemes are tried again.
	lookAgain = 16
	// headerSize is the length of what is before the packed bytes of a block: the kind, the width, and
	// as 64-bit numbers the base, the divisor and the word before the first.
	headerSize = 26
	// raw is the kind of a block that is stored as it is, behind one byte.
	raw = 0
	// letters is the kind for words of 8 bits. They are unsigned, all others are signed.
	letters = 8
)

// kinds are the schemes of packed blocks: the length of a word in bits, and one more for differences.
var kinds = []byte{64, 65, 32, 33, 16, letters}

// plan is how a block is stored.
type plan struct {
	kind    byte
	width   uint  // bits of a packed word
	base    int64 // the smallest word, or the smallest difference
	divisor int64 // of all words of 64 bits; else 1
	first   int64 // the word before the first, for differences
}

// length returns how many bits a word has.
func (p *plan) length() uint { return uint(p.kind &^ 1) }

// size returns how many bytes a block of n is stored in.
func (p *plan) size(n int) int {
	if p.kind == raw {
		return 1 + n
	}
	return headerSize + bitpack.ByteCount(uint(n)*8/p.length()*p.width)
}

// offsets returns what makes words less their base of words: those with their highest bit flipped are
// unsigned numbers in the same order, so flipped and less a smallest one none of them borrows from the
// next word. Letters are unsigned as they are.
func (p *plan) offsets() (flip, less uint64) {
	each := ^uint64(0) / (1<<p.length() - 1) // a 1 in each word
	if p.kind != letters {
		flip = 1 << (p.length() - 1) // in a word
	}
	word := uint64(1)<<p.length() - 1
	return each * flip, each * ((uint64(p.base) ^ flip) & word)
}

// coder is what blocks are packed and unpacked in.
type coder struct {
	words  [blockSize / 8]uint64                  // 64 bits of words in each
	packed [blockSize + bitpack.PaddingInt64]byte // the library reads a few bytes more than there are

	kind      byte // of the block before
	age, size int  // since when, and what was left of the first block of that kind
}

// next returns the length of the first block of n bytes. A rest shorter than a word is a block of its own.
func next(n int) int {
	if n > 8 {
		n -= n % 8
	}
	return min(n, blockSize)
}

// Encode appends src to dst, packed.
func Encode(dst, src []byte) []byte {
	c := coder{age: lookAgain}
	for len(src) > 0 {
		n := next(len(src))
		dst = c.encode(dst, src[:n])
		src = src[n:]
	}
	return dst
}

// encode appends a block to dst.
func (c *coder) encode(dst, block []byte) []byte {
	n := len(block)
	var p plan
	if n > headerSize {
		p = c.plan(c.kind, block)
		if c.age++; c.age >= lookAgain || p.size(n) > c.size+c.size/4 {
			part := block[max(0, n-partSize)/16*8:]
			part = part[:min(len(part), partSize)]
			least := len(part)
			c.kind = raw
			for _, kind := range kinds {
				if p = c.plan(kind, part); p.size(len(part)) < least {
					c.kind, least = kind, p.size(len(part))
				}
			}
			p = c.plan(c.kind, block)
			c.age, c.size = 0, p.size(n)
		}
	}
	size := p.size(n)
	if size >= n {
		return append(append(dst, raw), block...)
	}
	words, length, width := c.words[:n/8], p.length(), p.width
	for ; length < 64; length, width = 2*length, 2*width { // two words become one that is twice as wide
		fold(words, ^uint64(0)/(1<<length+1), uint64(length-width))
	}
	bitpack.Pack(c.packed[:], words, width)
	dst = append(dst, p.kind, byte(p.width))
	for _, v := range []int64{p.base, p.divisor, p.first} {
		dst = binary.LittleEndian.AppendUint64(dst, uint64(v))
	}
	return append(dst, c.packed[:size-headerSize]...)
}

// plan finds out how a block of 16 bytes or more is stored as a kind, and sets c.words to what is to be
// packed.
func (c *coder) plan(kind byte, block []byte) plan {
	p := plan{kind: kind, divisor: 1}
	if kind == raw {
		return p
	}
	from := unsafecast.Slice[uint64](block)
	words := c.words[:len(from)]
	switch kind {
	case 65:
		p.first = subtractEach(unsafecast.Slice[int64](words), unsafecast.Slice[int64](from))
		from = words
	case 33:
		p.first = int64(subtractEach(unsafecast.Slice[int32](words), unsafecast.Slice[int32](from)))
		from = words
	}
	var span uint64
	switch p.length() {
	case 64:
		p.base, span = extremes[int64](from, 64)
	case 32:
		p.base, span = extremes[int32](from, 32)
	case 16:
		p.base, span = extremes[int16](from, 16)
	default:
		p.base, span = extremes[uint8](from, 8)
	}
	flip, less := p.offsets()
	shift(words, from, flip, -less, 0)
	if p.length() == 64 && span > 0 {
		p.divisor = int64(divide(words))
		span /= uint64(p.divisor)
	}
	p.width = uint(bits.Len64(span))
	return p
}

// subtractEach sets to to the words less those before them. It returns the word before the first one, with
// which the first difference is as the second one.
func subtractEach[T int32 | int64](to, words []T) (first T) {
	first = 2*words[0] - words[1]
	last := first
	for i, v := range words {
		to[i], last = v-last, v
	}
	return first
}

// divide divides all words by their greatest common divisor, and returns it, or 1 if all are 0. To divide by
// an odd number without a rest is to multiply by its inverse modulo 2^64. With a rest, the product is
// larger than any quotient.
func divide(words []uint64) uint64 {
	var divisor, most uint64 // the largest quotient
	inverse, zeros := uint64(1), 0
	for i, v := range words {
		quotient := bits.RotateLeft64(v*inverse, -zeros)
		if quotient > most {
			a, b := v, divisor
			for b != 0 {
				a, b = b, a%b
			}
			for k := range i { // these were divided by more
				words[k] *= divisor / a
			}
			if divisor = a; divisor == 1 {
				return 1
			}
			most, zeros = math.MaxUint64/divisor, bits.TrailingZeros64(divisor)
			odd := divisor >> zeros
			inverse = odd // in its lowest 3 bits
			for range 5 {
				inverse *= 2 - odd*inverse // in twice as many
			}
			quotient = v / divisor
		}
		words[i] = quotient
	}
	return max(1, divisor)
}

// ErrMalformed reports that bytes are not what Encode made of as many as are wanted.
var ErrMalformed = errors.New("bitpack: malformed")

// Decode fills dst with what src was made of, all of it.
func Decode(dst, src []byte) (err error) {
	var c coder
	for len(dst) > 0 {
		n := next(len(dst))
		if src, err = c.decode(dst[:n], src); err != nil {
			return err
		}
		dst = dst[n:]
	}
	if len(src) > 0 {
		return ErrMalformed
	}
	return nil
}

// decode fills a block and returns what is behind it in src.
func (c *coder) decode(block, src []byte) ([]byte, error) {
	n := len(block)
	if len(src) > n && src[0] == raw {
		return src[1+copy(block, src[1:]):], nil
	}
	if len(src) < headerSize || n%8 != 0 || !slices.Contains(kinds, src[0]) {
		return nil, ErrMalformed
	}
	p := plan{
		kind: src[0], width: uint(src[1]), base: int64(binary.LittleEndian.Uint64(src[2:])),
		divisor: int64(binary.LittleEndian.Uint64(src[10:])), first: int64(binary.LittleEndian.Uint64(src[18:])),
	}
	size := p.size(n)
	if size > min(len(src), headerSize+n) {
		return nil, ErrMalformed
	}
	words, width := unsafecast.Slice[uint64](block), 64/p.length()*p.width
	if width == 0 {
		clear(words)
	} else {
		copy(c.packed[:], src[headerSize:size])
		bitpack.Unpack(words, c.packed[:], width)
	}
	for length := uint(64); length > p.length(); { // a word becomes two
		length, width = length/2, width/2
		lower := ^uint64(0) / (1<<length + 1) / (1<<length - 1) * (1<<width - 1)
		unfold(words, lower, lower<<length, uint64(length-width))
	}
	if divisor := uint64(p.divisor); divisor != 1 {
		for i := range words {
			words[i] *= divisor
		}
	}
	switch p.kind {
	case 65:
		addEach(unsafecast.Slice[int64](words), p.base, p.first)
	case 33:
		addEach(unsafecast.Slice[int32](words), int32(p.base), int32(p.first))
	default:
		flip, less := p.offsets()
		shift(words, words, 0, less, flip)
	}
	return src[size:], nil
}

// addEach undoes subtractEach of words that are less their base.
func addEach[T int32 | int64](words []T, base, last T) {
	for i, v := range words {
		last += v + base
		words[i] = last
	}
}
