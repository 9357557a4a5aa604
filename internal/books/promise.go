package books

import (
	"fmt"
	"slices"

	"github.com/spillway-db/spillway/internal/invariants"
)

// A Promise is what one reservation has of a space: promised bytes, some of which are drawn, that
// is in buffers. It is open from Books.Reserve until Release. Buffers that were drawn from it keep
// a pointer to it, so that their bytes return to it while it is open. With a soft limit more may be
// drawn than was promised: it is overdrawn then, and bytes that come back make up for that first.
//
// The mutex of its books guards it.
type Promise struct {
	books           *Books
	promised, drawn int64 // promised is 0 once it is released
	released        bool
	By              // set before the promise is opened
}

// By is what promises are summed by.
type By struct {
	Owner any              // who holds it; nil if that is unknown
	Moves bool             // it is for data that is being moved, and no program's
	Stack invariants.Trace // where it was made, in an invariants build
}

// Occupied is the owner of promises for memory that was in use before its space was made.
var Occupied any = struct{ name string }{"memory that was there before"}

// PromiseView is a promise at one moment, or the sum of several.
type PromiseView struct {
	By
	Promised, Unused int64 // Unused is not set in a sum
	Open             bool  // not in a sum
}

// addLocked adds n promised bytes to a sum of open promises.
func (b *Books) addLocked(by By, n int64) {
	if !by.Moves {
		b.now.Progress++
	}
	switch {
	case by.Owner != nil || invariants.Enabled:
		if b.owned[by] += n; b.owned[by] == 0 {
			delete(b.owned, by)
		}
	case by.Moves:
		b.moving += n
	default:
		b.promised += n
	}
}

// Promises returns the sums of open promises, for each owner and for none.
func (b *Books) Promises() []PromiseView {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := []PromiseView{{Promised: b.promised}, {By: By{Moves: true}, Promised: b.moving}}
	for by, n := range b.owned {
		all = append(all, PromiseView{By: by, Promised: n})
	}
	return slices.DeleteFunc(all, func(v PromiseView) bool { return v.Promised == 0 })
}

// View returns the promise as it is. A released promise has no bytes.
func (p *Promise) View() PromiseView {
	p.books.mu.Lock()
	defer p.books.mu.Unlock()
	return PromiseView{By: p.By, Promised: p.promised, Unused: p.unusedLocked(), Open: !p.released}
}

// SetOwner sets who holds the promise, and reports whether it was open and had no owner.
func (p *Promise) SetOwner(owner any) bool {
	b := p.books
	b.mu.Lock()
	defer b.mu.Unlock()
	if p.released || p.Owner != nil {
		return false
	}
	b.addLocked(p.By, -p.promised)
	p.Owner = owner
	b.addLocked(p.By, p.promised)
	return true
}

// unusedLocked returns the promised bytes that are in no buffer.
func (p *Promise) unusedLocked() int64 { return max(0, p.promised-p.drawn) }

// An Outcome is the result of a change of a promise.
type Outcome struct {
	Released bool  // the promise was released before: nothing has changed
	Short    int64 // so many bytes are missing: nothing has changed
	Freed    int64 // bytes of the space that are free now
}

// changeLocked adds to what is promised and drawn. reserved bytes, which the caller has reserved,
// go to the promise as far as it needs them. changeLocked returns how many bytes are free now.
func (p *Promise) changeLocked(promised, drawn, reserved int64) (freed int64) {
	b := p.books
	before := p.unusedLocked()
	p.promised += promised
	p.drawn += drawn
	needs := p.unusedLocked() - before
	if b.now.Reserved += needs - reserved; b.now.Reserved < 0 {
		panic(fmt.Sprintf("books: a promise takes %d bytes that are not reserved", reserved))
	}
	if !p.Moves || p.released && (drawn != 0 || p.drawn > 0) { // a move counts once it has ended well
		b.now.Progress++
	}
	if promised != 0 {
		b.addLocked(p.By, promised)
	}
	return reserved - needs - drawn
}

// Draw turns n unused bytes into live ones. extra bytes, which the caller has reserved, are added:
// to the promise if grow is set, or else to what is drawn beyond it. If that is not enough, nothing
// changes, and Short is what is missing.
func (p *Promise) Draw(n, extra int64, grow bool) Outcome {
	b := p.books
	b.mu.Lock()
	defer b.mu.Unlock()
	short := n - extra - p.unusedLocked()
	switch {
	case p.released:
		return Outcome{Released: true}
	case short > 0:
		return Outcome{Short: short}
	}
	b.now.Live += n
	var grown int64
	if grow {
		grown = extra
	}
	return Outcome{Freed: p.changeLocked(grown, n, extra)}
}

// Reclaim frees n retired bytes that were drawn from the promise. While it is open it takes them
// back, as far as it is not overdrawn. Reclaim returns how many bytes are free now.
func (p *Promise) Reclaim(n int64) (freed int64) {
	b := p.books
	b.mu.Lock()
	defer b.mu.Unlock()
	if n < 0 || n > b.now.Retired {
		panic(fmt.Sprintf("books: reclaiming %d bytes: %+v", n, b.now.Usage))
	}
	b.now.Retired -= n
	return p.changeLocked(0, -n, 0)
}

// Resize adds n bytes to the promise, which the caller has reserved; of an overdraft they were
// reserved before, and are free now. If n is below 0, Resize frees as many unused bytes. If fewer are
// unused, nothing changes, and Short is what is missing.
func (p *Promise) Resize(n int64) Outcome {
	p.books.mu.Lock()
	defer p.books.mu.Unlock()
	short := -n - p.unusedLocked()
	switch {
	case p.released:
		return Outcome{Released: true}
	case short > 0:
		return Outcome{Short: short}
	}
	return Outcome{Freed: p.changeLocked(n, 0, max(0, n))}
}

// Release frees all unused bytes, and ends the promise.
func (p *Promise) Release() Outcome {
	p.books.mu.Lock()
	defer p.books.mu.Unlock()
	if p.released {
		return Outcome{Released: true}
	}
	p.released = true
	return Outcome{Freed: p.changeLocked(-p.promised, 0, 0)}
}
