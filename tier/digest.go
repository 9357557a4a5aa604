package tier

import (
	"encoding/binary"
	"math/bits"

	"github.com/spillway-db/spillway/internal/invariants"
)

// The multipliers are the odd 64-bit constants of the golden ratio and of
// splitmix64's finalizer (Steele, Lea, Flood: Fast Splittable Pseudorandom
// Number Generators, 2014).
const (
	digestStep = 0x9e3779b97f4a7c15
	digestMix  = 0xbf58476d1ce4e5b9
)

// Digest is a fingerprint of a run of bytes, which DigestBytes defines.
type Digest struct {
	Hash uint64 // sum over words of a mixture of word and position
	Sum  uint64 // sum of the words
}

// Add returns the digest of both parts, if other's positions follow on.
func (d Digest) Add(other Digest) Digest {
	return Digest{Hash: d.Hash + other.Hash, Sum: d.Sum + other.Sum}
}

// DigestBytes is the definition of Digest: for each little-endian 8-byte word w at position i (the
// first is first), Sum adds w and Hash adds rotl((w xor (i+1)·digestStep)·digestMix, 31)·digestStep.
// The sums do not depend on the order in which parts are taken, so they may be digested in
// parallel. A last word that is not whole is padded with zero bytes.
//
//go:norace
func DigestBytes(b []byte, first int64) Digest {
	invariants.Reads(b)
	var sum, hash uint64
	salt := uint64(first) * digestStep
	add := func(w uint64) {
		salt += digestStep
		sum += w
		hash += bits.RotateLeft64((w^salt)*digestMix, 31)
	}
	for ; len(b) >= 8; b = b[8:] {
		add(binary.LittleEndian.Uint64(b))
	}
	if len(b) > 0 {
		var last [8]byte
		copy(last[:], b)
		add(binary.LittleEndian.Uint64(last[:]))
	}
	return Digest{Hash: hash * digestStep, Sum: sum} // of a sum: the product is distributive
}
