package volumes

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"sync/atomic"
	"syscall"

	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// growStep is how much room is requested from the file system at a time, if less is needed.
// Allocated room is written at 2.5 GiB/s, sparse files at 2.2 (ext4, virtual NVMe); to allocate 64
// MiB takes 20 µs.
const growStep = 64 << 20

// extents is the memory that Volume.Alloc returns: one or more pieces of the volume's file, or with
// Config.Persist a file of its own. It implements tier.FileMemory.
//
// It is in use from Alloc on, by its owner and by each transfer in progress. Free ends the owner's
// use. When the last use ends, the room is the volume's again.
type extents struct {
	v         *Volume
	size      int64
	pieces    []piece
	sealed    *sealedExtent  // nil if the volume does not encrypt
	persisted *persistedFile // nil: the memory is in the volume's file

	written   atomic.Int64 // bytes, counting repeated writes of the same place: an estimate for the backlog
	reclaimed func()       // set by Free

	// Guarded by the volume's mutex.
	uses  int
	freed bool
}

// piece is a part of a memory: of whole pages, but for the only one of persisted memory. At is where it
// begins in the file.
type piece = extent.Piece[int64]

var _ tier.FileMemory = (*extents)(nil)

// Size implements tier.Memory.
func (e *extents) Size() int64 { return e.size }

// Locate implements tier.FileMemory. An anonymous file has its name only in messages. An offset
// outside the memory is located at its nearest end.
func (e *extents) Locate(off int64) (volume, file string, offset int64) {
	if e.persisted != nil {
		return e.v.cfg.Dir, *e.persisted.name.Load(), off
	}
	in := e.pieces[0]
	for _, p := range e.pieces {
		if p.Off <= off {
			in = p
		}
	}
	return e.v.cfg.Dir, spillName, in.At + off - in.Off
}

// Charge returns size rounded up to a multiple of 4096.
func (v *Volume) Charge(size int64) int64 { return extent.RoundUp(size, tier.Page) }

// Alloc returns a memory of size > 0 bytes with any contents. Room that was written and freed before
// comes first, because it is written again at twice the speed of fresh room. Then the volume takes room
// from the file system. If there is no piece of that size, the memory is split at cuts, or at multiples
// of Config.Request, which requests end at anyway. No room, in the volume or in the file system, is a
// *tier.NoSpaceError.
func (v *Volume) Alloc(size int64, cuts []int64) (tier.Memory, error) {
	switch {
	case size <= 0:
		return nil, fmt.Errorf("disk: volume %s: cannot allocate %d bytes", v.cfg.Dir, size)
	case size > v.cfg.Capacity: // also keeps what follows from overflowing
		return nil, v.full(size, nil)
	}
	e := &extents{v: v, size: size, uses: 1}
	var grew bool
	var refusal, err error
	v.mu.Lock()
	if !v.mu.closed {
		need := extent.RoundUp(size, tier.Page)
		if at, ok := v.mu.backed.Alloc(need); ok { // as a rule
			e.pieces = []piece{{Len: need, At: at}}
			v.mu.used += need
			v.mu.idle = min(v.mu.idle, v.mu.backed.FreeBytes())
		}
	}
	v.mu.Unlock()
	switch {
	case e.pieces != nil:
	case v.cfg.Persist:
		grew, refusal, err = v.placeInFile(e)
	default:
		grew, refusal, err = v.place(e, cuts)
	}
	if v.cfg.Events != nil && (grew || refusal != nil) { // without the change token
		v.ended(context.Background(), takingRoom, refusal)
	}
	if err != nil {
		return nil, err
	}
	if v.sealer != nil {
		e.sealed = &sealedExtent{sealer: v.sealer, key: v.sealer.own, block: blockSize}
	}
	v.takeOn(size)
	return e, nil
}

// place finds room for e, for which there was no piece: in backed room, in pieces of at least
// Config.Request bytes; else it takes room from the file system for as long as that gives some; else
// in pieces of any length. grew reports whether the file system gave some, and refusal is its error
// if it did not the last time.
func (v *Volume) place(e *extents, cuts []int64) (grew bool, refusal, err error) {
	if e.size > v.cfg.Request {
		cuts = slices.Clone(cuts)
		for c := v.cfg.Request; c < e.size; c += v.cfg.Request {
			cuts = append(cuts, c)
		}
		slices.Sort(cuts)
		cuts = slices.Compact(cuts)
	}
	// Pieces are whole pages, whatever a caller passes.
	cuts = slices.DeleteFunc(slices.Clone(cuts), func(c int64) bool { return c%tier.Page != 0 })
	need, minPiece := extent.RoundUp(e.size, tier.Page), v.cfg.Request
	for hasToken := false; ; {
		v.mu.Lock()
		closed, placed := v.mu.closed, false
		if !closed && v.mu.backed.FreeBytes() >= need {
			if e.pieces, placed = extent.Place(v.mu.backed, need, cuts, minPiece); placed {
				v.mu.used += need
			}
			v.mu.idle = min(v.mu.idle, v.mu.backed.FreeBytes())
		}
		v.mu.Unlock()
		switch {
		case closed:
			return grew, nil, tier.ErrClosed
		case placed:
			return grew, refusal, nil
		case !hasToken:
			v.change <- struct{}{}
			defer func() { <-v.change }()
			hasToken = true
		case minPiece > 0:
			var full bool
			if full, refusal = v.grow(need); full || refusal != nil {
				minPiece = 0
			} else {
				grew = true
			}
		case refusal == nil:
			return grew, nil, v.full(e.size, nil)
		default:
			return grew, refusal, v.refused(e.size, refusal)
		}
	}
}

// grow backs a hole, on the way to need free bytes: with one request for as much as is worth it, or
// else for as much as is missing. full reports that the volume has taken all room up to its capacity.
// The caller has the change token.
func (v *Volume) grow(need int64) (full bool, refusal error) {
	v.mu.Lock()
	missing := max(need-v.mu.backed.FreeBytes(), tier.Page)
	v.mu.Unlock()
	for _, want := range []int64{max(need, growStep), missing} {
		v.mu.Lock()
		n, off := min(want, v.mu.holes.Largest()), int64(0)
		if n > 0 {
			off, _ = v.mu.holes.Alloc(n)
		}
		v.mu.Unlock()
		if n == 0 {
			return refusal == nil, refusal
		}
		err := v.checkReserve(n)
		if errors.Is(err, fs.ErrNotExist) && v.cfg.Reserve == 0 {
			err = nil // the directory is gone and the file is not, and the system notices if it is full
		}
		if err == nil {
			if err = v.allocate(v.file, off, n); err != nil {
				_ = v.file.Punch(off, n) // a part of the room may have been taken
				err = fmt.Errorf("taking %d bytes for %s: %w", n, spillName, err)
			}
		}
		v.mu.Lock()
		if err == nil {
			v.mu.backed.Free(off, n)
			v.fresh.Add(n)
		} else {
			v.mu.holes.Free(off, n)
		}
		v.mu.Unlock()
		if refusal = err; err == nil || !isOf(errsFull, err) {
			break
		}
	}
	return false, refusal
}

// checkReserve returns an error if n bytes cannot be taken and the reserve left.
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
		return &shortError{
			fmt.Errorf("%w: %d bytes are free and %d are to stay free", errReserve, u.Free, v.cfg.Reserve),
			n,
		}
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
		v.warn(
			causes.Sparse,
			"%s cannot reserve room: files are sparse, and a full disk is noticed when it is written",
			v.system,
		)
		return nil
	}
	return bare(err)
}

// Free ends the owner's use of a memory that Alloc returned. It calls reclaimed before it returns, or
// when the last transfer ends. It panics if the memory was freed before.
func (v *Volume) Free(m tier.Memory, reclaimed func()) {
	e := m.(*extents)
	v.mu.Lock()
	if e.freed {
		v.mu.Unlock()
		panic("disk: extents freed twice")
	}
	e.freed, e.reclaimed = true, reclaimed
	if !v.mu.closed { // else Close does not wait for it
		v.ending.Add(1)
		e.reclaimed = func() { reclaimed(); v.ending.Done() }
	}
	v.mu.Unlock()
	e.unref()
}

// Shrink gives the room of a memory behind its first size bytes back, in whole pages, or if the volume
// encrypts in whole blocks. If a file cannot be cut, the memory stays as long as it is. Nothing may use
// it meanwhile.
func (v *Volume) Shrink(m tier.Memory, size int64) {
	e := m.(*extents)
	size = extent.RoundUp(size, tier.Page)
	if e.sealed != nil && size < e.size {
		size = e.sealed.cut(size)
	}
	if size >= e.size {
		return
	}
	if e.persisted != nil {
		f, err := v.openPersisted(e.persisted, false)
		if err == nil {
			err = join(f.Truncate(size), f.Close())
		}
		if err != nil {
			return
		}
	}
	if unwritten := e.size - max(size, e.written.Load()); unwritten > 0 {
		v.settle(unwritten)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if e.persisted != nil {
		v.mu.used -= extent.RoundUp(e.size, tier.Page) - size
		v.given.Add(extent.RoundUp(e.size, tier.Page) - size)
	}
	var left []piece
	for _, p := range e.pieces {
		keep := min(p.Len, max(0, size-p.Off))
		if keep < p.Len && e.persisted == nil {
			v.mu.backed.Free(p.At+keep, p.Len-keep)
			v.mu.used -= p.Len - keep
		}
		if p.Len = keep; keep > 0 {
			left = append(left, p)
		}
	}
	e.size, e.pieces = size, left
}

// unref ends a use. The last one gives the room back, or lent memory to the entry that it is of.
func (e *extents) unref() {
	v, k := e.v, e.persisted
	v.mu.Lock()
	e.uses--
	last, reclaimed := e.uses == 0, e.reclaimed
	lent := last && k != nil && k.state == isLent
	if lent {
		k.state, e.freed, e.uses = isFound, false, 1
		v.mu.stays += k.persisted.Room
	}
	v.mu.Unlock()
	if !last {
		return
	}
	if left := e.size - e.written.Load(); left > 0 {
		v.settle(left)
	}
	if k != nil && !lent {
		v.freePersisted(k)
	}
	v.mu.Lock()
	for _, p := range e.pieces {
		if k == nil {
			v.mu.backed.Free(p.At, p.Len)
			v.mu.used -= p.Len
		}
	}
	closed := v.mu.closed
	v.mu.Unlock()
	if closed {
		if err := v.end(); err != nil {
			v.warn(causes.DiskFails, "%v", err)
		}
	}
	reclaimed()
}

const (
	// togetherPerSecond is how often a second the bytes that are written together could be written:
	// a caller that waits for one of the batches waits for all of them.
	togetherPerSecond = 500
	// minTogether is written together on any slow disk: it takes as long for any request.
	minTogether = 64 << 10
)

// Together returns how many bytes, in one piece, are best written at once and then split; 0 where
// memory is encrypted or persists one by one. They are no more than there is room for. While a fifth
// of the file or more is free, it is not made longer for the sake of one piece.
func (v *Volume) Together() int64 {
	if v.sealer != nil || v.cfg.Persist {
		return 0
	}
	pace := v.Pace()
	n := min(v.cfg.Request, max(pace.Bandwidth/togetherPerSecond, minTogether))
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.mu.closed {
		return 0
	}
	largest := v.mu.backed.Largest()
	if !pace.Ailing && v.mu.backed.FreeBytes()-n <= v.mu.used/4 {
		largest = max(largest, v.mu.holes.Largest())
	}
	return min(n, largest)
}

// Split makes several memories of m, with its bytes: sizes has the length of each, in order. They are
// whole pages, and add up to all of it. No transfer may be in progress in m, which is gone then. Split
// returns nil, and m is as it was, if m is not in one piece, or is encrypted or persists.
func (v *Volume) Split(m tier.Memory, sizes []int64) []tier.Memory {
	e := m.(*extents)
	if e.sealed != nil || v.cfg.Persist || len(e.pieces) != 1 {
		return nil
	}
	v.settle(max(0, e.size-e.written.Load()))
	parts := make([]tier.Memory, len(sizes))
	at := e.pieces[0].At
	for i, n := range sizes {
		part := &extents{v: v, size: n, uses: 1, pieces: []piece{{Len: n, At: at}}}
		part.written.Store(n) // nothing of it is in the backlog
		parts[i] = part
		at += n
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	e.freed, e.uses = true, 0
	return parts
}
