//go:build !amd64

package bitpack

const hasAVX2 = false

// These are never called.

func shiftAVX2(*uint64, []uint64, uint64, uint64, uint64)       {}
func foldAVX2([]uint64, uint64, uint64)                         {}
func unfoldAVX2([]uint64, uint64, uint64, uint64)               {}
func extremesAVX2(_, _ *[4]uint64, words []uint64, length uint) {}
