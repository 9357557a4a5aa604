package bandwidth

import (
	"context"
	"math/rand/v2"
)

// regions is memory as an arena has it: in huge pages where there are some, and present.
// One mapping serves all sizes, for one of 1 MiB would get no huge page.
type regions struct {
	whole []byte
	half  int64
}

// newRegions returns two halves of at least so many bytes each, filled with what no disk
// can make smaller. The caller must close it.
func newRegions(ctx context.Context, seed uint64, bytes int64) (*regions, error) {
	const huge = 2 << 20 // a huge page of the usual processors
	half := (bytes + huge - 1) &^ (huge - 1)
	whole, err := mapRegion(2 * half)
	if err != nil {
		return nil, err
	}
	r := &regions{whole: whole, half: half}
	var key [32]byte
	for i := range 8 {
		key[i] = byte(seed >> (8 * i))
	}
	random := rand.NewChaCha8(key)
	for p := whole; len(p) > 0; p = p[huge:] {
		if err := context.Cause(ctx); err != nil {
			_ = r.close() // says nothing that matters beside it
			return nil, err
		}
		_, _ = random.Read(p[:huge]) // cannot fail
	}
	return r, nil
}

// pair returns the two regions of thread i.
func (r *regions) pair(l load, i int) (here, there []byte) {
	off := int64(i) * l.bytes
	end := off + l.bytes
	return r.whole[off:end:end], r.whole[r.half+off : r.half+end : r.half+end]
}

func (r *regions) close() error { return unmapRegion(r.whole) }
