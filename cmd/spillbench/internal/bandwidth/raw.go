package bandwidth

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
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

// together calls f for 0 to n-1 at the same time and returns when all have.
func together(n int, f func(i int) error) error {
	if n == 1 {
		return f(0)
	}
	errs := make([]error, n)
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() { errs[i] = f(i) })
	}
	all.Wait()
	return errors.Join(errs...)
}

// rawMemory copies between regions, a thread each.
func rawMemory(room *regions, l load) side {
	one := func(move func(here, there []byte)) transfer {
		return func(context.Context) error {
			return together(l.threads, func(i int) error {
				move(room.pair(l, i))
				return nil
			})
		}
	}
	return side{
		there: one(func(here, there []byte) { copy(there, here) }),
		back:  one(func(here, there []byte) { copy(here, there) }),
	}
}

// rawFile is a file like the spill files of a volume: without a name, and opened in the same
// way. It holds the bytes of a load, those of the threads one behind the other.
type rawFile struct {
	fs                disk.FS
	space             tier.ID // for messages
	dir               string
	direct, anonymous bool
	load              load
	memory            func(i int) []byte // what thread i writes, and reads into
	file              disk.File          // nil: none is open
}

// rawFiles are two files, and a half of the regions for each: for raw and raw again, so that
// neither finds warm what the other has just left.
type rawFiles [2]*rawFile

func (c Config) newRawFiles(space tier.ID, v *volumes.Volume, room *regions, l load) (files rawFiles) {
	st := v.Stats()
	for f := range files {
		on := disk.OS()
		if c.Files != nil {
			if fs := c.Files(); fs != nil {
				on = fs
			}
		}
		files[f] = &rawFile{
			fs: on, space: space, dir: st.Dir, direct: st.Direct, anonymous: st.Anonymous, load: l,
			memory: func(i int) []byte {
				here, there := room.pair(l, i)
				return [...][]byte{here, there}[f]
			},
		}
	}
	return files
}

// side writes and reads on a new file in each turn.
func (r *rawFile) side() side { return side{prepare: r.renew, there: r.write, back: r.read} }

func (r rawFiles) renew(ctx context.Context) error {
	return errors.Join(r[0].renew(ctx), r[1].renew(ctx))
}

func (r rawFiles) close() error { return errors.Join(r[0].close(), r[1].close()) }

// renew replaces the old file by a new one: room that is allocated, and was never written.
func (r *rawFile) renew(context.Context) error {
	if err := r.close(); err != nil {
		return err
	}
	f, err := r.open()
	if err != nil {
		return fmt.Errorf("bandwidth: opening a file in %s: %w", r.dir, err)
	}
	r.file = f
	err = f.Allocate(0, r.load.total())
	switch {
	case errors.Is(err, errors.ErrUnsupported): // then the volume's files are sparse, too
		return nil
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return &tier.NoSpaceError{Space: r.space, Requested: r.load.total(), Cause: err}
	case err != nil:
		return fmt.Errorf("bandwidth: taking %d bytes in %s: %w", r.load.total(), r.dir, err)
	}
	return nil
}

func (r *rawFile) open() (disk.File, error) {
	if r.anonymous {
		return r.fs.OpenAnonymous(r.dir, r.direct)
	}
	path := filepath.Join(r.dir, fmt.Sprintf(".spillbench-%d-%016x", os.Getpid(), rand.Uint64()))
	f, err := r.fs.Create(path, r.direct)
	if err != nil {
		return nil, err
	}
	if err := r.fs.Remove(path); err != nil { // it lives on without a name, for as long as it is open
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func (r *rawFile) close() error {
	f := r.file
	r.file = nil
	if f == nil {
		return nil
	}
	return f.Close()
}

// write writes the memory, and read fills it.
func (r *rawFile) write(ctx context.Context) error {
	return r.each(ctx, func(p []byte, off int64) (int, error) { return r.file.WriteAt(p, off) })
}

func (r *rawFile) read(ctx context.Context) error {
	return r.each(ctx, func(p []byte, off int64) (int, error) { return r.file.ReadAt(p, off) })
}

func (r *rawFile) each(ctx context.Context, do func(p []byte, off int64) (int, error)) error {
	return together(r.load.threads, func(i int) error {
		return requests(ctx, r.memory(i), int64(i)*r.load.bytes, do)
	})
}

// requests does all of p at off, so many requests under way at a time. It begins none after
// ctx has ended or one has failed.
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
			if err := whole(p[at:min(at+rawRequest, int64(len(p)))], off+at, do); err != nil {
				next.Store(int64(len(p))) // the others end, too
				return err
			}
		}
	})
}

// whole does all of p. What was done in part is taken up at the page where it ended.
func whole(p []byte, off int64, do func(p []byte, off int64) (int, error)) error {
	for {
		n, err := do(p, off)
		switch {
		case n == len(p):
			return nil
		case err != nil:
			return fmt.Errorf("bandwidth: %d bytes at %d without the engine: %w", len(p), off, err)
		}
		n -= n % tier.Page
		if n <= 0 {
			return fmt.Errorf("bandwidth: %d bytes at %d without the engine: %w", len(p), off, io.ErrNoProgress)
		}
		p, off = p[n:], off+int64(n)
	}
}

// regions is memory as an arena has it: in huge pages where there are some, and present.
// One mapping serves all sizes, because one of 1 MiB would get no huge page.
type regions struct {
	whole []byte
	half  int64
}

// newRegions returns two halves of at least so many bytes each, filled with what no disk
// can make smaller. The caller must close it.
func newRegions(ctx context.Context, seed uint64, bytes int64) (*regions, error) {
	const huge = 2 << 20 // a huge page of the usual processors
	half := (bytes + huge - 1) &^ (huge - 1)
	whole, err := system.MapRegion(2 * half)
	if err != nil {
		return nil, fmt.Errorf("bandwidth: %w", err)
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

func (r *regions) close() error { return system.UnmapRegion(r.whole) }
