package bitpack

import (
	"encoding/binary"
	"math/bits"
)

// What every processor can do: the lanes of a vector are looked at eight bytes at a time, of which
// each holds one lane or several.

const (
	// vector is how many bytes are packed and unpacked at a time.
	vector = 32
	// inVector is how many words of eight bytes that is.
	inVector = vector / 8
)

// each returns a word with x in each of its lanes.
func each(x uint64, bits uint) uint64 {
	switch bits {
	case 64:
		return x
	case 32:
		return x * 0x0000000100000001
	case 16:
		return x * 0x0001000100010001
	}
	return x * 0x0101010101010101
}

// ones returns a number of n bits that are set.
func ones(n uint) uint64 { return 1<<n - 1 }

// add and sub calculate lane by lane; high is the highest bit of each.
func add(a, b, high uint64) uint64 { return (a&^high + b&^high) ^ (a^b)&high }
func sub(a, b, high uint64) uint64 { return (a | high - b&^high) ^ (a^^b)&high }

func load(b []byte, i int) uint64     { return binary.LittleEndian.Uint64(b[8*i:]) }
func store(b []byte, i int, v uint64) { binary.LittleEndian.PutUint64(b[8*i:], v) }

// vectorOf is the first vector of b, as it is looked at.
func vectorOf(b []byte) *[vector]byte { return (*[vector]byte)(b) }

// unpackWords is unpack.
func (p *plan) unpackWords(block, src []byte) {
	size, width := lanes[p.scheme], p.laneWidth()
	if width == 0 {
		clear(block)
		p.widen(block)
		return
	}
	mask := each(ones(width), size)
	last := len(src) - vector
	bit := uint(0)
	for b := block; len(b) >= vector; b = b[vector:] {
		at, s := int(bit/size)*vector, bit%size
		from, next, to := vectorOf(src[at:]), vectorOf(src[min(at+vector, last):]), vectorOf(b)
		low := each(ones(size-s), size) // what of a lane comes from here, and not from the next vector
		for k := 0; k < vector; k += 8 {
			v := binary.LittleEndian.Uint64(from[k:])>>s&low | binary.LittleEndian.Uint64(next[k:])<<(size-s)&^low
			binary.LittleEndian.PutUint64(to[k:], v&mask)
		}
		bit += width
	}
	p.widen(block)
}

// widen makes the numbers of a block what they were before they were packed, in place.
func (p *plan) widen(block []byte) {
	switch p.scheme {
	case for64:
		for i := range len(block) / 8 {
			store(block, i, load(block, i)*p.divisor+p.base)
		}
	case delta64:
		last := p.first
		for i := range len(block) / 8 {
			last += load(block, i)*p.divisor + p.base
			store(block, i, last)
		}
	case for32, for16:
		size := lanes[p.scheme]
		base, high := each(p.base&ones(size), size), each(1<<(size-1), size)
		for i := range len(block) / 8 {
			store(block, i, add(load(block, i), base, high))
		}
	case delta32:
		last, base := uint32(p.first), uint32(p.base)
		for i := range len(block) / 8 {
			v := load(block, i)
			x := last + uint32(v) + base
			last = x + uint32(v>>32) + base
			store(block, i, uint64(x)|uint64(last)<<32)
		}
	case for8:
		base, high, one := each(p.base&0xff, 8), each(1<<7, 8), each(ones(p.width), 16)
		for i := range len(block) / 8 {
			v := load(block, i)
			store(block, i, add(v&one|v>>p.width&one<<8, base, high))
		}
	}
}

// packWords is pack.
func (p *plan) packWords(dst, block []byte) bool {
	var room [blockSize / 8]uint64
	numbers := room[:len(block)/8]
	lost := p.narrow(numbers, block)
	size, width := lanes[p.scheme], p.laneWidth()
	mask := each(ones(width), size)
	var open [inVector]uint64 // the vector that is not full yet
	used := uint(0)
	for len(numbers) >= inVector {
		v := (*[inVector]uint64)(numbers)
		numbers = numbers[inVector:]
		here := each(ones(size)<<used&ones(size), size)
		for k := range v {
			lost |= v[k] &^ mask
			open[k] |= v[k] << used & here
		}
		if used += width; used < size {
			continue
		}
		used -= size
		rest := width - used // bits that went there
		over := each(ones(size)>>rest, size)
		to := vectorOf(dst)
		dst = dst[vector:]
		for k := range v {
			binary.LittleEndian.PutUint64(to[8*k:], open[k])
			open[k] = v[k] & mask >> rest & over
		}
	}
	if used > 0 {
		for k, v := range open {
			store(dst, k, v)
		}
	}
	return lost == 0
}

// narrow makes of the words of a block numbers as narrow as they can be, and returns
// what of them was lost, if any was.
func (p *plan) narrow(to []uint64, block []byte) (lost uint64) {
	block = block[:8*len(to)]
	switch size := lanes[p.scheme]; p.scheme {
	case for64:
		shift, by := p.divide()
		for i := range to {
			d := load(block, i) - p.base
			to[i] = d >> (shift & 63) * by
			lost |= d & ones(shift)
		}
	case delta64:
		shift, by := p.divide()
		last := p.first
		for i := range to {
			v := load(block, i)
			d := v - last - p.base
			to[i] = d >> (shift & 63) * by
			lost |= d & ones(shift)
			last = v
		}
	case for32, for16:
		base, high := each(p.base&ones(size), size), each(1<<(size-1), size)
		for i := range to {
			to[i] = sub(load(block, i), base, high)
		}
	case delta32:
		last, base := uint32(p.first), uint32(p.base)
		for i := range to {
			v := load(block, i)
			x, y := uint32(v), uint32(v>>32)
			to[i] = uint64(x-last-base) | uint64(y-x-base)<<32
			last = y
		}
	case for8:
		base, high, mask := each(p.base&0xff, 8), each(1<<7, 8), each(ones(p.width), 8)
		for i := range to {
			v := sub(load(block, i), base, high)
			lost |= v &^ mask
			to[i] = v&0x00ff00ff00ff00ff | v>>8&0x00ff00ff00ff00ff<<(p.width&63)
		}
	}
	return lost
}

// spanWords is span. For bytes it returns the bits common to all, and the same with all other bits
// set. These two are at least as far apart as the least and the largest number.
func spanWords(s scheme, block []byte) (lo, hi int64) {
	lo, hi = 1<<63-1, -1<<63
	take := func(v int64) { lo, hi = min(lo, v), max(hi, v) }
	switch n := len(block) / 8; s {
	case for64:
		for i := range n {
			v := int64(load(block, i))
			lo, hi = min(lo, v), max(hi, v)
		}
	case delta64:
		last := load(block, 0)
		for i := 1; i < n; i++ {
			v := load(block, i)
			d := int64(v - last)
			lo, hi = min(lo, d), max(hi, d)
			last = v
		}
		if n == 1 {
			take(0)
		}
	case for32:
		for i := range n {
			v := load(block, i)
			x, y := int64(int32(v)), int64(int32(v>>32))
			lo, hi = min(lo, x, y), max(hi, x, y)
		}
	case delta32:
		last := binary.LittleEndian.Uint32(block)
		for at := 4; at < len(block); at += 4 {
			v := binary.LittleEndian.Uint32(block[at:])
			take(int64(int32(v - last)))
			last = v
		}
	case for16:
		for i := range n {
			v := load(block, i)
			x, y, z, w := int64(int16(v)), int64(int16(v>>16)), int64(int16(v>>32)), int64(int16(v>>48))
			lo, hi = min(lo, x, y, z, w), max(hi, x, y, z, w)
		}
	case for8:
		all, some := ^uint64(0), uint64(0)
		for i := range n {
			v := load(block, i)
			all &= v
			some |= v
		}
		for _, n := range [...]uint{32, 16, 8} {
			all &= all >> n
			some |= some >> n
		}
		varying := ones(uint(bits.Len8(uint8(all ^ some))))
		lo = int64(uint64(uint8(all)) &^ varying)
		hi = lo | int64(varying)
	}
	return lo, hi
}
