package bitpack

import (
	"slices"

	"github.com/parquet-go/bitpack/unsafecast"
)

// The functions of this file do most of the work. With AVX2, assembly does it for as many words as fill
// vectors of 32 bytes, and Go does the rest; elsewhere Go does all of it.

// vectors divides words into those that fill vectors and the rest.
func vectors(words []uint64) (full, rest []uint64) {
	if !hasAVX2 {
		return nil, words
	}
	n := len(words) &^ 3
	return words[:n], words[n:]
}

// shift sets to, which may be from, to (v ^ before + add) ^ after for each v.
func shift(to, from []uint64, before, add, after uint64) {
	full, rest := vectors(from)
	if len(full) > 0 {
		shiftAVX2(&to[0], full, before, add, after)
	}
	for i, v := range rest {
		to[len(full)+i] = (v ^ before + add) ^ after
	}
}

// fold moves the bits that lower does not have down, by n bits.
func fold(words []uint64, lower, n uint64) {
	full, rest := vectors(words)
	if len(full) > 0 {
		foldAVX2(full, lower, n)
	}
	for i, v := range rest {
		rest[i] = v&lower | v&^lower>>(n&63)
	}
}

// unfold moves bits up to where upper has them, by n bits, and keeps those that lower has.
func unfold(words []uint64, lower, upper, n uint64) {
	full, rest := vectors(words)
	if len(full) > 0 {
		unfoldAVX2(full, lower, upper, n)
	}
	for i, v := range rest {
		rest[i] = v&lower | v<<(n&63)&upper
	}
}

// extremes returns the smallest word of so many bits, and how much larger the largest is.
func extremes[T uint8 | int16 | int32 | int64](words []uint64, length uint) (least int64, span uint64) {
	low := unsafecast.Slice[T](words)[0]
	high := low
	full, rest := vectors(words)
	if len(full) > 0 {
		var smallest, largest [4]uint64 // at each place of a vector
		extremesAVX2(&smallest, &largest, full, length)
		low, high = slices.Min(unsafecast.Slice[T](smallest[:])), slices.Max(unsafecast.Slice[T](largest[:]))
	}
	for _, v := range unsafecast.Slice[T](rest) {
		low, high = min(low, v), max(high, v)
	}
	return int64(low), uint64(high) - uint64(low)
}
