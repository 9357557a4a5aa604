package volumes

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"syscall"

	"github.com/spillway-db/spillway/internal/address"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/oneline"
	"github.com/spillway-db/spillway/internal/pump"
	"github.com/spillway-db/spillway/internal/volumes/internal/seal"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// maxIdleIO bounds how often a request is repeated that makes no progress: because a
// signal interrupted it, or because the system did nothing and gave no reason.
const maxIdleIO = 100

// WriteAt writes all of p at off, in requests of Config.Request bytes, of which Config.Depth are
// under way. On a slow disk they are shorter and fewer, so that what all transfers have under way
// takes a quarter of a second. When ctx ends no further request is begun, and its cause is
// returned when those under way have ended. Out of disk space is a *tier.NoSpaceError, any other
// refusal of the system's an *IOError. After an error it is undefined what the memory holds there.
//
// Where p's address and length and off are multiples of 4096 the disk reads from p directly.
// Others are copied, and parts of pages are read first, which is slower. Writes at the same time
// of parts of one page do not disturb each other; other writes and reads that overlap are the
// caller's to order. Where the volume encrypts, the same goes for units of 64 KiB in place of
// pages, and what is read first may be a *tier.AlteredError. Memory of an earlier volume cannot
// be written then.
func (e *extents) WriteAt(ctx context.Context, p []byte, off int64) error {
	if e.units != nil && e.units.ReadOnly() {
		return fmt.Errorf("disk: volume %s: writing to memory that an earlier volume has sealed and kept: %w",
			e.v.cfg.Dir, tier.ErrNotSupported)
	}
	return e.transfer(ctx, p, off, true)
}

// ReadAt fills p from off, as WriteAt writes it. Where the volume encrypts, bytes that are not what
// was written are a *tier.AlteredError, and p holds nothing of their unit.
func (e *extents) ReadAt(ctx context.Context, p []byte, off int64) error {
	return e.transfer(ctx, p, off, false)
}

// request is one read or write within one piece.
type request struct {
	at    place
	off   int64 // in the file
	p     []byte
	piece int   // which one
	from  int64 // in the memory
}

// helpers lends the goroutines that work on a volume's transfers beside their callers. It is a
// pump.Pool of whether a lane is one. Where all are busy, or the volume is closed, the caller goes
// on alone.
type helpers struct {
	most, busy atomic.Int64
}

func (h *helpers) Borrow(context.Context) (helper bool, err error) { return false, nil } // the caller

func (h *helpers) TryBorrow() (helper, ok bool) {
	if h.busy.Add(1) <= h.most.Load() {
		return true, true
	}
	h.busy.Add(-1)
	return false, false
}

func (h *helpers) Yield(helper bool) (bool, bool) { return helper, true }

func (h *helpers) Return(helper bool) {
	if helper {
		h.busy.Add(-1)
	}
}

// transfer moves p in pieces of Config.Request, of which Depth are under way, each in requests that
// may be shorter. Pieces end on pages, or with units, so that no two have parts of one.
func (e *extents) transfer(ctx context.Context, p []byte, off int64, write bool) error {
	if off < 0 || off > e.size || int64(len(p)) > e.size-off {
		return fmt.Errorf("disk: %d bytes at %d are outside a memory of %d bytes", len(p), off, e.size)
	}
	if err := e.ref(); err != nil {
		return err
	}
	defer e.unref()
	if len(p) == 0 {
		return nil
	}
	lockrank.AssertNone("a transfer begins")
	var file disk.File
	if e.kept != nil {
		f, err := e.v.openKept(e.kept, e.v.direct)
		if err != nil {
			return &disk.IOError{
				Space: e.v.cfg.Space, Dir: e.v.cfg.Dir, File: e.kept.name(), Offset: off, Bytes: int64(len(p)),
				Write: write, Err: bare(err),
			}
		}
		defer f.Close()
		file = f
	}
	step, begin, end := e.v.cfg.Request, off-off%tier.Page, off+int64(len(p))
	if e.units != nil {
		begin = off - off%seal.Unit
	}
	if end-begin <= step {
		return e.move(ctx, file, p, off, write)
	}
	job := pump.Job[bool]{
		Pieces: int((end - begin + step - 1) / step), Lanes: e.v.cfg.Depth, Pool: &e.v.helpers,
		Do: func(ctx context.Context, _ bool, i int) error {
			from := max(off, begin+int64(i)*step)
			to := min(end, begin+int64(i+1)*step)
			return e.move(ctx, file, p[from-off:to-off], from, write)
		},
	}
	return job.Run(ctx)
}

// move does requests, one after the other, until all of p is moved. file is that of a memory of its
// own; nil: those of its pieces.
func (e *extents) move(ctx context.Context, file disk.File, p []byte, off int64, write bool) error {
	for piece := e.pieceAt(off); len(p) > 0; piece = e.pieceAt(off) {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		r := e.request(piece, p, off, e.v.window.Length(write))
		if file != nil {
			r.at.file = file
		}
		if err := e.doMeasured(ctx, r, write); err != nil {
			return err
		}
		p, off = p[len(r.p):], off+int64(len(r.p))
	}
	return nil
}

// request returns the request for the front of p, of at most so many bytes.
func (e *extents) request(piece int, p []byte, off, most int64) request {
	if e.units != nil { // end with a unit, so that no two requests have parts of one
		most -= off % seal.Unit
	}
	at := &e.pieces[piece]
	skip := off - at.Off
	place := at.At.off + skip
	n := min(int64(len(p)), most, at.Len-skip)
	if n < int64(len(p)) { // end on a page, so that the next begins on one
		n -= (place + n) % tier.Page
	}
	return request{at: at.At, off: place, p: p[:n:n], piece: piece, from: off}
}

// doMeasured does one request. It waits until the window, which bounds the bytes in progress on a
// slow disk, admits it, and reports a write to the pacer, which compares volumes.
func (e *extents) doMeasured(ctx context.Context, r request, write bool) error {
	v, n := e.v, int64(len(r.p))
	if err := v.window.Enter(ctx, n, write); err != nil {
		return err
	}
	end := e.watch(ctx, r, write)
	if !write {
		err := e.do(ctx, r, false)
		v.window.Leave(n, false, err == nil)
		end(err)
		return err
	}
	v.pacer.Begin()
	err := e.do(ctx, r, true)
	v.window.Leave(n, true, err == nil)
	if err != nil {
		n = 0
	}
	// A request that gives up waiting for another's turn has found no fault with the volume.
	failed := err != nil && !errors.Is(err, context.Cause(ctx))
	v.pacer.End(n, e.wrote(n), failed)
	end(err)
	return err
}

// wrote subtracts n bytes from the memory's unwritten bytes, at most all of them, and returns how
// many it subtracted. The count is an estimate of the backlog: it ignores which bytes are written,
// or twice.
func (e *extents) wrote(n int64) int64 {
	for {
		left := e.unwritten.Load()
		n = min(n, left)
		if e.unwritten.CompareAndSwap(left, left-n) {
			return n
		}
	}
}

// do does one request, through an aligned buffer if it must.
func (e *extents) do(ctx context.Context, r request, write bool) error {
	v, n := e.v, int64(len(r.p))
	direct := address.Of(r.p)%v.address == 0 && r.off%v.offset == 0 && n%v.offset == 0
	count := &v.read
	var err error
	switch {
	case e.units != nil:
		h, gone := e.units.Hold(ctx, r.piece, r.from, n, write)
		if gone != nil {
			return gone
		}
		sealed := seal.Request{Stretch: r.piece, Off: r.from, P: r.p, File: wholeFile{r.at.file, v.offset}, At: r.off}
		if write {
			err = h.Write(sealed, &v.sealed)
		} else {
			err = h.Read(sealed, &v.sealed)
		}
		h.Release()
	case write && direct:
		err = transferAll(r.at.file.WriteAt, r.p, r.off, v.offset)
	case write:
		err = v.writeThrough(r)
	case direct:
		err = transferAll(r.at.file.ReadAt, r.p, r.off, v.offset)
	default:
		err = v.readThrough(r)
	}
	if write {
		count = &v.written
	}
	if err == nil {
		count.Add(n)
		return nil
	}
	if a := (*tier.AlteredError)(nil); errors.As(err, &a) {
		a.Volume, a.File = v.cfg.Dir, e.fileName(r.at)
		return a
	}
	err = &disk.IOError{
		Space:  v.cfg.Space,
		Dir:    v.cfg.Dir,
		File:   e.fileName(r.at),
		Offset: r.off,
		Bytes:  n,
		Write:  write,
		Err:    bare(err),
	}
	if outOfRoom(err) {
		return &tier.NoSpaceError{Space: v.cfg.Space, Requested: n, Cause: err, Hint: fullAdvice}
	}
	return err
}

// transferAll reads or writes all of p. What was done in part is completed, from the
// last multiple of align; what a signal interrupted is repeated.
func transferAll(f func(p []byte, off int64) (int, error), p []byte, off, align int64) error {
	for idle := 0; len(p) > 0; {
		n, err := f(p, off)
		switch {
		case n < 0 || n > len(p):
			return fmt.Errorf("%d of %d bytes done", n, len(p))
		case n == len(p):
			return nil
		case errors.Is(err, io.EOF) && n == 0:
			return io.ErrUnexpectedEOF
		case err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, syscall.EINTR):
			return err
		}
		done := int64(n) - int64(n)%align
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

// all is transferAll with the result of an io.ReaderAt or io.WriterAt.
func all(f func(p []byte, off int64) (int, error), p []byte, off, align int64) (int, error) {
	if err := transferAll(f, p, off, align); err != nil {
		return 0, bare(err)
	}
	return len(p), nil
}

// wholeFile is a file whose reads and writes do all or fail.
type wholeFile struct {
	file  disk.File
	align int64
}

func (f wholeFile) ReadAt(p []byte, off int64) (int, error) {
	return all(f.file.ReadAt, p, off, f.align)
}
func (f wholeFile) WriteAt(p []byte, off int64) (int, error) {
	return all(f.file.WriteAt, p, off, f.align)
}

// bounceSize is the length of a buffer that any request fits in with the rest of its
// first and last page.
func (v *Volume) bounceSize() int64 { return v.cfg.Request + 2*tier.Page }

// around returns the pages around a request, and a buffer for them. The caller
// returns the buffer to v.bounces.
func (v *Volume) around(r request) (buf *[]byte, pages []byte, start int64) {
	buf = v.bounces.Get().(*[]byte)
	start = r.off - r.off%tier.Page
	return buf, (*buf)[:round(r.off+int64(len(r.p)))-start], start
}

// readThrough reads the pages around a request and copies what was asked for.
func (v *Volume) readThrough(r request) error {
	buf, pages, start := v.around(r)
	defer v.bounces.Put(buf)
	// On a sparse file the end of the last page may not be there.
	if err := v.readPages(r.at.file, pages, start); err != nil {
		return err
	}
	copy(r.p, pages[r.off-start:])
	return nil
}

// writeThrough writes the pages around a request, with the bytes beside it that are
// there.
func (v *Volume) writeThrough(r request) error {
	buf, pages, start := v.around(r)
	defer v.bounces.Put(buf)
	n := int64(len(r.p))
	head, tail := r.off-start, int64(len(pages))-(r.off-start)-n
	if head > 0 || tail > 0 {
		v.patch <- struct{}{}
		defer func() { <-v.patch }()
	}
	last := pages[len(pages)-tier.Page:]
	if head > 0 {
		if err := v.readPages(r.at.file, pages[:tier.Page], start); err != nil {
			return err
		}
	}
	if tail > 0 && (head == 0 || len(pages) > tier.Page) {
		if err := v.readPages(r.at.file, last, start+int64(len(pages)-tier.Page)); err != nil {
			return err
		}
	}
	copy(pages[head:], r.p)
	return transferAll(r.at.file.WriteAt, pages, start, v.offset)
}

// readPages reads whole pages. What lies behind the end of a sparse file is zeros.
func (v *Volume) readPages(f disk.File, pages []byte, off int64) error {
	clear(pages)
	err := transferAll(f.ReadAt, pages, off, v.offset)
	if errors.Is(err, io.ErrUnexpectedEOF) && v.noAllocate.Load() {
		return nil
	}
	return err
}
