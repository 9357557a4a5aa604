//go:build amd64 && !race

package bitpack

import (
	"unsafe"

	"golang.org/x/sys/cpu"
)

// wide reports whether there are registers of 32 bytes.
var wide = cpu.X86.HasAVX2

// What follows is in lanes_amd64.s. n is how many vectors the numbers fill when they are not
// packed, 1 or more; width how many bits of a lane they take; last where in src the
// last vector begins. The pack functions return whether all numbers fitted, and were
// divided without remainder.

//go:noescape
func unpackFor64(dst, src *byte, n, last, width, base, by uint64)

//go:noescape
func unpackDelta64(dst, src *byte, n, last, width, base, by, first uint64)

//go:noescape
func unpackFor32(dst, src *byte, n, last, width, base uint64)

//go:noescape
func unpackDelta32(dst, src *byte, n, last, width, base, first uint64)

//go:noescape
func unpackFor16(dst, src *byte, n, last, width, base uint64)

//go:noescape
func unpackFor8(dst, src *byte, n, last, width, base uint64)

//go:noescape
func packFor64(dst, src *byte, n, width, base, shift, inverse uint64) bool

//go:noescape
func packDelta64(dst, src *byte, n, width, base, shift, inverse, first uint64) bool

//go:noescape
func packFor32(dst, src *byte, n, width, base uint64) bool

//go:noescape
func packDelta32(dst, src *byte, n, width, base, first uint64) bool

//go:noescape
func packFor16(dst, src *byte, n, width, base uint64) bool

//go:noescape
func packFor8(dst, src *byte, n, width, base uint64) bool

// The least and the largest of each lane of n vectors, 1 or more; of differences, of those
// that begin a word behind src.

//go:noescape
func range64(out *[2][vector]byte, src *byte, n uint64)

//go:noescape
func rangeDelta64(out *[2][vector]byte, src *byte, n uint64)

//go:noescape
func range32(out *[2][vector]byte, src *byte, n uint64)

//go:noescape
func rangeDelta32(out *[2][vector]byte, src *byte, n uint64)

//go:noescape
func range16(out *[2][vector]byte, src *byte, n uint64)

//go:noescape
func range8(out *[2][vector]byte, src *byte, n uint64)

// nothing is what numbers of no bits are unpacked from.
var nothing [vector]byte

// unpack fills a block, of one vector or more, with what src, of just so many bytes, was
// packed from.
func (p *plan) unpack(block, src []byte) {
	if !wide {
		p.unpackWords(block, src)
		return
	}
	if len(src) == 0 {
		src = nothing[:]
	}
	to, from := unsafe.SliceData(block), unsafe.SliceData(src)
	n, last, width := uint64(len(block)/vector), uint64(len(src)-vector), uint64(p.laneWidth())
	switch p.scheme {
	case for64:
		unpackFor64(to, from, n, last, width, p.base, p.divisor)
	case delta64:
		unpackDelta64(to, from, n, last, width, p.base, p.divisor, p.first)
	case for32:
		unpackFor32(to, from, n, last, width, p.base)
	case delta32:
		unpackDelta32(to, from, n, last, width, p.base, p.first)
	case for16:
		unpackFor16(to, from, n, last, width, p.base)
	case for8:
		unpackFor8(to, from, n, last, width, p.base)
	}
}

// pack is the way back, and reports whether that is so: not if words have a remainder.
func (p *plan) pack(dst, block []byte) bool {
	if !wide {
		return p.packWords(dst, block)
	}
	var room [vector]byte // where nothing is stored, and the address of something is needed
	if len(dst) == 0 {
		dst = room[:]
	}
	to, from := unsafe.SliceData(dst), unsafe.SliceData(block)
	n, width := uint64(len(block)/vector), uint64(p.laneWidth())
	switch p.scheme {
	case for64:
		shift, inverse := p.divide()
		return packFor64(to, from, n, width, p.base, uint64(shift), inverse)
	case delta64:
		shift, inverse := p.divide()
		return packDelta64(to, from, n, width, p.base, uint64(shift), inverse, p.first)
	case for32:
		return packFor32(to, from, n, width, p.base)
	case delta32:
		return packDelta32(to, from, n, width, p.base, p.first)
	case for16:
		return packFor16(to, from, n, width, p.base)
	}
	return packFor8(to, from, n, width, p.base)
}

// span returns the least and the largest of what a scheme packs of a block.
func span(s scheme, block []byte) (lo, hi int64) {
	step := 0
	if s == delta64 || s == delta32 {
		step = int(lanes[s]) / 8
	}
	n := (len(block) - step) / vector
	if !wide || n == 0 {
		return spanWords(s, block)
	}
	var out [2][vector]byte
	from := unsafe.SliceData(block)
	switch s {
	case for64:
		range64(&out, from, uint64(n))
	case delta64:
		rangeDelta64(&out, from, uint64(n))
	case for32:
		range32(&out, from, uint64(n))
	case delta32:
		rangeDelta32(&out, from, uint64(n))
	case for16:
		range16(&out, from, uint64(n))
	case for8:
		range8(&out, from, uint64(n))
	}
	lo, hi = extremes(s, &out)
	if step == 0 {
		return lo, hi
	}
	if rest := block[n*vector:]; len(rest) > step { // less than a vector of differences is left
		least, most := spanWords(s, rest)
		lo, hi = min(lo, least), max(hi, most)
	}
	return lo, hi
}

// extremes returns the least of the lanes of the first vector and the largest of those of
// the second.
func extremes(s scheme, of *[2][vector]byte) (lo, hi int64) {
	switch s {
	case for8:
		lo = 255
		for i := range vector {
			lo, hi = min(lo, int64(of[0][i])), max(hi, int64(of[1][i]))
		}
		return lo, hi
	case delta64:
		s = for64
	case delta32:
		s = for32
	}
	lo, _ = spanWords(s, of[0][:])
	_, hi = spanWords(s, of[1][:])
	return lo, hi
}
