package codec

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/spillway-db/spillway/internal/payload"
)

func TestCoders(t *testing.T) {
	var k Coders
	rng := rand.New(rand.NewPCG(1, 2))
	noise := make([]byte, payload.FrameSize)
	for i := range noise {
		noise[i] = byte(rng.Uint32())
	}
	for _, c := range []Codec{None, S2, Zstd, Bitpack} {
		for name, src := range map[string][]byte{
			"nothing": {}, "a byte": {1}, "zeros": make([]byte, payload.FrameSize), "noise": noise,
			"text": bytes.Repeat([]byte("spillway "), 5000), "half noise": slices.Concat(noise[:9000], make([]byte, 9000)),
		} {
			before := []byte("before")
			room := append(make([]byte, 0, len(before)+2*len(src)+100), before...)
			out, err := k.Encode(c, room, src)
			if err != nil {
				t.Fatal(err)
			}
			if len(out) > 0 && &out[0] != &room[0] || !bytes.HasPrefix(out, before) {
				t.Fatalf("%s of %s: it is elsewhere", c, name)
			}
			stored := out[len(before):]
			if len(stored) > len(src) {
				t.Errorf("%s of %s: %d bytes became %d", c, name, len(src), len(stored))
			}
			back := make([]byte, len(src))
			if err := k.Decode(c, back, stored); err != nil || !bytes.Equal(back, src) {
				t.Errorf("%s of %s: %v", c, name, err)
			}
			if len(stored) == len(src) {
				continue
			}
			for _, wrong := range [][]byte{make([]byte, len(src)+1), make([]byte, len(src)-1)} {
				if err := k.Decode(c, wrong, stored); err == nil {
					t.Errorf("%s of %s: it was uncompressed to %d bytes", c, name, len(wrong))
				}
			}
		}
	}
}

// FuzzDecode: what is no codec's is an error, and no panic.
func FuzzDecode(f *testing.F) {
	var k Coders
	for _, c := range []Codec{S2, Zstd, Bitpack} {
		out, err := k.Encode(c, make([]byte, 0, 1<<16), bytes.Repeat([]byte("spillway "), 500))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(uint8(c), out)
		f.Add(uint8(c), out[:len(out)/2])
	}
	f.Fuzz(func(t *testing.T, c uint8, stored []byte) {
		back := make([]byte, 4500)
		_ = k.Decode(Codec(c%uint8(codecs)), back, stored)
	})
}

func TestParseCodec(t *testing.T) {
	for c := range codecs {
		if got, err := Parse(c.String()); got != c || err != nil || c.Validate() != nil {
			t.Errorf("%v: %v, %v", c, got, err)
		}
	}
	for _, s := range []string{"", "S2", "lz4", "auto "} {
		if _, err := Parse(s); err == nil {
			t.Errorf("%q is a codec", s)
		}
	}
	if codecs.Validate() == nil {
		t.Error("a number is a codec")
	}
}
