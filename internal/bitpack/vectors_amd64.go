package bitpack

import "golang.org/x/sys/cpu"

var hasAVX2 = cpu.X86.HasAVX2

// These do what the functions without AVX2 in their names do, with four words or a multiple of that.

//go:noescape
func shiftAVX2(to *uint64, words []uint64, before, add, after uint64)

//go:noescape
func foldAVX2(words []uint64, lower, n uint64)

//go:noescape
func unfoldAVX2(words []uint64, lower, upper, n uint64)

//go:noescape
func extremesAVX2(smallest, largest *[4]uint64, words []uint64, length uint)
