package bandwidth

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/system"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// What a program would do that knows its disk: at these most disks reach their speed.
const (
	rawRequest = 1 << 20
	rawDepth   = 8
)

// raw returns two sides that do without the engine what a move along the link does, and what frees
// them.
func (b *bench) raw(ctx context.Context, k link) (raw, again side, free func() error, err error) {
	free = func() error { return nil }
	if v, ok := k.to.Pool().(*volumes.Volume); ok {
		return b.onFile(k, v, 0), b.onFile(k, v, 1), free, nil
	}
	if k.inSpaces() {
		all, err := b.newLanes(ctx, k)
		s := side{move: func(ctx context.Context, i int, d direction) error { return all[i].transfer(ctx, d) }}
		return s, s, all.close, err
	}
	s := side{move: func(_ context.Context, i int, d direction) error {
		here, far := b.room.pair(b.load, i)
		if d == back {
			here, far = far, here
		}
		copy(far, here)
		return nil
	}}
	return s, s, free, nil
}

// onFile returns a side that writes and reads a new file in each turn. The file is like the spill
// files of the volume: without a name, and opened in the same way. It uses one half of the regions,
// so that raw and raw again do not find each other's bytes in the caches.
func (b *bench) onFile(k link, v *volumes.Volume, half int) side {
	fs, st := b.cfg.files(), v.Stats()
	var file disk.File // nil: none is open
	return side{
		prepare: func(ctx context.Context) (err error) {
			if err := trim(ctx, v); err != nil { // so that the file system can choose the same place
				return err
			}
			if st.Anonymous {
				file, err = fs.OpenAnonymous(st.Dir, st.Direct)
			} else {
				path := filepath.Join(st.Dir, fmt.Sprintf(".spillbench-%d-%016x", os.Getpid(), rand.Uint64()))
				if file, err = fs.Create(path, st.Direct); err == nil {
					err = fs.Remove(path) // the file exists without a name for as long as it is open
				}
			}
			if err != nil {
				return fmt.Errorf("bandwidth: opening a file in %s: %w", st.Dir, err)
			}
			// As much as the volume has allocated: for another amount the file system would choose another
			// place.
			err = file.Allocate(0, max(b.load.total(), b.backed))
			switch {
			case errors.Is(err, errors.ErrUnsupported): // then the volume's files are sparse, too
				return nil
			case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
				return &tier.NoSpaceError{Space: k.to.ID(), Requested: b.load.total(), Cause: err}
			case err != nil:
				return fmt.Errorf("bandwidth: allocating %d bytes in %s: %w", b.load.total(), st.Dir, err)
			}
			return nil
		},
		move: func(ctx context.Context, i int, d direction) error {
			here, far := b.room.pair(b.load, i)
			memory, do := [...][]byte{here, far}[half], file.WriteAt
			if d == back {
				do = file.ReadAt
			}
			return requests(ctx, memory, int64(i)*b.load.bytes, do)
		},
		finish: func() (err error) {
			if file != nil {
				err, file = file.Close(), nil
			}
			return err
		},
	}
}

// requests transfers p at off by rawDepth requests at the same time. It begins none after ctx has
// ended or one has failed.
func requests(ctx context.Context, p []byte, off int64, do func(p []byte, off int64) (int, error)) error {
	var next atomic.Int64
	return together(rawDepth, func(int) error {
		for {
			at := next.Add(rawRequest) - rawRequest
			if at >= int64(len(p)) {
				return nil
			}
			if err := context.Cause(ctx); err != nil {
				return err
			}
			part := p[at:min(at+rawRequest, int64(len(p)))]
			if n, err := do(part, off+at); n < len(part) {
				next.Store(int64(len(p))) // so that the others end, too
				return fmt.Errorf("bandwidth: %d of %d bytes at %d without the engine: %w", n, len(part), off+at,
					cmp.Or(err, io.ErrNoProgress))
			}
		}
	})
}

// regions is memory like an arena's: in huge pages where the machine has some, and present. One
// mapping serves all sizes, because one of 1 MiB would get no huge page.
type regions struct {
	whole []byte
	half  int64
}

// newRegions returns two halves of at least so many bytes each, filled with bytes that no disk can
// compress. The caller must close it.
func newRegions(ctx context.Context, seed uint64, bytes int64) (*regions, error) {
	const huge = 2 << 20 // a huge page of the usual processors
	half := (bytes + huge - 1) &^ (huge - 1)
	whole, err := system.MapRegion(2 * half)
	if err != nil {
		return nil, fmt.Errorf("bandwidth: %w", err)
	}
	r := &regions{whole: whole, half: half}
	key := [32]byte{}
	binary.LittleEndian.PutUint64(key[:], seed)
	random := rand.NewChaCha8(key)
	for p := whole; len(p) > 0; p = p[huge:] {
		if err := context.Cause(ctx); err != nil {
			return nil, errors.Join(err, r.close())
		}
		_, _ = random.Read(p[:huge]) // never fails
	}
	return r, nil
}

// pair returns the two regions of thread i.
func (r *regions) pair(l load, i int) (here, far []byte) {
	off := int64(i) * l.bytes
	end := off + l.bytes
	return r.whole[off:end:end], r.whole[r.half+off : r.half+end : r.half+end]
}

func (r *regions) close() error { return system.UnmapRegion(r.whole) }
