// Package bitpack compresses numbers that are wider than they need be, which is what Arrow
// columns are full of: small values in 64 bits, offsets at even steps, instants in whole
// minutes, letters.
//
//	block of 8 KiB ── looked at as words of 64, 32, 16 or 8 bits ── the scheme that leaves least
//	                  each less a base, or less the word before and a base,
//	                  divided by what divides them all, in as few bits as the largest needs
//
// It knows nothing of columns: every block of any bytes is one of the schemes, raw at the
// worst, so that what comes back is what went in, bit for bit. The schemes are those of Lemire and
// Boytsov, "Decoding billions of integers per second through vectorization" (2015): frame of
// reference, and differences, packed side by side. Words narrower than 64 bits are
// packed eight bytes at a time.
//
// Measured on one core of an AMD EPYC with 256 KiB at a time: see BenchmarkFlights.
package bitpack

import (
	"encoding/binary"
	"errors"
	"math/bits"
	"slices"
)

const (
	// blockSize is how many bytes have one scheme.
	blockSize = 8 << 10
	// partSize is how much of a block the schemes are tried on.
	partSize = 1 << 10
	// lookAgain is after how many blocks all schemes are tried again.
	lookAgain = 16
)

// scheme is how a block is stored. Behind its number come the width in bits of a packed
// word, one byte, the base, eight bytes, and for 64 bits what all were divided by; for differences the
// first word. Raw blocks have only the number.
type scheme uint8

const (
	raw scheme = iota
	for64
	delta64
	for32
	delta32
	for16
	high8 // the upper bits are the same in all bytes
	schemes
)

// parts is into how many words a scheme divides eight bytes.
var parts = [schemes]uint{for64: 1, delta64: 1, for32: 2, delta32: 2, for16: 4, high8: 8}

// headers is how long what comes before the packed words is.
var headers = [schemes]int{raw: 1, for64: 18, delta64: 26, for32: 10, delta32: 18, for16: 10, high8: 10}

// plan is a scheme with its numbers for one block.
type plan struct {
	scheme  scheme
	width   uint   // bits of a packed word
	base    uint64 // of the words, or of the differences; repeated for each part of eight bytes
	first   uint64 // the word before the first, for differences
	divisor uint64 // for 64 bits; 1 or more
}

// size returns how many bytes a block of so many takes.
func (p *plan) size(block int) int {
	if p.scheme == raw {
		return 1 + block
	}
	return headers[p.scheme] + packed(block/8, p.width*parts[p.scheme])
}

// packed returns how many bytes so many packed groups of eight bytes take.
func packed(groups int, width uint) int { return (groups*int(width) + 63) / 64 * 8 }

// Encode appends src to dst, packed.
func Encode(dst, src []byte) []byte {
	var last scheme
	var divisor uint64
	age, size := lookAgain, 0
	for len(src) > 0 {
		block := src[:min(len(src), blockSize)]
		src = src[len(block):]
		if len(block)%8 != 0 {
			dst = append(append(dst, byte(raw)), block...)
			continue
		}
		var p plan
		if age++; age < lookAgain {
			p = look(last, block, divisor)
		}
		if age >= lookAgain || p.size(len(block)) > size+size/4 {
			p = choose(block)
			last, divisor, age, size = p.scheme, p.divisor, 0, p.size(len(block))
		}
		if p.size(len(block)) > 1+len(block) {
			p = plan{}
		}
		dst = p.append(dst, block)
	}
	return dst
}

// choose finds the scheme that leaves least of a part of the block, and then its numbers for all of
// it: to look at all of it in every way would take longer than to pack it.
func choose(block []byte) plan {
	part := block
	if len(part) > partSize {
		at := (len(part) - partSize) / 16 * 8
		part = part[at : at+partSize]
	}
	best, least := raw, len(part)
	for s := for64; s < schemes; s++ {
		p := look(s, part, 0)
		if n := p.size(len(part)); n < least {
			best, least = s, n
		}
	}
	return look(best, block, 0)
}

// look finds the numbers of a scheme for a block. divisor is what the words before were
// divided by; 0 if that is to be found out.
func look(s scheme, block []byte, divisor uint64) plan {
	switch s {
	case for64:
		return lookFor64(block, divisor)
	case delta64:
		return lookDelta64(block, divisor)
	case for32:
		return lookFor32(block)
	case delta32:
		return lookDelta32(block)
	case for16:
		return lookFor16(block)
	case high8:
		return lookHigh8(block)
	}
	return plan{}
}

func word(b []byte, i int) uint64 { return binary.LittleEndian.Uint64(b[8*i:]) }

func lookFor64(block []byte, divisor uint64) plan {
	lo, hi := int64(word(block, 0)), int64(word(block, 0))
	for b := block; len(b) >= 8; b = b[8:] {
		v := int64(binary.LittleEndian.Uint64(b))
		lo, hi = min(lo, v), max(hi, v)
	}
	p := plan{scheme: for64, base: uint64(lo)}
	span := uint64(hi) - uint64(lo)
	if divisor == 0 {
		for i := 0; i < len(block)/8 && divisor != 1; i += 1 + len(block)/512 {
			divisor = gcd(divisor, word(block, i)-p.base)
		}
	}
	p.divide(span, divisor, func(inverse, most uint64, shift uint) bool {
		for b := block; len(b) >= 8; b = b[8:] {
			if v := binary.LittleEndian.Uint64(b) - p.base; v&(1<<shift-1) != 0 || (v>>shift)*inverse > most {
				return false
			}
		}
		return true
	})
	return p
}

func lookDelta64(block []byte, divisor uint64) plan {
	first := word(block, 0)
	lo, hi := int64(1<<63-1), int64(-1<<63)
	last := first
	for b := block[8:]; len(b) >= 8; b = b[8:] {
		v := binary.LittleEndian.Uint64(b)
		d := int64(v - last)
		lo, hi = min(lo, d), max(hi, d)
		last = v
	}
	if len(block) == 8 {
		lo, hi = 0, 0
	}
	p := plan{scheme: delta64, base: uint64(lo), first: first - uint64(lo)}
	span := uint64(hi) - uint64(lo)
	if divisor == 0 {
		for i := 1; i < len(block)/8 && divisor != 1; i += 1 + len(block)/512 {
			divisor = gcd(divisor, word(block, i)-word(block, i-1)-p.base)
		}
	}
	p.divide(span, divisor, func(inverse, most uint64, shift uint) bool {
		last := p.first
		for b := block; len(b) >= 8; b = b[8:] {
			v := binary.LittleEndian.Uint64(b)
			if d := v - last - p.base; d&(1<<shift-1) != 0 || (d>>shift)*inverse > most {
				return false
			}
			last = v
		}
		return true
	})
	return p
}

// divide sets the divisor and the width of words from 0 to span. all says whether every
// word can be divided: word>>shift times inverse is then its quotient, which is at most most, and more
// otherwise.
func (p *plan) divide(span, divisor uint64, all func(inverse, most uint64, shift uint) bool) {
	p.divisor = 1
	if divisor > 1 && span > 0 {
		shift := uint(bits.TrailingZeros64(divisor))
		if all(inverse(divisor>>shift), span/divisor, shift) {
			p.divisor = divisor
		}
	}
	p.width = uint(bits.Len64(span / p.divisor))
}

// gcd returns the greatest common divisor; that of 0 and any number is the number.
func gcd(a, b uint64) uint64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// inverse returns x for which odd times x is 1 modulo 2⁶⁴, by Newton's iteration; what odd
// divides is divided by multiplying with it (Granlund and Montgomery, 1994).
func inverse(odd uint64) uint64 {
	x := odd // right in three bits
	for range 5 {
		x *= 2 - odd*x
	}
	return x
}

// The highest bit of each part: with it flipped, signed numbers are in the order of unsigned ones.
const (
	sign32 = 1<<63 | 1<<31
	sign16 = sign32 | 1<<47 | 1<<15
)

func lookFor32(block []byte) plan {
	lo, hi := int32(1<<31-1), int32(-1<<31)
	for b := block; len(b) >= 8; b = b[8:] {
		v := binary.LittleEndian.Uint64(b)
		x, y := int32(v), int32(v>>32)
		lo, hi = min(lo, x, y), max(hi, x, y)
	}
	base := uint64(uint32(lo)) ^ 1<<31
	return plan{scheme: for32, base: base | base<<32, width: uint(bits.Len32(uint32(hi) - uint32(lo)))}
}

func lookDelta32(block []byte) plan {
	first := binary.LittleEndian.Uint32(block)
	lo, hi := int32(1<<31-1), int32(-1<<31)
	last := first
	for b := block[4:]; len(b) >= 4; b = b[4:] {
		v := binary.LittleEndian.Uint32(b)
		d := int32(v - last)
		lo, hi = min(lo, d), max(hi, d)
		last = v
	}
	return plan{scheme: delta32, base: uint64(uint32(lo)), first: uint64(first - uint32(lo)), width: uint(bits.Len32(uint32(hi) - uint32(lo)))}
}

func lookFor16(block []byte) plan {
	lo, hi := int16(1<<15-1), int16(-1<<15)
	for b := block; len(b) >= 8; b = b[8:] {
		v := binary.LittleEndian.Uint64(b)
		x, y, z, w := int16(v), int16(v>>16), int16(v>>32), int16(v>>48)
		lo, hi = min(lo, x, y, z, w), max(hi, x, y, z, w)
	}
	base := uint64(uint16(lo)) ^ 1<<15
	return plan{scheme: for16, base: base * 0x0001000100010001, width: uint(bits.Len16(uint16(hi) - uint16(lo)))}
}

func lookHigh8(block []byte) plan {
	all, some := ^uint64(0), uint64(0)
	for b := block; len(b) >= 8; b = b[8:] {
		v := binary.LittleEndian.Uint64(b)
		all &= v
		some |= v
	}
	for _, n := range [...]uint{32, 16, 8} {
		all &= all >> n
		some |= some >> n
	}
	width := uint(bits.Len8(uint8(all ^ some)))
	base := uint64(uint8(all)) >> width << width
	return plan{scheme: high8, base: base * 0x0101010101010101, width: width}
}

// append stores a block.
func (p *plan) append(dst, block []byte) []byte {
	dst = append(dst, byte(p.scheme))
	if p.scheme == raw {
		return append(dst, block...)
	}
	dst = append(dst, byte(p.width))
	dst = binary.LittleEndian.AppendUint64(dst, p.base)
	switch p.scheme {
	case for64:
		dst = binary.LittleEndian.AppendUint64(dst, p.divisor)
	case delta64:
		dst = binary.LittleEndian.AppendUint64(dst, p.divisor)
		dst = binary.LittleEndian.AppendUint64(dst, p.first)
	case delta32:
		dst = binary.LittleEndian.AppendUint64(dst, p.first)
	}
	width := p.width * parts[p.scheme]
	if width == 0 {
		return dst
	}
	var room [blockSize / 8]uint64
	groups := room[:len(block)/8]
	p.narrow(groups, block)
	at := len(dst)
	dst = slices.Grow(dst, packed(len(groups), width))[:at+packed(len(groups), width)]
	pack(dst[at:], groups, width)
	return dst
}

// narrow makes of each eight bytes a group: their words, as narrow as they can be, side by
// side in the lower bits.
func (p *plan) narrow(groups []uint64, block []byte) {
	n, base := p.width, p.base
	block = block[:8*len(groups)]
	switch p.scheme {
	case for64:
		if p.divisor == 1 {
			for i := range groups {
				groups[i] = binary.LittleEndian.Uint64(block[8*i:]) - base
			}
			return
		}
		shift := uint(bits.TrailingZeros64(p.divisor)) & 63
		by := inverse(p.divisor >> shift)
		for i := range groups {
			groups[i] = (binary.LittleEndian.Uint64(block[8*i:]) - base) >> shift * by
		}
	case delta64:
		shift := uint(bits.TrailingZeros64(p.divisor)) & 63
		by := inverse(p.divisor >> shift)
		last := p.first + base
		for i := range groups {
			v := binary.LittleEndian.Uint64(block[8*i:])
			groups[i] = (v - last) >> shift * by
			last = v + base
		}
	case for32:
		for i := range groups {
			v := binary.LittleEndian.Uint64(block[8*i:]) ^ sign32 - base
			groups[i] = v&0xffffffff | v>>32<<(n&63)
		}
	case delta32:
		last := uint32(p.first) + uint32(base)
		for i := range groups {
			v := binary.LittleEndian.Uint64(block[8*i:])
			x, y := uint32(v), uint32(v>>32)
			groups[i] = uint64(x-last) | uint64(y-x-uint32(base))<<(n&63)
			last = y + uint32(base)
		}
	case for16:
		for i := range groups {
			groups[i] = narrow16(binary.LittleEndian.Uint64(block[8*i:])^sign16-base, n&63)
		}
	case high8:
		for i := range groups {
			v := binary.LittleEndian.Uint64(block[8*i:]) ^ base
			groups[i] = narrow16(v&0x00ff00ff00ff00ff|v>>8&0x00ff00ff00ff00ff<<(n&63), 2*n&63)
		}
	}
}

// widen is the way back, in place.
func (p *plan) widen(block []byte) {
	n, base := p.width&63, p.base
	one := uint64(1)<<n - 1
	switch p.scheme {
	case for64:
		if p.divisor == 1 && base == 0 {
			return
		}
		for b := block; len(b) >= 8; b = b[8:] {
			binary.LittleEndian.PutUint64(b, binary.LittleEndian.Uint64(b)*p.divisor+base)
		}
	case delta64:
		last := p.first
		for b := block; len(b) >= 8; b = b[8:] {
			last += binary.LittleEndian.Uint64(b)*p.divisor + base
			binary.LittleEndian.PutUint64(b, last)
		}
	case for32:
		for b := block; len(b) >= 8; b = b[8:] {
			v := binary.LittleEndian.Uint64(b)
			binary.LittleEndian.PutUint64(b, (v&one|v>>n<<32)+base^sign32)
		}
	case delta32:
		last := uint32(p.first)
		for b := block; len(b) >= 8; b = b[8:] {
			v := binary.LittleEndian.Uint64(b)
			x := last + uint32(v&one) + uint32(base)
			last = x + uint32(v>>n) + uint32(base)
			binary.LittleEndian.PutUint64(b, uint64(x)|uint64(last)<<32)
		}
	case for16:
		for b := block; len(b) >= 8; b = b[8:] {
			binary.LittleEndian.PutUint64(b, wide16(binary.LittleEndian.Uint64(b), n)+base^sign16)
		}
	case high8:
		one *= 0x0001000100010001
		for b := block; len(b) >= 8; b = b[8:] {
			v := wide16(binary.LittleEndian.Uint64(b), 2*n&63)
			binary.LittleEndian.PutUint64(b, (v&one|v>>n&one<<8)^base)
		}
	}
}

// narrow16 moves four numbers of at most n bits together; wide16 moves them apart.
func narrow16(v uint64, n uint) uint64 {
	v = v&0x0000ffff0000ffff | v>>16&0x0000ffff0000ffff<<n
	return v&0xffffffff | v>>32<<(2*n)
}

func wide16(v uint64, n uint) uint64 {
	pair := uint64(1)<<(2*n) - 1
	v = v&pair | v>>(2*n)<<32
	one := (uint64(1)<<n - 1) * 0x100000001
	return v&one | v>>n&one<<16
}

// pack puts groups of 1 to 64 bits side by side.
func pack(dst []byte, groups []uint64, width uint) {
	var acc uint64
	used := uint(0) // bits of acc, below 64
	for _, v := range groups {
		acc |= v << (used & 63)
		if used += width; used >= 64 {
			binary.LittleEndian.PutUint64(dst, acc)
			dst = dst[8:]
			used -= 64
			acc = v >> (width - used) // 0 if that is 64
		}
	}
	if used > 0 {
		binary.LittleEndian.PutUint64(dst, acc)
	}
}

// ErrMalformed says that bytes are not what Encode made of as many as are wanted.
var ErrMalformed = errors.New("bitpack: malformed")

// Decode fills dst with what src was made of, all of it.
func Decode(dst, src []byte) error {
	for len(dst) > 0 {
		block := dst[:min(len(dst), blockSize)]
		dst = dst[len(block):]
		n, err := decode(block, src)
		if err != nil {
			return err
		}
		src = src[n:]
	}
	if len(src) > 0 {
		return ErrMalformed
	}
	return nil
}

// decode fills a block and returns how many bytes of src that took.
func decode(block, src []byte) (int, error) {
	if len(src) == 0 || scheme(src[0]) >= schemes {
		return 0, ErrMalformed
	}
	p := plan{scheme: scheme(src[0])}
	header := headers[p.scheme]
	if p.scheme == raw {
		if len(src) < header+len(block) {
			return 0, ErrMalformed
		}
		return header + copy(block, src[header:]), nil
	}
	if len(src) < header || len(block)%8 != 0 {
		return 0, ErrMalformed
	}
	p.width, p.base = uint(src[1]), binary.LittleEndian.Uint64(src[2:])
	switch p.scheme {
	case for64:
		p.divisor = binary.LittleEndian.Uint64(src[10:])
	case delta64:
		p.divisor, p.first = binary.LittleEndian.Uint64(src[10:]), binary.LittleEndian.Uint64(src[18:])
	case delta32:
		p.first = binary.LittleEndian.Uint64(src[10:])
	}
	width := p.width * parts[p.scheme]
	if width > 64 {
		return 0, ErrMalformed
	}
	size := packed(len(block)/8, width)
	if len(src) < header+size {
		return 0, ErrMalformed
	}
	unpack(block, src[header:header+size], width)
	p.widen(block)
	return header + size, nil
}

// unpack fills a block with groups of 0 to 64 bits, each in eight bytes.
func unpack(block, src []byte, width uint) {
	if width == 0 {
		clear(block)
		return
	}
	fast := 0
	if width <= 57 { // a group lies in the eight bytes that it begins in
		// All but the last few, behind which there are eight bytes no more.
		fast = min(len(block)/8, max(0, (len(src)-8)*8/int(width)))
		unpackFast(block, src, width, fast)
	}
	mask := uint64(1)<<width - 1
	for i := fast; i < len(block)/8; i++ {
		bit := uint(i) * width
		at := bit / 64 * 8
		v := binary.LittleEndian.Uint64(src[at:]) >> (bit % 64)
		if bit%64+width > 64 {
			v |= binary.LittleEndian.Uint64(src[at+8:]) << (64 - bit%64)
		}
		binary.LittleEndian.PutUint64(block[8*i:], v&mask)
	}
}
