package volumes

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"sync/atomic"
	"syscall"

	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/oneline"
	"github.com/spillway-db/spillway/internal/placement"
	"github.com/spillway-db/spillway/internal/volumes/internal/seal"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// growStep is how much room is requested from the file system at a time, if less is needed.
// Allocated room is written at 2.5 GiB/s, sparse files at 2.2 (ext4, virtual NVMe); to allocate 64
// MiB takes 20 µs.
const growStep = 64 << 20

// extents is memory on a volume: what Volume.Alloc returns. It is a
// tier.FileMemory, and safe for concurrent use; transfers that overlap have no
// order.
type extents struct {
	v      *Volume
	size   int64
	pieces []piece
	one    [1]piece    // what pieces are, if it is one
	units  *seal.Units // nil if the volume does not encrypt
	kept   *keptFile   // its file, if the volume has Config.Persist; nil: segments

	unwritten atomic.Int64 // bytes of it in the volume's backlog

	freed     atomic.Bool
	refs      atomic.Int64 // the owner and the transfers under way
	reclaimed func()       // set before the owner's reference goes

	// Guarded by the volume's mutex.
	entry    *entry // what the memory persists in; nil: nothing
	disowned bool   // the room is another's by now; see PutBack
}

// place is where a piece lies. The file is kept beside the segment because a
// segment may be closed and opened again, but not while a piece of it is held.
type place struct {
	seg  *segment
	file disk.File
	off  int64
}

type piece = placement.Piece[place]

var _ tier.FileMemory = (*extents)(nil)

// Size implements tier.Memory.
func (e *extents) Size() int64 { return e.size }

// Locate implements tier.FileMemory. An anonymous segment has its name only in messages. An offset
// outside the memory is located at its nearest end.
func (e *extents) Locate(off int64) (volume, file string, offset int64) {
	p := e.pieces[e.pieceAt(off)]
	return e.v.cfg.Dir, e.fileName(p.At), p.At.off + off - p.Off
}

// fileName returns the name of the file at a place of the memory.
func (e *extents) fileName(at place) string {
	if e.kept != nil {
		return e.kept.name()
	}
	return at.seg.name
}

// pieceAt returns the index of the piece that off lies in.
func (e *extents) pieceAt(off int64) int {
	i, exact := slices.BinarySearchFunc(e.pieces, off, func(p piece, off int64) int {
		switch {
		case p.Off < off:
			return -1
		case p.Off > off:
			return 1
		}
		return 0
	})
	if !exact {
		i--
	}
	return max(0, i)
}

// stretches returns where pieces are in their memory.
func stretches(pieces []piece) []seal.Stretch {
	all := make([]seal.Stretch, len(pieces))
	for i, p := range pieces {
		all[i] = seal.Stretch{Off: p.Off, Len: p.Len}
	}
	return all
}

// round returns n rounded up to a multiple of 4096.
func round(n int64) int64 { return (n + tier.Page - 1) &^ (tier.Page - 1) }

// Charge returns size rounded up to a multiple of 4096.
func (v *Volume) Charge(size int64) int64 { return round(size) }

// source is the room that can be handed out at once, as package placement sees it;
// v.mu is held. Low segments come first, so that high ones become free as a whole.
type source struct{ v *Volume }

func (s source) Alloc(n int64) (place, bool) {
	n = round(n)
	for _, seg := range s.v.mu.segments {
		if seg.backed.FreeBytes() < n {
			continue
		}
		if off, ok := seg.backed.Alloc(n); ok {
			seg.used += n
			s.v.mu.used += n
			s.v.mu.free -= n
			return place{seg, seg.file, off}, true
		}
	}
	return place{}, false
}

func (s source) Free(p place, n int64) {
	n = round(n)
	p.seg.backed.Free(p.off, n)
	p.seg.used -= n
	s.v.mu.used -= n
	s.v.mu.free += n
}

func (s source) Largest() (largest int64) {
	for _, seg := range s.v.mu.segments {
		largest = max(largest, seg.backed.Largest())
	}
	return largest
}

// Alloc hands out size > 0 bytes, with whatever is in them: first room that was written and freed
// before, which is written again at twice the speed of fresh room, and then what the file system
// gives. A memory that cannot be had in one piece is split at cuts, or at multiples of
// Config.Request, where requests meet anyway; a shorter stretch between two cuts lies in one
// piece. No room, in the volume or on the file system, is a *tier.NoSpaceError, with the system's
// error as its cause.
func (v *Volume) Alloc(size int64, cuts []int64) (tier.Memory, error) {
	var asked growth
	e, err := v.take(size, cuts, &asked)
	v.asked(asked)
	if err != nil {
		return nil, err
	}
	if v.sealer != nil {
		e.units = v.sealer.NewUnits(stretches(e.pieces))
	}
	e.unwritten.Store(size)
	v.pacer.TakeOn(size)
	return e, nil
}

// growth is what became of asking the file system for room.
type growth struct {
	had   bool  // it gave some
	cause error // it refused in the end
}

// take is Alloc except for the backlog. In asked it leaves what the file system answered.
func (v *Volume) take(size int64, cuts []int64, asked *growth) (*extents, error) {
	if size <= 0 {
		return nil, fmt.Errorf("disk: volume %s: cannot allocate %d bytes", v.cfg.Dir, size)
	}
	if size > v.cfg.Capacity { // also keeps what follows from overflowing
		return nil, v.full(size, nil)
	}
	if v.cfg.Persist {
		return v.createKept(size, asked)
	}
	allowed := v.allowedCuts(size, cuts)
	if e, err := v.reuse(size, allowed, v.cfg.Request); e != nil || err != nil {
		return e, err
	}
	v.change <- struct{}{}
	defer func() { <-v.change }()
	for {
		e, err := v.reuse(size, allowed, v.cfg.Request)
		if e != nil || err != nil {
			return e, err
		}
		grown, cause := v.grow(round(size))
		if grown {
			asked.had = true
			continue
		}
		asked.cause = cause
		// Nothing more to be had: small pieces are better than none.
		e, err = v.reuse(size, allowed, 0)
		if e != nil || err != nil {
			return e, err
		}
		if cause != nil {
			v.pacer.Fail()
		}
		if cause != nil && !outOfRoom(cause) {
			return nil, fmt.Errorf("disk: volume %s: %w", v.cfg.Dir, advised(cause))
		}
		return nil, v.full(size, cause)
	}
}

// allowedCuts returns cuts with the multiples of Request added.
func (v *Volume) allowedCuts(size int64, cuts []int64) []int64 {
	if size <= v.cfg.Request {
		return cuts
	}
	all := slices.Clone(cuts)
	for c := v.cfg.Request; c < size; c += v.cfg.Request {
		all = append(all, c)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// reuse places size bytes in backed room, in pieces of least bytes or more; nil and no error if it
// cannot.
func (v *Volume) reuse(size int64, cuts []int64, least int64) (*extents, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.mu.closed {
		return nil, tier.ErrClosed
	}
	if v.mu.free < round(size) {
		return nil, nil
	}
	pieces, ok := placement.Place(source{v}, size, cuts, least)
	if !ok {
		return nil, nil
	}
	v.mu.idle = min(v.mu.idle, v.mu.free)
	e := &extents{v: v, size: size, pieces: pieces}
	if len(pieces) == 1 {
		e.pieces = append(e.one[:0], pieces[0])
	}
	e.refs.Store(1)
	return e, nil
}

func (v *Volume) full(size int64, cause error) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	e := &tier.NoSpaceError{Requested: size, Available: v.mu.free}
	if v.cfg.Persist {
		e.Available = v.cfg.Capacity - v.mu.used
	}
	if cause != nil {
		e.Cause = fmt.Errorf("disk: volume %s: %w", v.cfg.Dir, cause)
		e.Hint = fullAdvice
	}
	for _, s := range v.mu.segments {
		if cause == nil { // else the holes cannot be filled
			e.Available += s.holes.FreeBytes()
		}
		e.Largest = max(e.Largest, s.backed.Largest())
	}
	if e.Available < size {
		e.Largest = 0 // what is missing is room, not order
	}
	return e
}

// errReserve says why a volume does not take what the file system has.
var errReserve = errors.New("the file system's free space is down to the reserve")

// shortError: by what the file system says of itself, it has less than need bytes to take.
type shortError struct {
	error
	need int64
}

func (e *shortError) Unwrap() error { return e.error }

// outOfRoom reports whether err means that the file system is full.
func outOfRoom(err error) bool {
	return errors.Is(err, errReserve) || errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// grow makes a hole backed, on the way to need free bytes, a multiple of a page. It returns false
// if there is no hole, and an error if the file system refuses. The change token is held.
func (v *Volume) grow(need int64) (bool, error) {
	v.mu.Lock()
	missing := need - v.mu.free
	v.mu.Unlock()
	var refused error
	tried := int64(0)
	// What is worth asking for, until the file system has it.
	for _, want := range []int64{max(need, growStep), need, max(missing, v.cfg.Request), max(missing, tier.Page)} {
		s, off, n := v.takeHole(want)
		if n == 0 {
			return false, refused
		}
		if n == tried {
			v.putHole(s, off, n)
			continue
		}
		tried = n
		err := v.back(s, off, n)
		if err == nil {
			return true, nil
		}
		v.putHole(s, off, n)
		refused = err
		if !outOfRoom(err) {
			break
		}
	}
	return false, refused
}

// takeHole takes a hole of want bytes, or the longest if none is as long; of several
// that in the lowest segment.
func (v *Volume) takeHole(want int64) (s *segment, off, n int64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, seg := range v.mu.segments {
		if room := min(want, seg.holes.Largest()); room > n {
			s, n = seg, room
		}
	}
	if s != nil {
		off, _ = s.holes.Alloc(n)
	}
	return s, off, n
}

// putHole undoes takeHole. A file with nothing in it is closed.
func (v *Volume) putHole(s *segment, off, n int64) {
	v.mu.Lock()
	s.holes.Free(off, n)
	f := s.emptyLocked()
	v.mu.Unlock()
	if f != nil {
		if err := v.closeSegment(s.name, f); err != nil {
			v.warn(causes.DiskFails, "closing %s: %v", s.name, bare(err))
		}
	}
}

// emptyLocked takes the file off a segment that is one hole; nil if it is not.
func (s *segment) emptyLocked() disk.File {
	if s.used > 0 || s.holes.FreeBytes() < s.size {
		return nil
	}
	f := s.file
	s.file = nil
	return f
}

// back takes room for a hole from the file system and makes it free to hand out.
func (v *Volume) back(s *segment, off, n int64) error {
	f := s.file // only holders of the token set it
	err := v.checkReserve(n)
	if errors.Is(err, fs.ErrNotExist) && f != nil && v.cfg.Reserve == 0 {
		err = nil // the directory is gone; the file is not, and the system says if it is full
	}
	if err != nil {
		return err
	}
	if f == nil {
		var err error
		if f, err = v.openSegment(s.name, v.direct); err != nil {
			return fmt.Errorf("opening %s: %w", s.name, bare(err))
		}
	}
	if err := v.allocate(f, off, n); err != nil {
		// A part of the room may have been taken.
		_ = f.Punch(off, n)
		if s.file == nil {
			err = oneline.Join(err, bare(v.closeSegment(s.name, f)))
		}
		return fmt.Errorf("taking %d bytes for %s: %w", n, s.name, err)
	}
	v.fresh.Add(n)
	v.mu.Lock()
	defer v.mu.Unlock()
	s.file = f
	s.backed.Free(off, n)
	v.mu.free += n
	return nil
}

// checkReserve reports whether n bytes can be taken and the reserve left.
func (v *Volume) checkReserve(n int64) error {
	u, err := v.cfg.FS.Usage(v.dir)
	switch {
	case errors.Is(err, errors.ErrUnsupported):
		return nil
	case err != nil:
		return fmt.Errorf("the free space is not known: %w", bare(err))
	case v.cfg.Reserve == 0 && u.Free < n:
		return &shortError{fmt.Errorf("%w: %d bytes are free", syscall.ENOSPC, u.Free), n}
	case u.Free-v.cfg.Reserve < n:
		return &shortError{fmt.Errorf("%w: %d bytes are free and %d are to stay free", errReserve, u.Free, v.cfg.Reserve), n}
	}
	return nil
}

func (v *Volume) allocate(f disk.File, off, n int64) error {
	if v.noAllocate.Load() {
		return nil
	}
	err := f.Allocate(off, n)
	if errors.Is(err, errors.ErrUnsupported) {
		v.noAllocate.Store(true)
		v.warn(causes.Sparse, "%s cannot reserve room: files are sparse, and a full disk is noticed when it is written", v.system)
		return nil
	}
	return bare(err)
}

// Free takes back what Alloc handed out. It calls reclaimed before it returns, or when the last
// transfer ends. To free memory twice is a panic.
func (v *Volume) Free(m tier.Memory, reclaimed func()) {
	e := m.(*extents)
	if !e.freed.CompareAndSwap(false, true) {
		panic("disk: extents freed twice")
	}
	e.reclaimed = reclaimed
	v.mu.Lock()
	v.mu.retiring++
	v.mu.Unlock()
	e.unref()
}

// Shrink gives the room of a memory behind its first size bytes back: whole pages, or units if the
// volume encrypts. If a file cannot be cut, the memory stays as it is. Nothing may use it meanwhile.
func (v *Volume) Shrink(m tier.Memory, size int64) {
	e := m.(*extents)
	size = round(size)
	if e.units != nil { // the last unit is sealed as a whole
		size = (size + seal.Unit - 1) / seal.Unit * seal.Unit
	}
	if size >= e.size {
		return
	}
	if e.kept != nil && !v.cutKept(e.kept, size) {
		return
	}
	v.pacer.Settle(e.unwritten.Swap(0))
	v.mu.Lock()
	defer v.mu.Unlock()
	if e.kept != nil {
		v.mu.used -= round(e.size) - size
	}
	var left []piece
	for _, p := range e.pieces {
		keep := min(p.Len, max(0, size-p.Off))
		if keep < p.Len && e.kept == nil {
			rest := p.At
			rest.off += keep
			source{v}.Free(rest, p.Len-keep)
		}
		if p.Len = keep; keep > 0 {
			left = append(left, p)
		}
	}
	e.size, e.pieces = size, left
}

// ref holds the room for a transfer.
func (e *extents) ref() error {
	for {
		n := e.refs.Load()
		if n == 0 || e.freed.Load() {
			return tier.ErrReleased
		}
		if e.refs.CompareAndSwap(n, n+1) {
			return nil
		}
	}
}

func (e *extents) unref() {
	if e.refs.Add(-1) > 0 {
		return
	}
	v := e.v
	v.pacer.Settle(e.unwritten.Swap(0))
	if e.kept != nil {
		v.freeKept(e)
	}
	v.mu.Lock()
	if e.kept == nil {
		for _, p := range e.pieces {
			source{v}.Free(p.At, p.Len)
		}
	}
	last := v.mu.quiet
	v.mu.Unlock()
	if last {
		if err := v.end(); err != nil {
			v.warn(causes.DiskFails, "%v", err)
		}
	} else {
		select {
		case v.freed <- struct{}{}:
		default:
		}
	}
	e.reclaimed()

	v.mu.Lock()
	v.mu.retiring--
	var settled chan struct{}
	if v.mu.retiring == 0 {
		settled, v.mu.settled = v.mu.settled, nil
	}
	v.mu.Unlock()
	if settled != nil {
		close(settled)
	}
}
