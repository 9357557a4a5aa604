package seal

import (
	"errors"
	"io"

	"github.com/spillway-db/spillway/tier"
)

// File is where sealed bytes lie. A read or write does all or is an error, as package io says.
type File interface {
	io.ReaderAt
	io.WriterAt
}

// Request is what a Hold was asked for: bytes of one stretch that are read or written.
type Request struct {
	Stretch int
	Off     int64  // of P in the memory
	P       []byte // at most as much as Buffers has room for
	File    File
	At      int64 // of P in the file
}

// within returns the request's part of [a, z) of the memory, and whether that is all of it.
func (r *Request) within(a, z int64) ([]byte, bool) {
	from, to := max(a, r.Off), min(z, r.Off+int64(len(r.P)))
	return r.P[from-r.Off : to-r.Off : to-r.Off], from == a && to == z
}

// place is where an offset of the memory is in the file.
func (r *Request) place(off int64) int64 { return r.At + off - r.Off }

// Write seals the units that a request touches and writes them. Of a unit that it has only a
// part of the rest is read first. Bytes that are not what was written are a *tier.AlteredError
// that does not name the file.
func (h *Hold) Write(r Request, b *Buffers) error {
	u := h.units
	buf := b.take()
	defer b.put(buf)
	start, _ := u.bounds(r.Stretch, h.first)
	_, stop := u.bounds(r.Stretch, h.end-1)
	region := (*buf)[:stop-start+TagSize]
	made := make([]Seal, h.end-h.first)
	for i := h.first; i < h.end; i++ {
		a, z := u.bounds(r.Stretch, i)
		out, n := region[a-start:], z-a
		plain, ok := r.within(a, z)
		if !ok {
			if err := u.change(&r, i, out); err != nil {
				return err
			}
			plain = out[:n]
		}
		made[i-h.first] = u.seal(out, plain, i)
	}
	if _, err := r.File.WriteAt(region[:stop-start], r.place(start)); err != nil {
		u.lose(h.first, h.end, err)
		return err
	}
	copy(u.seals[h.first:h.end], made)
	return nil
}

// change makes out what unit i is with the request's bytes in it.
func (u *Units) change(r *Request, i int, out []byte) error {
	a, z := u.bounds(r.Stretch, i)
	s := u.stretches[r.Stretch]
	written := min(z, s.Off+s.Len) // behind it is the rest of a page
	if u.seals[i].Nonce == Unwritten || r.Off <= a && r.Off+int64(len(r.P)) >= written {
		clear(out[:z-a])
	} else {
		if err := u.whyLost(i); err != nil {
			return err // and not that it was altered: perhaps the disk is full, and others wrote at the same time
		}
		if _, err := r.File.ReadAt(out[:z-a], r.place(a)); err != nil {
			return u.missing(r, i, err)
		}
		if !u.open(out, out, int(z-a), i) {
			return u.altered(r, i, nil)
		}
	}
	if skip := r.Off - a; skip >= 0 {
		copy(out[skip:z-a], r.P)
	} else {
		copy(out[:z-a], r.P[-skip:])
	}
	return nil
}

// Read reads the units that a request touches and opens them. Those that were never written are
// zeros. Bytes that are not what was written are a *tier.AlteredError that does not name the
// file; P holds nothing of their unit then.
func (h *Hold) Read(r Request, b *Buffers) error {
	u := h.units
	low, high := h.end, h.first // what was written
	for i := h.first; i < h.end; i++ {
		if err := u.whyLost(i); err != nil {
			return u.altered(&r, i, err)
		}
		if u.seals[i].Nonce != Unwritten {
			low, high = min(low, i), i+1
		}
	}
	if low >= high {
		clear(r.P)
		return nil
	}
	buf := b.take()
	defer b.put(buf)
	start, _ := u.bounds(r.Stretch, low)
	_, stop := u.bounds(r.Stretch, high-1)
	region := (*buf)[:stop-start+TagSize]
	if _, err := r.File.ReadAt(region[:stop-start], r.place(start)); err != nil {
		return u.missing(&r, high-1, err)
	}
	for i := h.first; i < h.end; i++ {
		a, z := u.bounds(r.Stretch, i)
		to, whole := r.within(a, z)
		if u.seals[i].Nonce == Unwritten {
			clear(to)
			continue
		}
		sealed, out := region[a-start:], to
		if !whole {
			out = sealed
		}
		if !u.open(out, sealed, int(z-a), i) {
			return u.altered(&r, i, nil)
		}
		if !whole {
			copy(to, sealed[max(0, r.Off-a):z-a])
		}
	}
	return nil
}

func (u *Units) altered(r *Request, i int, cause error) error {
	a, z := u.bounds(r.Stretch, i)
	return &tier.AlteredError{Offset: r.place(a), Length: z - a, Cause: cause}
}

// missing returns the error of reading units up to the last, which was written. The file may have
// been truncated.
func (u *Units) missing(r *Request, last int, err error) error {
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) { // the latter inside of what direct I/O reads as a whole
		return u.altered(r, last, err)
	}
	return err
}
