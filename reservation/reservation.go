package reservation

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/spillway-db/spillway/internal/copies"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/tier"
)

// Reservation is a promise of bytes in one space, from which Alloc draws buffers. The caller must
// release it once. It is safe for concurrent use, and buffers may be freed from any goroutine.
//
// It is a small value that may be copied and compared; copies are the same promise. The zero value
// is no reservation: it has no space, its Release does nothing, and its other methods return
// tier.ErrReleased.
//
// At any moment its bytes are either unused or drawn, that is charged to buffers:
//
//	unused ──Alloc──▶ drawn ──buffer freed, Credit──▶ unused, or free after Release
type Reservation struct {
	rec *record
	gen uint64 // the generation of rec that is this reservation; others may use rec before and after
}

// IsZero reports whether r is the zero value, and so no reservation.
func (r Reservation) IsZero() bool { return r.rec == nil }

// record holds the counts of a reservation. After Release another reservation in the same space
// uses the record, so that reserving does not allocate. The generation distinguishes the two:
// buffers of the first are credited with the first's generation, and no longer count for the
// second.
type record struct {
	line *line  // the line of its space
	at   uint32 // where the space may park the released bytes for the next reservation; see tier's UnreserveAt

	account tier.Account // the record as a *creditor: buffers have a pointer to this field

	mu struct {
		lockrank.Mutex[lockrank.Reservation]        // never held with the manager's, which has the same rank
		gen                                  uint64 // counts Releases
		promised                             int64
		drawn                                int64 // charged to its buffers that are not reclaimed yet; with Ignore it may be above promised
		released                             bool
		growing                              []*waiter // Grow calls that wait
		optioned                             bool      // there are options: most have none
		options                              options
		arriving                             int64            // its part of line.arriving
		stack                                invariants.Trace // where it was reserved; only in an invariants build
	}
}

// record returns an unused record for a new reservation in l's space.
func (l *line) record() *record {
	if r, ok := l.records.Get().(*record); ok {
		return r
	}
	r := &record{line: l, at: l.made.Add(1)}
	r.account = (*creditor)(r)
	return r
}

// open makes r a reservation of bytes that the space has already been charged.
func (r *record) open(bytes int64, o options) Reservation {
	// Not locked: a reservation of an earlier generation reads only the generation, which stays.
	v := Reservation{r, r.mu.gen}
	r.mu.promised, r.mu.drawn, r.mu.released = bytes, 0, false
	if o != (options{}) {
		r.mu.optioned, r.mu.options = true, o
		if keeps, _ := o.policy.origin.of(r.line.space); keeps {
			r.mu.arriving = bytes
			r.line.arriving.Add(bytes)
		}
	}
	if invariants.Enabled {
		r.mu.stack = invariants.Stack()
		r.line.m.open.Store(v, struct{}{})
	}
	o.owner.opened(v)
	return v
}

// lock returns r's record, locked; nil if r was released or is none.
func (r Reservation) lock() *record {
	if r.rec == nil {
		return nil
	}
	r.rec.mu.Lock()
	if r.rec.goneLocked(r.gen) {
		r.rec.mu.Unlock()
		return nil
	}
	return r.rec
}

// goneLocked reports whether the reservation of that generation was released.
func (r *record) goneLocked(gen uint64) bool { return r.mu.gen != gen || r.mu.released }

// recycle makes r available to the next reservation. An invariants build does not, because a second
// release panics with the record's stack.
func (r *record) recycle() {
	if !invariants.Enabled {
		r.line.records.Put(r)
	}
}

// Leaks lists what is promised and not released, for the report of an engine that
// is closed: one entry a space, or in an invariants build one a reservation with
// the stack that took it.
func (m *Manager) Leaks() []tier.Leak {
	var out []tier.Leak
	if invariants.Enabled {
		m.open.Range(func(k, _ any) bool {
			r := k.(Reservation)
			if n := r.Unused(); n > 0 {
				out = append(out, tier.Leak{Space: r.Space().ID(), Bytes: n, Promise: true, Stack: r.rec.mu.stack.String()})
			}
			return true
		})
		return out
	}
	for _, s := range m.spaces.all {
		if n := s.Usage().Reserved; n > 0 {
			out = append(out, tier.Leak{Space: s.ID(), Bytes: n, Promise: true})
		}
	}
	return out
}

// Space returns where the bytes are.
func (r Reservation) Space() *tier.Space {
	if r.rec == nil {
		return nil
	}
	return r.rec.line.space
}

// Bytes returns how many bytes are promised, in use or not; 0 after Release.
func (r Reservation) Bytes() int64 {
	promised, _ := r.amounts()
	return promised
}

// Unused returns how many of the promised bytes are in no buffer; 0 after
// Release.
func (r Reservation) Unused() int64 {
	_, unused := r.amounts()
	return unused
}

func (r Reservation) amounts() (promised, unused int64) {
	rec := r.lock()
	if rec == nil {
		return 0, 0
	}
	defer rec.mu.Unlock()
	return rec.mu.promised, rec.unusedLocked()
}

// settings returns the options of r, and whether it is open.
func (r Reservation) settings() (o options, open bool) {
	rec := r.lock()
	if rec == nil {
		return options{}, false
	}
	defer rec.mu.Unlock()
	return rec.mu.options, true
}

// unusedLocked returns how many promised bytes are in no buffer. The space's ledger has them as
// reserved. It may have more, which a call has charged and not added to the promise yet.
func (r *record) unusedLocked() int64 {
	if r.mu.released {
		return 0
	}
	return max(0, r.mu.promised-r.mu.drawn)
}

// Alloc draws a buffer of size bytes in one piece, which the caller must release. It takes
// Space.Charge(size) bytes. If fewer are unused, the policy (LimitPolicy) decides, and a refusal is
// an ExceededError. In a lost space the error is a tier.LostError. Alloc does not wait for
// releases. If the free room is in pieces, it calls Config.Clear, which may evict batches. If that
// is not enough, it returns a tier.NoSpaceError with the length of the largest piece. After an
// error the reservation is as it was. A size of 0 gives a nil buffer.
func (r Reservation) Alloc(size int64) (*tier.Buffer, error) { return r.AllocCuts(size, nil) }

// AllocCuts is Alloc for memory that may be split at cuts: ascending multiples
// of tier.Page below size. Only host and disk memory is ever split.
func (r Reservation) AllocCuts(size int64, cuts []int64) (*tier.Buffer, error) {
	if r.rec == nil {
		return nil, errReleased("alloc")
	}
	return r.allocFor(size, cuts, &r.rec.account)
}

func (r Reservation) allocFor(size int64, cuts []int64, a *tier.Account) (*tier.Buffer, error) {
	b, err := r.tryAlloc(size, cuts, a)
	if err != nil && r.rec.line.m.config.Clear != nil && inPieces(err) {
		b, err = r.allocCleared(size, cuts, a, err)
	}
	if err != nil {
		if o, _ := r.settings(); o.memory != nil {
			return o.memory.again(r, size, err, func() (*tier.Buffer, error) { return r.tryAlloc(size, cuts, a) })
		}
	}
	return b, err
}

// inPieces reports whether an allocation failed because what is free lies in pieces.
func inPieces(err error) bool {
	var full *tier.NoSpaceError
	return errors.As(err, &full) && full.Largest > 0
}

// allocCleared calls Config.Clear for an allocation that failed with err because the free room is
// in pieces. Config.Clear evicts batches until the allocation succeeds.
func (r Reservation) allocCleared(size int64, cuts []int64, a *tier.Account, err error) (*tier.Buffer, error) {
	if o, open := r.settings(); !open || o.policy.asIs {
		return nil, err
	}
	lockrank.AssertNone("others are moved out of the way")
	var b *tier.Buffer
	r.rec.line.m.config.Clear(r.rec.line.space.ID(), func() bool {
		if err != nil { // also if it is called once more than it should be
			b, err = r.tryAlloc(size, cuts, a)
		}
		return !inPieces(err)
	})
	return b, err
}

// drawer has the methods of a Reservation that only this module's packages call. It is what the
// types inside of other packages are.
type drawer struct{ Reservation }

// Inside returns what only this module's packages do with a reservation.
func (r Reservation) Inside() drawer { return drawer{r} }

// IsOpen reports whether r has not been released.
func (r drawer) IsOpen() bool {
	_, open := r.settings()
	return open
}

// AllocFor is Alloc with the account that front returns. That account gets the credit for the
// buffer first, and may pass it on to the reservation's account, which front is given.
func (r drawer) AllocFor(size int64, front func(tier.Account) tier.Account) (*tier.Buffer, error) {
	if r.rec == nil {
		return nil, errReleased("alloc")
	}
	a := front(r.rec.account)
	return r.allocFor(size, nil, &a)
}

// StopClearing does for r from now on what WithoutClearing does for a new reservation. After
// Release it does nothing.
func (r drawer) StopClearing() {
	if rec := r.lock(); rec != nil {
		rec.mu.optioned, rec.mu.options.policy.asIs = true, true
		rec.mu.Unlock()
	}
}

func (r Reservation) tryAlloc(size int64, cuts []int64, a *tier.Account) (*tier.Buffer, error) {
	l := r.rec.line
	if size < 0 {
		return nil, fmt.Errorf("reservation: %s: cannot allocate %d bytes", l.space.ID(), size)
	}
	charge := l.charge(size)
	if charge == nothing {
		return nil, l.exceeded(size)
	}
	grown, err := r.draw(charge)
	if err != nil || size == 0 {
		return nil, err
	}
	b, err := l.space.Inside().DrawOf(size, cuts, a, r.gen)
	if err != nil {
		r.undraw(charge, grown)
		return nil, err
	}
	if grown > 0 {
		r.changed()
	}
	return b, nil
}

// Revive is Alloc of memory that a clean image in r's space already has. The caller has taken the
// clean image c; bufs are all its buffers. After an error they are still a clean image.
func (r drawer) Revive(c *copies.Copy, bufs []*tier.Buffer) error {
	if r.rec == nil {
		return errReleased("revive")
	}
	grown, err := r.draw(c.Bytes())
	if err != nil {
		return err
	}
	r.rec.line.space.Inside().Revive(c, bufs, &r.rec.account, r.gen)
	if grown > 0 {
		r.changed()
	}
	return nil
}

// draw moves charge bytes from unused to drawn. If fewer are unused, it charges the space for the
// rest where the policy allows that. It returns by how much the promise grew.
func (r Reservation) draw(charge int64) (grown int64, err error) {
	rec, space := r.rec, r.rec.line.space
	var extra int64 // charged beyond what was unused
	for {
		if r.lock() == nil {
			space.Inside().Unreserve(extra)
			return 0, errReleased("alloc")
		}
		policy := rec.mu.options.policy
		before := rec.unusedLocked()
		shortfall := charge - before - extra
		if shortfall <= 0 {
			if policy.kind == policyIncrease {
				rec.mu.promised += extra
				grown = extra
			}
			rec.mu.drawn += charge
			spare := before + extra - charge - rec.unusedLocked()
			rec.mu.Unlock()
			space.Inside().Unreserve(spare)
			return grown, nil
		}
		promised := rec.mu.promised
		rec.mu.Unlock()
		n, ok := rec.line.beyond(policy, shortfall)
		if !ok {
			space.Inside().Unreserve(extra)
			var err error
			if policy.kind != policyFail {
				err = rec.line.ask(shortfall).full()
			}
			return 0, &ExceededError{
				Space: space.ID(), Requested: charge, Available: before, Limit: promised,
				Hint: policy.hint(), Cause: err,
			}
		}
		extra += n
	}
}

// beyond charges the space for the shortfall of an allocation, if the policy allows it, and returns
// how much it charged.
func (l *line) beyond(p LimitPolicy, shortfall int64) (int64, bool) {
	switch p.kind {
	case policyIncrease:
		if n := size.Times(p.padding, shortfall); n > shortfall {
			if n, ok := l.ask(n).take(n, n); ok {
				return n, true
			}
		}
	case policyFail:
		return 0, false
	}
	return l.ask(shortfall).take(shortfall, shortfall)
}

// undraw is the reverse of draw.
func (r Reservation) undraw(charge, grown int64) {
	spare := charge
	if rec := r.lock(); rec != nil {
		before := rec.unusedLocked()
		rec.mu.drawn -= charge
		rec.mu.promised -= min(grown, rec.unusedLocked())
		spare -= rec.unusedLocked() - before
		rec.mu.Unlock()
	}
	r.Space().Inside().Unreserve(spare)
}

// creditor is a record as the tier.Account of its buffers, for all generations.
type creditor record

// Credit is called by the space when a buffer of generation gen, charged n bytes, was freed and its
// memory reclaimed. While that reservation is open, the bytes are unused again. If the reservation
// is overdrawn, they first make up for that, and return to the space. After Release Credit returns
// false, and all bytes are the space's.
func (a *creditor) Credit(gen uint64, n int64) bool {
	r := Reservation{(*record)(a), gen}.lock()
	if r == nil {
		return false
	}
	before := r.unusedLocked()
	r.mu.drawn -= n
	kept := r.unusedLocked() - before
	r.line.space.Inside().Recall(n) // under the lock, so that a Release finds it in the books
	r.mu.Unlock()
	r.line.space.Inside().Unreserve(n - kept)
	return true
}

// OwnerOf returns the name of the owner of the reservation with that generation, "" if it has none
// or was released, and whether the reservation is for a move (see Moving).
func (a *creditor) OwnerOf(gen uint64) (owner string, moves bool) {
	o, _ := Reservation{(*record)(a), gen}.settings()
	return o.owner.label(), o.policy.moves
}

// Grow promises n bytes more, rounded as the space charges them, and waits for
// them as Reserve does: in the reservation's own space, and last in line. An error leaves the
// reservation as it was. One that could never be so large is an ExceededError, also when that
// comes about while it waits. Two that grow may wait for each other: an owner gets a
// DeadlockError then; others have TryGrow and Release.
func (r Reservation) Grow(ctx context.Context, n int64) error { return r.grow(ctx, true, n) }

// TryGrow is Grow without waiting: no room now is a tier.NoSpaceError.
func (r Reservation) TryGrow(n int64) error { return r.grow(context.Background(), false, n) }

func (r Reservation) grow(ctx context.Context, wait bool, n int64) error {
	if r.rec == nil {
		return errReleased("grow")
	}
	rec, l := r.rec, r.rec.line
	if n < 0 {
		return fmt.Errorf("reservation: %s: cannot grow by %d bytes", l.space.ID(), n)
	}
	if ctx.Err() != nil {
		return ended(ctx, "not grown")
	}
	need := l.charge(n)
	if r.lock() == nil {
		return errReleased("grow")
	}
	promised := rec.mu.promised
	rec.mu.Unlock()
	if whole := l.charge(promised + n); need != nothing && whole != nothing {
		// Both together, drawn as one, may be charged more than each by itself.
		need = max(need, whole-l.charge(promised))
	}
	switch {
	case l.m.closed.Load():
		return closedError()
	case need == nothing:
		return l.exceeded(n)
	case need > l.space.Room()-promised:
		return l.exceeded(promised + need)
	}
	charged, ok := l.ask(need).take(n, n)
	if !ok && !wait {
		return l.ask(need).full()
	}
	if !ok {
		var err error
		if charged, err = r.waitToGrow(ctx, n, slot{line: l, need: need, held: promised}); err != nil {
			return err
		}
	}
	if r.lock() == nil {
		l.space.Inside().Unreserve(charged)
		return errReleased("grow")
	}
	before := rec.unusedLocked()
	rec.mu.promised += charged
	spare := charged - (rec.unusedLocked() - before) // an overdraft was charged before
	rec.mu.Unlock()
	l.space.Inside().Unreserve(spare)
	r.changed()
	return nil
}

// changed notes that the promise is another: for its owner, and for the Grow calls that
// wait.
func (r Reservation) changed() {
	r.Owner().changed()
	r.tellGrowing()
}

// tellGrowing notifies the waiting Grow calls that the promise has changed. Of two simultaneous
// calls, the last one passes on the final promise.
func (r Reservation) tellGrowing() {
	rec := r.rec
	for told := int64(-1); ; {
		rec.mu.Lock()
		if rec.goneLocked(r.gen) { // the next reservation may be using the record
			rec.mu.Unlock()
			return
		}
		promised, growing := rec.mu.promised, slices.Clone(rec.mu.growing)
		rec.mu.Unlock()
		if len(growing) == 0 || promised == told {
			return
		}
		rec.line.m.setHeld(growing, promised)
		told = promised
	}
}

// waitToGrow waits in line, until Release at the latest.
func (r Reservation) waitToGrow(ctx context.Context, n int64, s slot) (int64, error) {
	rec := r.rec
	w := newWaiter([]slot{s}, n, n)
	if r.lock() == nil {
		return 0, errReleased("grow")
	}
	owner := rec.mu.options.owner
	w.first().held = rec.mu.promised // which another Grow may have changed just now
	rec.mu.growing = append(rec.mu.growing, w)
	rec.mu.Unlock()
	_, charged, err := rec.line.m.wait(ctx, w, owner)
	rec.mu.Lock() // w is not there if r was released, even if rec is in use again
	rec.mu.growing = slices.DeleteFunc(rec.mu.growing, func(o *waiter) bool { return o == w })
	rec.mu.Unlock()
	return charged, err
}

// Shrink gives n unused bytes back. More than are unused is an ExceededError
// and changes nothing.
func (r Reservation) Shrink(n int64) error {
	if r.rec == nil {
		return errReleased("shrink")
	}
	rec, space := r.rec, r.rec.line.space
	if n < 0 {
		return fmt.Errorf("reservation: %s: cannot shrink by %d bytes", space.ID(), n)
	}
	if r.lock() == nil {
		return errReleased("shrink")
	}
	unused, promised := rec.unusedLocked(), rec.mu.promised
	ok := n <= unused
	if ok {
		rec.mu.promised -= n
	}
	rec.mu.Unlock()
	if !ok {
		return &ExceededError{
			Space: space.ID(), Requested: n, Available: unused, Limit: promised,
			Hint: "only what is in no buffer can be given back",
		}
	}
	space.Inside().Unreserve(n)
	r.changed()
	return nil
}

// Release gives the promise up: what is unused returns to the space at once,
// and what is in buffers when they are freed. Grow calls that wait end with
// tier.ErrReleased. A second release, also of a copy, changes nothing and returns
// tier.ErrReleased (an invariants build panics with the stack that took the
// reservation). Release of the zero Reservation does nothing.
func (r Reservation) Release() error {
	if r.rec == nil {
		return nil
	}
	rec, line := r.rec, r.rec.line
	rec.mu.Lock()
	if rec.goneLocked(r.gen) {
		rec.mu.Unlock()
		if invariants.Enabled {
			stack := rec.mu.stack // the record is not used again
			panic("reservation: released twice; it was taken at\n" + stack.String())
		}
		return tier.ErrReleased
	}
	unused, growing, promised, owner := rec.unusedLocked(), rec.mu.growing, rec.mu.promised, rec.mu.options.owner
	rec.mu.released, rec.mu.growing = true, nil
	if rec.mu.optioned {
		line.arriving.Add(-rec.mu.arriving)
		rec.mu.optioned, rec.mu.options, rec.mu.arriving = false, options{}, 0
	}
	rec.mu.gen++
	rec.mu.Unlock()
	if invariants.Enabled {
		line.m.open.Delete(r)
	}
	owner.closed(r, promised)
	line.space.Inside().UnreserveAt(rec.at, unused)
	for _, w := range growing {
		line.m.withdraw(w, errReleased("grow"))
	}
	rec.recycle()
	return nil
}

func errReleased(op string) error { return fmt.Errorf("reservation: %s: %w", op, tier.ErrReleased) }
