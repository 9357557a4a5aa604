package transfer

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
)

// copyHost copies host memory to host memory.
func copyHost(ctx context.Context, dst, src hostMemory, size int) error {
	from := &bytesFrom{Source: src, space: anyHost, size: int64(size)}
	return new(Builtin).copy(ctx, &bytesTo{Sink: dst, space: anyHost}, from)
}

// anyHost is a space of host memory that is only asked for its name.
var anyHost = func() *tier.Space {
	s, err := tier.NewSpace(tier.SpaceConfig{ID: tier.ID{Kind: tier.Host}, Capacity: 1 << 20, Node: -1, Backend: "none", Pool: noPool{}})
	if err != nil {
		panic(err)
	}
	return s
}()

type noPool struct{ tier.Pool }

// cut cuts memory at random.
func cut(rng *rand.Rand, p []byte) (out hostMemory) {
	for len(p) > 0 {
		n := 1 + rng.IntN(len(p))
		if rng.IntN(4) == 0 {
			out = append(out, nil) // a piece of nothing
		}
		out, p = append(out, p[:n:n]), p[n:]
	}
	return out
}

// copy copies each byte to its place, whatever the pieces on either side.
func TestHostToHostAnyPieces(t *testing.T) {
	seed := testseed.One(t)
	rng := rand.New(rand.NewPCG(seed, 2))
	for _, size := range []int{1, 4097, 1<<20 + 1, MaxPiece, 3*MaxPiece + 12345} {
		for range testseed.Rounds(4, 1) {
			src, dst := make([]byte, size), make([]byte, size)
			for i := range src {
				src[i] = byte(i>>16) ^ byte(i>>8) ^ byte(i)
			}
			if err := copyHost(t.Context(), cut(rng, dst), cut(rng, src), size); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(src, dst) {
				t.Fatalf("%d bytes are others than they were", size)
			}
		}
	}
	if err := copyHost(t.Context(), hostMemory{make([]byte, 10)}, hostMemory{make([]byte, 4), nil, make([]byte, 5)}, 10); err == nil {
		t.Error("a source that is too short was taken")
	}
}

// impatient is a context that ends when it has been asked so many times.
type impatient struct {
	context.Context
	left int
}

func (c *impatient) Err() error {
	if c.left--; c.left < 0 {
		return context.Canceled
	}
	return nil
}

// A cancelled copy between host spaces ends within a piece.
func TestHostToHostCancelled(t *testing.T) {
	src, dst := bytes.Repeat([]byte{7}, 3*MaxPiece), make([]byte, 3*MaxPiece)
	err := copyHost(&impatient{t.Context(), 1}, hostMemory{dst}, hostMemory{src}, len(src))
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
	if n := bytes.Count(dst, []byte{7}); n != MaxPiece {
		t.Errorf("%d bytes were copied, want %d", n, MaxPiece)
	}
}
