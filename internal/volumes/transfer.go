package volumes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"syscall"

	"github.com/spillway-db/spillway/internal/address"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/oneline"
	"github.com/spillway-db/spillway/internal/volumes/internal/seal"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// maxIdleIO bounds how often a request is repeated that makes no progress, because a signal
// interrupted it or because the system transferred nothing and returned no error.
const maxIdleIO = 100

// WriteAt writes all of p at off, in requests of Config.Request bytes, of which Config.Depth are in
// progress. On a slow disk they are shorter and fewer. When ctx ends no further request begins, and
// WriteAt returns its cause after those in progress have ended. No disk space is a
// *tier.NoSpaceError, any other refusal of the system a *disk.IOError. After an error the bytes of the
// memory are undefined there.
//
// If p's address and length and off are multiples of 4096, the disk reads from p directly. Other
// bytes are copied, and the rest of their first and last page is read first, which is slower.
// Concurrent writes of parts of one page do not disturb each other; the caller must order other
// transfers that overlap.
//
// A volume that encrypts never reads for a write. So it refuses, with tier.ErrNotSupported, to change
// a part of what a call or 64 KiB of it has written, to begin inside of a page, and to write memory
// of an earlier volume.
func (e *extents) WriteAt(ctx context.Context, p []byte, off int64) error {
	return e.transfer(ctx, p, off, true)
}

// ReadAt fills p from off, as WriteAt writes it. If the volume encrypts, bytes that are not what was
// written are a *tier.AlteredError, and p contains none of their block.
func (e *extents) ReadAt(ctx context.Context, p []byte, off int64) error {
	return e.transfer(ctx, p, off, false)
}

// SealBy makes a volume that encrypts seal blocks of n bytes instead of 64 KiB; see seal.Extent.SealBy.
func (e *extents) SealBy(n int64) {
	if e.sealed != nil {
		e.sealed.SealBy(n)
	}
}

// transfer moves p in requests, one after the other. While there is more than one request left and the
// disk is not slow, helpers make the next ones at the same time. Requests end on multiples of the grid,
// so that no two share a page or a block.
func (e *extents) transfer(ctx context.Context, p []byte, off int64, write bool) error {
	v, end := e.v, off+int64(len(p))
	if off < 0 || off > e.size || int64(len(p)) > e.size-off {
		return fmt.Errorf("disk: %d bytes at %d are outside a memory of %d bytes", len(p), off, e.size)
	}
	grid := int64(tier.Page)
	if e.sealed != nil {
		grid = seal.BlockSize
		if write {
			if err := e.sealed.CheckWrite(off, int64(len(p))); err != nil {
				return fmt.Errorf("disk: volume %s: writing encrypted memory: %w", v.cfg.Dir, err)
			}
		}
	}
	if err := e.ref(); err != nil {
		return err
	}
	defer e.unref()
	if len(p) == 0 {
		return nil
	}
	lockrank.AssertNone("a transfer begins")
	var kept disk.File // of a memory that is not in segments
	if e.kept != nil {
		f, err := v.openKept(e.kept, v.direct)
		if err != nil {
			return e.failed(err, e.kept.name(), off, int64(len(p)), write)
		}
		defer f.Close()
		kept = f
	}

	var mu sync.Mutex // of next, lanes and failed
	begin, next, lanes, failed := off, off, 1, error(nil)
	var helpers sync.WaitGroup
	// request makes the next request. It returns false if there is none, or none for a helper.
	request := func(helper bool) bool {
		mu.Lock()
		if failed == nil && next < end && ctx.Err() != nil {
			failed = context.Cause(ctx)
		}
		if failed != nil || next == end {
			mu.Unlock()
			return false
		}
		off := next
		piece := &e.pieces[e.pieceAt(off)]
		most := min(end, piece.Off+piece.Len) - off
		begun := v.disk.Begin(most, write, helper)
		if begun == 0 {
			mu.Unlock()
			return false
		}
		n := begun
		if n < most {
			n -= (off + n) % grid
		}
		next += n
		mu.Unlock()
		err := e.do(ctx, kept, piece, p[off-begin:][:n:n], off, begun, write)
		if err != nil {
			mu.Lock()
			failed = cmp.Or(failed, err)
			mu.Unlock()
		}
		return err == nil
	}
	for more := true; more; more = request(false) {
		mu.Lock()
		for lanes < v.cfg.Depth && end-next > int64(lanes)*v.cfg.Request && v.takeHelper() {
			lanes++
			helpers.Go(func() {
				labels.Transfer.Set()
				for request(true) {
				}
				v.helpers.Add(-1)
				mu.Lock()
				lanes--
				mu.Unlock()
			})
		}
		mu.Unlock()
	}
	helpers.Wait()
	return failed
}

// takeHelper counts a helper as working. It returns false if all helpers of the volume work, or if the
// volume is closed.
func (v *Volume) takeHelper() bool {
	if v.helpers.Add(1) <= v.maxHelpers.Load() {
		return true
	}
	v.helpers.Add(-1)
	return false
}

// do makes one request for p, which is at off of the memory and in one piece. begun is the length for
// which the request was counted as begun. kept is the file of a memory that is not in segments.
func (e *extents) do(ctx context.Context, kept disk.File, in *piece, p []byte, off, begun int64, write bool) error {
	v, n := e.v, int64(len(p))
	f, name, at := kept, "", in.At.off+off-in.Off
	if f != nil {
		name = e.kept.name()
	} else {
		f, name = in.At.file, in.At.seg.name
	}
	var end func(error)
	if v.cfg.Events != nil {
		end = v.watch(ctx, name, at, n, write)
	}
	var err error
	whole := wholeFile{f, v.offset}
	switch direct := e.sealed == nil && address.Of(p)%v.address == 0 && at%v.offset == 0 && n%v.offset == 0; {
	case direct && write:
		err = whole.all(f.WriteAt, p, at)
	case direct:
		err = whole.all(f.ReadAt, p, at)
	default:
		err = e.buffered(whole, p, at, off, write)
	}
	done, settled := n, int64(0)
	switch {
	case err != nil:
		done = 0
		err = e.failed(err, name, at, n, write)
	case write:
		v.written.Add(n)
		before := min(e.size, e.written.Add(n)-n)
		settled = min(n, e.size-before)
	default:
		v.read.Add(n)
	}
	v.disk.End(begun, done, settled, write)
	if end != nil {
		end(err)
	}
	return err
}

// buffered transfers p, which is at the offset at of the file and at off of the memory, through a buffer,
// because the volume encrypts or p is not aligned.
func (e *extents) buffered(f wholeFile, p []byte, at, off int64, write bool) (err error) {
	v, n := e.v, int64(len(p))
	buf := v.buffers.borrow()
	defer v.buffers.giveBack(buf)
	if e.sealed != nil {
		if write {
			return e.sealed.Write(f, at, p, off, buf)
		}
		return e.sealed.Read(f, at, p, off, buf)
	}
	// The pages around the request. The end of a sparse file's last page may be missing.
	start := at - at%tier.Page
	pages := buf[:round(at+n)-start]
	readPages := func(from, to int64) error {
		clear(pages[from:to])
		_, err := f.ReadAt(pages[from:to], start+from)
		if errors.Is(err, io.ErrUnexpectedEOF) && v.noAllocate.Load() {
			return nil
		}
		return err
	}
	if !write {
		err = readPages(0, int64(len(pages)))
		copy(p, pages[at-start:])
		return err
	}
	last := int64(len(pages)) - tier.Page
	head, tail := at > start, at+n < start+int64(len(pages))
	if head || tail {
		v.patch <- struct{}{}
		defer func() { <-v.patch }()
	}
	if head {
		err = readPages(0, tier.Page)
	}
	if err == nil && tail && (!head || last > 0) {
		err = readPages(last, last+tier.Page)
	}
	if err != nil {
		return err
	}
	copy(pages[at-start:], p)
	_, err = f.WriteAt(pages, start)
	return err
}

// wholeFile is a file whose reads and writes transfer everything or fail. It completes short
// transfers, from the last multiple of align, and repeats those that a signal interrupted.
type wholeFile struct {
	file  disk.File
	align int64
}

// ReadAt and WriteAt have no useful count if they return an error.
func (f wholeFile) ReadAt(p []byte, off int64) (int, error) {
	return len(p), f.all(f.file.ReadAt, p, off)
}

func (f wholeFile) WriteAt(p []byte, off int64) (int, error) {
	return len(p), f.all(f.file.WriteAt, p, off)
}

func (f wholeFile) all(do func(p []byte, off int64) (int, error), p []byte, off int64) error {
	for idle := 0; len(p) > 0; {
		n, err := do(p, off)
		switch {
		case n < 0 || n > len(p):
			return fmt.Errorf("%d of %d bytes done", n, len(p))
		case n == len(p):
			return nil
		case errors.Is(err, io.EOF) && n == 0:
			return io.ErrUnexpectedEOF
		case err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, syscall.EINTR):
			return bare(err)
		}
		done := int64(n) - int64(n)%f.align
		if idle++; done > 0 {
			idle = 0
		}
		if idle > maxIdleIO {
			return oneline.Join(io.ErrNoProgress, err)
		}
		p, off = p[done:], off+done
	}
	return nil
}
