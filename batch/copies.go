package batch

import (
	"cmp"
	"slices"

	"github.com/spillway-db/spillway/internal/copies"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// copyOf is a clean image: a payload that the batch has, beside its own, in another space. It is
// valid because the bytes of a batch never change. Its memory counts as free (tier.Usage.Cached),
// and the space frees it when it needs the room.
type copyOf struct {
	payload copyable
	held    *copies.Copy    // its entry in the space's list, from which one caller takes it to use or free it
	ended   func(used bool) // called once, when it is used or freed; may be nil
}

// copyable is a payload that can become a clean image.
type copyable interface {
	Payload
	KeepCopy(ended func(used bool)) *copies.Copy
	Buffers() []*tier.Buffer
}

// Copies lists the spaces other than the batch's own that hold a copy of its data, the fastest tier
// first: a move there moves no bytes. A copy counts as free room
// (tier.Usage.Cached). It goes when the room is needed, and with the batch.
func (b *Batch) Copies() (in []tier.ID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range b.mu.copies {
		if c.held.Listed() {
			in = append(in, c.payload.Space().ID())
		}
	}
	slices.SortFunc(in, func(a, b tier.ID) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Ordinal, b.Ordinal))
	})
	return in
}

// EachCopy calls f with each clean image, with no lock held. It may be freed at any moment, so f
// may use its memory only while the payload's Hold keeps it.
func (b inside) EachCopy(f func(Payload)) {
	b.mu.Lock()
	all := b.mu.copies
	b.mu.Unlock()
	for _, c := range all {
		if c.held.Listed() {
			f(c.payload)
		}
	}
}

// CopiedIn reports whether there is a copy in a space other than the batch's own.
func (b inside) CopiedIn(s *tier.Space) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.copiedInLocked(s)
}

// Keep makes the commit of t keep the old payload as a clean image, if its space keeps them. ended,
// which may be nil, is called as that of AddCopy.
func (b inside) Keep(t *Transit, ended func(used bool)) { t.keeps, t.copied = true, ended }

// Kept reports whether the commit of t has kept the old payload as a clean image.
func (b inside) Kept(t *Transit) bool { return t.kept }

// Revive makes the clean image of b in r's space a payload again, drawn from r, so that a move
// there copies no bytes. b must be in transit. The clean image must have the given form, unless
// that is "". The caller must commit or release the payload. Revive returns nil if there is none,
// or if r does not have the room.
func (b inside) Revive(form PayloadType, r reservation.Reservation) Payload {
	c := b.takeCopy(form, r.Space())
	if c == nil {
		return nil
	}
	if err := r.Revive(c.held, c.payload.Buffers()); err != nil {
		c.held.Release()
		return nil
	}
	if c.ended != nil {
		c.ended(true)
	}
	return c.payload
}

func (b inside) takeCopy(form PayloadType, space *tier.Space) *copyOf {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range b.mu.copies {
		if c.payload.Space() == space && (form == "" || c.payload.Type() == form) && c.held.Take() {
			return &c
		}
	}
	return nil
}

// AddCopy makes p a clean image of b, which is in another space, and takes p over. of is p's
// descriptor. ended is called once, with no lock held: with true when the clean image is used, with
// false when it is freed. AddCopy reports whether it added p. It does not if b was dropped, is in
// p's space, has another descriptor, or already has a clean image there; then it releases p.
func (b inside) AddCopy(p Payload, of *Descriptor, ended func(used bool)) (added bool) {
	c := keep(p, ended)
	if c == nil {
		_ = release(p) // its memory is the caller's own
		ended(false)
		return false
	}
	var noted change
	var over []copyOf
	b.mu.Lock()
	if b.mu.state != Released && b.mu.desc == of && b.mu.traits.space != p.Space() && !b.copiedInLocked(p.Space()) {
		added = true
		over = b.addCopyLocked(c, false)
		noted = b.changeLocked()
	}
	b.mu.Unlock()
	if !added {
		c.held.Drop()
		return false
	}
	b.announce(noted)
	dropCopies(over)
	return true
}

// copiedInLocked reports whether there is a copy in a space.
func (b *Batch) copiedInLocked(space *tier.Space) bool {
	for _, c := range b.mu.copies {
		if c.payload.Space() == space && c.held.Listed() {
			return true
		}
	}
	return false
}

// keep makes a payload a clean image, and returns nil if it cannot. A program's payload never
// becomes one, even if it embeds one of ours, because it may have a Release of its own.
func keep(p Payload, ended func(used bool)) *copyOf {
	lockrank.AssertNone("a payload becomes a copy")
	img, ok := p.(*payload.Image)
	if !ok {
		return nil
	}
	if c := img.KeepCopy(ended); c != nil {
		return &copyOf{payload: img, held: c, ended: ended}
	}
	return nil
}

// addCopyLocked puts c, which may be nil, before the other clean images. It returns those that the
// caller must drop: the ones in the batch's own space or, if stale is set, all.
func (b *Batch) addCopyLocked(c *copyOf, stale bool) (over []copyOf) {
	var left []copyOf
	if c != nil {
		left = append(left, *c)
	}
	for _, c := range b.mu.copies {
		switch {
		case !c.held.Listed():
		case stale || c.payload.Space() == b.mu.traits.space:
			over = append(over, c)
		default:
			left = append(left, c)
		}
	}
	b.mu.copies = left
	return over
}

func dropCopies(all []copyOf) {
	for _, c := range all {
		c.held.Drop()
	}
}
