package tier

import (
	"encoding/binary"
	"math"
	"math/bits"

	"github.com/spillway-db/spillway/internal/racemark"
)

// The multipliers are the odd 64-bit constants of the golden ratio and of
// splitmix64's finalizer (Steele, Lea, Flood: Fast Splittable Pseudorandom
// Number Generators, 2014).
const (
	digestStep = 0x9e3779b97f4a7c15
	digestMix  = 0xbf58476d1ce4e5b9
)

// DigestBytes is the definition of Digest: for each little-endian 8-byte word w
// at position i (the first is first), Sum adds w and Hash adds
// rotl((w xor (i+1)·digestStep)·digestMix, 31)·digestStep. The sums do not depend
// on the order in which parts are taken, so a device may compute them in
// parallel. A last word that is not whole is padded with zero bytes.
//
//go:norace
func DigestBytes(b []byte, first int64) Digest {
	racemark.Read(b)
	var d Digest
	salt := uint64(first) * digestStep
	for len(b) >= 32 { // four at a time: 1.6 times as fast
		words := b[:32]
		w0 := binary.LittleEndian.Uint64(words)
		w1 := binary.LittleEndian.Uint64(words[8:])
		w2 := binary.LittleEndian.Uint64(words[16:])
		w3 := binary.LittleEndian.Uint64(words[24:])
		d.Sum += (w0 + w1) + (w2 + w3)
		h := bits.RotateLeft64((w0^(salt+digestStep))*digestMix, 31)
		h += bits.RotateLeft64((w1^(salt+digestStep*2&math.MaxUint64))*digestMix, 31)
		h += bits.RotateLeft64((w2^(salt+digestStep*3&math.MaxUint64))*digestMix, 31)
		h += bits.RotateLeft64((w3^(salt+digestStep*4&math.MaxUint64))*digestMix, 31)
		d.Hash += h * digestStep // of a sum: the product is distributive
		salt += digestStep * 4 & math.MaxUint64
		b = b[32:]
	}
	for len(b) >= 8 {
		w := binary.LittleEndian.Uint64(b)
		salt += digestStep
		d.Sum += w
		d.Hash += bits.RotateLeft64((w^salt)*digestMix, 31) * digestStep
		b = b[8:]
	}
	if len(b) > 0 {
		var last [8]byte
		copy(last[:], b)
		w := binary.LittleEndian.Uint64(last[:])
		d.Sum += w
		d.Hash += bits.RotateLeft64((w^(salt+digestStep))*digestMix, 31) * digestStep
	}
	return d
}
