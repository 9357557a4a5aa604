package testseed

import (
	"encoding/binary"
	"math/rand/v2"
	"sync"
)

// noise is what Fill copies from. To make as many random bytes anew takes longer than what many
// tests do with them.
var noise = sync.OnceValue(func() []byte {
	b := make([]byte, 1<<20)
	rand.NewChaCha8([32]byte{}).Read(b)
	return b
})

// Fill fills p with bytes that look random and depend on the seed alone. No two pieces of 64 KiB
// are alike, nor those of two seeds.
func Fill(p []byte, seed uint64) {
	const piece = 64 << 10
	rng := rand.New(rand.NewPCG(seed, 0xf111))
	for len(p) > 0 {
		n := copy(p, noise()[rng.IntN(len(noise())-piece):][:piece])
		if n >= 8 {
			binary.LittleEndian.PutUint64(p, rng.Uint64())
		}
		p = p[n:]
	}
}
