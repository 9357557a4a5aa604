package batch

import (
	"cmp"
	"fmt"

	"github.com/spillway-db/spillway/tier"
)

// inside has the methods of a Batch that only this module's packages call: repositories, the mover,
// the monitor, and lists of holders. Callers keep the rules that its methods name.
type inside struct{ *Batch }

// Inside returns what only this module's packages do with a batch. Programs have no use for it.
func (b *Batch) Inside() inside { return inside{b} }

// Cut is Info for callers that hold a lock which comes before a batch's in the lock order. It calls
// no method of the payload, so Leased is false.
func (b inside) Cut() Info {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.infoLocked()
}

// Entry returns what SetEntry has stored, nil before that. An index of batches stores its record of
// the batch there, so that it need not search for it at each change.
func (b inside) Entry() any { return b.entry.Load() }

// SetEntry stores the record of the batch in an index. All records must have the same type.
func (b inside) SetEntry(e any) { b.entry.Store(e) }

// Space returns the space that holds the batch, nil if it is gone. It calls no method of a
// program's payload.
func (b inside) Space() *tier.Space {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.traits.space
}

// Store makes store, a repository, the holder of the batch, and sets the batch's place. A batch
// that has a holder already is ErrStored, so it cannot be in two repositories, or in one twice.
// From then on the batch calls store at each change after now, before its own observer. The caller
// may hold its own lock, and must call announce with no lock held.
func (b inside) Store(store Observer, p Place) (now Info, announce func(), err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.mu.state == Released:
		return Info{}, nil, b.errorLocked("store", MissingData)
	case b.mu.store != nil:
		return Info{}, nil, fmt.Errorf("batch %d: %w", b.id, ErrStored)
	}
	b.mu.store = store
	announce = b.setPlaceLocked(p)
	return b.infoLocked(), announce, nil
}

// StoreAt changes the place of a batch that store still holds. No observer is called before
// announce is: store may hold its own lock here, and must call announce with no lock held.
func (b inside) StoreAt(store Observer, p Place) (announce func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.store != store {
		return func() {}
	}
	return b.setPlaceLocked(p)
}

// Unstore ends what Store began; the batch keeps its place. If store does not hold
// the batch, nothing happens.
func (b inside) Unstore(store Observer) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.store == store {
		b.mu.store = nil
	}
}

// put is the reason of a batch that has not moved yet; see Arrival.
const put = "put"

// Arrives makes the commit of t record the reason of the move, and whether it goes to a slower
// tier; see Arrival and Unread.
func (b inside) Arrives(t *Transit, why string, slower bool) {
	t.why, t.unread = cmp.Or(why, "other"), slower
}

// Arrival returns the reason of the batch's last move, "put" if it has not moved, and the time of
// its arrival by Options.Clock.
func (b inside) Arrival() (why string, since int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.why, b.mu.since
}

// Unread reports whether the batch has moved to a slower tier since it was used.
func (b inside) Unread() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.unread
}

// Fits returns the error that a commit of a transit of b would return for p, and changes nothing.
func (b inside) Fits(t *Transit, p Payload) error {
	_, err := t.check(p)
	return err
}

// Describe fills in the batch and its place, for lists of holders such as tier.Space.Leaks.
func (b inside) Describe(h *tier.Holding) {
	place := b.Info().Place
	h.Batch, h.Plan = uint64(b.id), place.Name
	h.Operator, h.Port, h.Partition = place.Operator, place.Port, place.Partition
}
