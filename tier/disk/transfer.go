package disk

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"syscall"

	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/oneline"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk/internal/seal"
)

// maxIdleIO bounds how often a request is repeated that makes no progress: because a
// signal interrupted it, or because the system did nothing and gave no reason.
const maxIdleIO = 100

// WriteAt writes all of p at off: in requests of Config.Request bytes, of which
// Config.Depth are under way. On a slow disk they are shorter and fewer, so that what all
// transfers have under way takes a quarter of a second. When ctx ends no further request is begun and its cause
// is returned, when those under way have ended: nobody reads p after that. Out of
// disk space is a *tier.NoSpaceError, any other refusal of the system's an *IOError;
// after any error it is undefined what the memory holds there.
//
// Where p's address and length and off are multiples of 4096 the disk reads from p
// directly. Others are copied, and parts of pages are read first: correct, and
// slower. Writes at the same time of parts of one page are kept apart; other writes
// and reads that overlap are the caller's to order. Where the volume encrypts, the same
// goes for units of 64 KiB in place of pages, and what is read first may be a
// *tier.AlteredError; memory that an earlier volume has kept cannot be written then.
func (e *Extents) WriteAt(ctx context.Context, p []byte, off int64) error {
	if e.units != nil && e.units.ReadOnly() {
		return fmt.Errorf("disk: volume %s: writing to memory that an earlier volume has sealed and kept: %w", e.v.cfg.Dir, tier.ErrNotSupported)
	}
	return e.transfer(ctx, p, off, true)
}

// ReadAt fills p from off, as WriteAt writes it. Where the volume encrypts, bytes that are
// not what was written are a *tier.AlteredError, and p holds nothing of their unit.
func (e *Extents) ReadAt(ctx context.Context, p []byte, off int64) error {
	return e.transfer(ctx, p, off, false)
}

// transfer is one WriteAt or ReadAt under way. The caller and workers take requests off
// its front until none is left; then the caller waits for the workers' last ones.
type transfer struct {
	e     *Extents
	ctx   context.Context
	write bool

	rest atomic.Int64 // bytes that nobody has taken

	mu struct {
		lockrank.Mutex[lockrank.Device]
		p       []byte        // what nobody has taken; nil once the caller returns
		off     int64         // of p in the memory
		piece   int           // that off lies in
		helpers int           // invited and not left
		over    bool          // the caller takes no more help
		left    chan struct{} // closed when over and the last helper has left
		err     error
	}
}

// request is one read or write within one piece.
type request struct {
	at    place
	off   int64 // in the file
	p     []byte
	piece int   // which one
	from  int64 // in the memory
}

func (e *Extents) transfer(ctx context.Context, p []byte, off int64, write bool) error {
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
	t := &transfer{e: e, ctx: ctx, write: write}
	t.rest.Store(int64(len(p)))
	t.mu.p, t.mu.off, t.mu.piece = p, off, e.pieceAt(off)
	t.mu.left = make(chan struct{})
	t.work(t.callHelp)
	return t.finish()
}

// work does requests until there are none. before is called before each; it
// returns false to end early.
func (t *transfer) work(before func() bool) {
	for before() {
		if t.ctx.Err() != nil && t.rest.Load() > 0 {
			t.fail(context.Cause(t.ctx))
		}
		r, ok := t.next()
		if !ok {
			return
		}
		if err := t.do(r); err != nil {
			t.fail(err)
			return
		}
	}
}

// do does one request, and tells the pacer if it is a write.
func (t *transfer) do(r request) error {
	v, n := t.e.v, int64(len(r.p))
	if err := v.window.enter(t.ctx, n, t.write); err != nil {
		return err
	}
	if !t.write {
		err := t.e.do(t.ctx, r, false)
		v.window.leave(n, false, err == nil)
		return err
	}
	v.pacer.begin()
	err := t.e.do(t.ctx, r, true)
	v.window.leave(n, true, err == nil)
	if err != nil {
		n = 0
	}
	// Who gives up waiting for another's turn has found no fault with the volume.
	failed := err != nil && !errors.Is(err, context.Cause(t.ctx))
	v.pacer.end(n, t.e.wrote(n), failed)
	return err
}

// wrote takes n bytes out of what is unwritten, and returns how many were there. What is
// written a second time makes up for what never is; together they tell how much
// is still to come well enough.
func (e *Extents) wrote(n int64) int64 {
	for {
		left := e.unwritten.Load()
		n = min(n, left)
		if e.unwritten.CompareAndSwap(left, left-n) {
			return n
		}
	}
}

// next takes a request off the front.
func (t *transfer) next() (request, bool) {
	length := t.e.v.window.length(t.write)
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.err != nil || len(t.mu.p) == 0 {
		return request{}, false
	}
	piece := &t.e.pieces[t.mu.piece]
	skip := t.mu.off - piece.Off
	most := length
	if t.e.units != nil { // end with a unit, so that no two requests have parts of one
		most -= t.mu.off % seal.Unit
	}
	n := min(int64(len(t.mu.p)), most, piece.Len-skip)
	off := piece.At.off + skip
	if n < int64(len(t.mu.p)) { // end on a page, so that the next begins on one
		n -= (off + n) % tier.Page
	}
	r := request{at: piece.At, off: off, p: t.mu.p[:n:n], piece: t.mu.piece, from: t.mu.off}
	t.mu.p = t.mu.p[n:]
	t.mu.off += n
	if n == piece.Len-skip {
		t.mu.piece++
	}
	t.rest.Add(-n)
	return r, true
}

// fail keeps the first error and ends the transfer.
func (t *transfer) fail(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.err == nil {
		t.mu.err = err
	}
}

// finish waits until no helper works on the caller's memory.
func (t *transfer) finish() error {
	t.mu.Lock()
	t.mu.over = true
	t.mu.p = nil
	t.rest.Store(0)
	helpers := t.mu.helpers
	t.mu.Unlock()
	if helpers > 0 {
		<-t.mu.left
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mu.err
}

// callHelp offers the transfer to as many workers as it is short of. Where all are
// busy the caller goes on alone, and asks again before its next request.
func (t *transfer) callHelp() bool {
	v := t.e.v
	for t.invite() {
		select {
		case v.jobs <- t: // a worker waits for work
			continue
		default:
		}
		if !v.startWorker(t) {
			t.leave()
			break
		}
	}
	return true
}

// invite counts one more helper, if there is work for it.
func (t *transfer) invite() bool {
	request := t.e.v.window.length(t.write)
	wanted := int(min((t.rest.Load()+request-1)/request, int64(t.e.v.cfg.Depth))) - 1
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.helpers >= wanted {
		return false
	}
	t.mu.helpers++
	return true
}

// leave ends what invite began.
func (t *transfer) leave() {
	t.mu.Lock()
	t.mu.helpers--
	last := t.mu.over && t.mu.helpers == 0
	t.mu.Unlock()
	if last {
		close(t.mu.left)
	}
}

// startWorker starts a worker that begins with t, if there are fewer than allowed.
func (v *Volume) startWorker(t *transfer) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.mu.closed || v.mu.workers >= workersPerDepth*v.cfg.Depth {
		return false
	}
	v.mu.workers++
	v.workers.Go(func() {
		for {
			t.help()
			t = nil // an idle worker keeps nothing alive
			select {
			case t = <-v.jobs:
			case <-v.life.Done():
				return
			}
		}
	})
	return true
}

// help is what an invited worker does for a transfer.
func (t *transfer) help() {
	defer t.leave()
	t.work(func() bool { return t.e.v.life.Err() == nil })
}

// do does one request, through an aligned buffer if it must.
func (e *Extents) do(ctx context.Context, r request, write bool) error {
	v, n := e.v, int64(len(r.p))
	direct := address(r.p)%v.address == 0 && r.off%v.offset == 0 && n%v.offset == 0
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
		a.Volume, a.File = v.cfg.Dir, r.at.seg.name
		return a
	}
	err = &IOError{Space: v.cfg.Space, Dir: v.cfg.Dir, File: r.at.seg.name, Offset: r.off, Bytes: n, Write: write, Err: bare(err)}
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

// all is transferAll as package io has it.
func all(f func(p []byte, off int64) (int, error), p []byte, off, align int64) (int, error) {
	if err := transferAll(f, p, off, align); err != nil {
		return 0, bare(err)
	}
	return len(p), nil
}

// wholeFile is a file whose reads and writes do all or fail.
type wholeFile struct {
	file  File
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
func (v *Volume) readPages(f File, pages []byte, off int64) error {
	clear(pages)
	err := transferAll(f.ReadAt, pages, off, v.offset)
	if errors.Is(err, io.ErrUnexpectedEOF) && v.noAllocate.Load() {
		return nil
	}
	return err
}
