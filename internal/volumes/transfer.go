package volumes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"syscall"

	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/internal/lockrank"
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
// off is a multiple of 4096, and so is the end of p, unless it is the end of the memory: no write reads.
// If p's address and length are such multiples, too, the disk reads from p directly; else p is copied,
// which is slower. Other writes are refused with tier.ErrNotSupported. So are those to a volume that
// encrypts which change a part of what a call or 64 KiB of it has written, or memory of an earlier
// volume. The caller must order transfers that overlap.
func (e *extents) WriteAt(ctx context.Context, p []byte, off int64) error {
	return e.transfer(ctx, p, off, writing)
}

// ReadAt fills p from off, as WriteAt writes it. If the volume encrypts, bytes that differ from the
// written ones are a *tier.AlteredError, and p contains none of their block.
func (e *extents) ReadAt(ctx context.Context, p []byte, off int64) error {
	return e.transfer(ctx, p, off, reading)
}

// SealBy makes a volume that encrypts seal blocks of n bytes instead of 64 KiB: a multiple of a page that
// divides 64 KiB, for memory of which few bytes at a time are to be read. It is called before the first
// write.
func (e *extents) SealBy(n int64) {
	if e.sealed != nil {
		e.sealed.block = n
	}
}

// transfer moves p in requests, one after the other. While there is more than one request left and the
// disk is not slow, helpers make the next ones at the same time. Requests end on multiples of the grid,
// so that no two share a page or a block.
func (e *extents) transfer(ctx context.Context, p []byte, off int64, what request) error {
	v, end := e.v, off+int64(len(p))
	if off < 0 || off > e.size || int64(len(p)) > e.size-off {
		return fmt.Errorf("disk: %d bytes at %d are outside a memory of %d bytes", len(p), off, e.size)
	}
	if what == writing && (off%tier.Page != 0 || end%tier.Page != 0 && end != e.size) {
		return fmt.Errorf("disk: volume %s: writing %d bytes at %d, which are not whole pages of %d: %w",
			v.cfg.Dir, len(p), off, tier.Page, tier.ErrNotSupported)
	}
	grid := int64(tier.Page)
	if e.sealed != nil {
		grid = blockSize
		if what == writing {
			if err := e.sealed.checkWrite(off, int64(len(p))); err != nil {
				return fmt.Errorf("disk: volume %s: writing encrypted memory: %w", v.cfg.Dir, err)
			}
		}
	}
	v.mu.Lock()
	freed := e.freed
	if !freed {
		e.uses++
	}
	v.mu.Unlock()
	if freed {
		return tier.ErrReleased
	}
	defer e.unref()
	if len(p) == 0 {
		return nil
	}
	lockrank.AssertNone("a transfer begins")
	file, name := v.file, spillName
	if e.persisted != nil {
		f, err := v.openPersisted(e.persisted, v.direct)
		name = *e.persisted.name.Load()
		if err != nil {
			return e.failed(err, name, off, int64(len(p)), what)
		}
		defer f.Close()
		file = f
	}

	var mu sync.Mutex // of next, lanes, failed and piece, the one that next is in
	begin, next, lanes, failed, piece := off, off, 1, error(nil), 0
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
		for off >= e.pieces[piece].Off+e.pieces[piece].Len {
			piece++
		}
		in := &e.pieces[piece]
		most := min(end, in.Off+in.Len) - off
		begun := v.begin(most, what, helper)
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
		err := e.do(ctx, wholeFile{file, v.offset}, name, in, p[off-begin:][:n:n], off, begun, what)
		if err != nil {
			mu.Lock()
			failed = cmp.Or(failed, err)
			mu.Unlock()
		}
		return err == nil
	}
	for more := true; more; more = request(false) {
		mu.Lock()
		for lanes < v.cfg.Depth && end-next > int64(lanes)*v.cfg.Request && v.life.Err() == nil {
			if v.helpers.Add(1) > helpersPerDepth*int64(v.cfg.Depth) { // all helpers of the volume work
				v.helpers.Add(-1)
				break
			}
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

// do makes one request for p, which is at off of the memory and in one piece. begun is the length for
// which the request was counted as begun. The bytes go through a buffer if the volume encrypts, or if p is
// not aligned.
func (e *extents) do(
	ctx context.Context, f wholeFile, name string, in *piece, p []byte, off, begun int64, what request,
) error {
	v, n, at := e.v, int64(len(p)), in.At+off-in.Off
	var end func(error)
	if v.cfg.Events != nil {
		end = v.watch(ctx, name, at, n, what)
	}
	var err error
	if e.sealed == nil && extent.Address(p)%v.address == 0 && at%v.offset == 0 && n%v.offset == 0 {
		move := f.file.ReadAt
		if what == writing {
			move = f.file.WriteAt
		}
		err = f.all(move, p, at)
	} else {
		borrowed := v.buffers.borrow()
		buf, start := borrowed.bytes, at-at%tier.Page // at, if p is written
		pages := buf[:extent.RoundUp(at+n, tier.Page)-start]
		switch {
		case e.sealed != nil && what == writing:
			err = e.sealed.Write(f, at, p, off, buf)
		case e.sealed != nil:
			err = e.sealed.Read(f, at, p, off, buf)
		case what == writing: // of whole pages, with zeros at the end of the memory's last one
			clear(pages[copy(pages, p):])
			err = f.all(f.file.WriteAt, pages, start)
		default:
			err = f.all(f.file.ReadAt, pages, start)
			copy(p, pages[at-start:])
		}
		v.buffers.giveBack(borrowed)
	}
	done, settled := n, int64(0)
	switch {
	case err != nil:
		done = 0
		err = e.failed(err, name, at, n, what)
	case what == writing:
		v.written.Add(n)
		before := min(e.size, e.written.Add(n)-n)
		settled = min(n, e.size-before)
	default:
		v.read.Add(n)
	}
	v.finish(begun, done, settled, what)
	if end != nil {
		end(err)
	}
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

// Close closes the file.
func (f wholeFile) Close() error { return f.file.Close() }

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
			return join(io.ErrNoProgress, err)
		}
		p, off = p[done:], off+done
	}
	return nil
}
