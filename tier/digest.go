package tier

import (
	"encoding/binary"
	"math/bits"
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
func DigestBytes(b []byte, first int64) Digest {
	var d Digest
	salt := uint64(first) * digestStep
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
