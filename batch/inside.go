package batch

import (
	"fmt"
	"sync/atomic"

	"github.com/spillway-db/spillway/tier"
)

// inside is a Batch as repositories, the monitor and accounts see it. They keep the rules that its
// methods name.
type inside struct{ *Batch }

// Inside returns what only this module's packages do with a batch. Programs have no use for it.
func (b *Batch) Inside() inside { return inside{b} }

// Mark is a number that one observer may keep in the batch, so that it need not search for what it
// knows of it: who finds 0 and replaces it. It is 0 again when that observer forgets the batch.
func (b inside) Mark() *atomic.Uint32 { return &b.mu.mark }

// Slot is a number that the store that holds the batch may keep in it, under its own lock. Another
// store may have replaced it when the batch is not in the former any more.
func (b inside) Slot() *atomic.Uint32 { return &b.mu.slot }

// Cut is Info for callers that hold a lock, of a lower rank than a batch's. It calls nothing of the
// payload, so Leased is false.
func (b inside) Cut() Info {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.infoLocked()
}

// Space returns the space that the batch lies in, nil if it is gone. It calls nothing of a program's
// payload, which was asked when it came.
func (b inside) Space() *tier.Space {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.saysLocked().space
}

// Store makes store, which is the same each time, the holder of the batch, and sets its place. A
// batch has one store at most, so that it cannot be in two repositories, or in one twice:
// ErrStored. The store is called at changes after the cut that Store returns, before the batch's
// own observer. The caller may hold its own lock, and must call tell with no lock held.
func (b inside) Store(store *Observer, p Place) (now Info, tell func(), err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.mu.state == Released:
		return Info{}, nil, b.errorLocked("store", MissingData)
	case b.mu.store != nil:
		return Info{}, nil, fmt.Errorf("batch %d: %w", b.id, ErrStored)
	}
	b.mu.store = store
	tell = b.setPlaceLocked(p)
	return b.infoLocked(), tell, nil
}

// StoreAt changes the place of a batch that store still holds. No observer is called before tell
// is: store may hold its own lock here, and must call tell with no lock held.
func (b inside) StoreAt(store *Observer, p Place) (tell func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.store != store {
		return func() {}
	}
	return b.setPlaceLocked(p)
}

// Unstore ends what Store began; the batch keeps its place. If store does not hold
// the batch, nothing happens.
func (b inside) Unstore(store *Observer) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mu.store == store {
		b.mu.store = nil
	}
}

// DropFrom is Drop by the store that holds the batch. The store is not called, and holds the batch
// no longer, unless there is a StateError.
func (b inside) DropFrom(store *Observer) error { return b.drop(store) }

// Fits returns the error that a commit of a transit of b would return for p, and changes nothing.
func (b inside) Fits(t *Transit, p Payload) error {
	_, err := t.check(p)
	return err
}

// Describe is for tier.Space.Leaks and the like: it says where in which plan the batch is.
func (b inside) Describe(h *tier.Holding) {
	place := b.Info().Place
	h.Batch, h.Plan = uint64(b.id), place.Name
	h.Operator, h.Port, h.Partition = place.Operator, place.Port, place.Partition
}
