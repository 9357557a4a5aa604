package reservation

import (
	"context"
	"fmt"
	"slices"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// Reservation is a promise of bytes in one space, from which buffers are drawn.
// It belongs to whom Reserve gave it, who must Release it once. Its bytes are
// charged to the space from the start: they are either unused or in buffers that
// were drawn from it, and a buffer that is freed makes them unused again. It is
// safe for concurrent use, and buffers may be freed from any goroutine.
type Reservation struct {
	line   *line
	policy LimitPolicy
	owner  *Owner      // or nil
	memory *memoryHook // or nil
	stack  string      // where it was taken; only in an invariants build

	mu struct {
		lockrank.Mutex[lockrank.Reservation] // never held with the manager's, which has the same rank
		promised                             int64
		drawn                                int64 // charged to buffers that are not reclaimed yet; with Ignore it may be above promised
		released                             bool
		growing                              []*waiter // Grow calls that wait
	}
}

func newReservation(l *line, bytes int64, o options) *Reservation {
	r := &Reservation{line: l, policy: o.policy, owner: o.owner, memory: o.memory, stack: invariants.Stack()}
	r.mu.promised = bytes
	if invariants.Enabled {
		l.m.open.Store(r, struct{}{})
	}
	r.owner.opened(r)
	return r
}

// Leaks lists what is promised and not released, for the report of an engine that
// is closed: one entry a space, or in an invariants build one a reservation with
// the stack that took it.
func (m *Manager) Leaks() []tier.Leak {
	var out []tier.Leak
	if invariants.Enabled {
		m.open.Range(func(k, _ any) bool {
			r := k.(*Reservation)
			if n := r.Unused(); n > 0 {
				out = append(out, tier.Leak{Space: r.Space().ID(), Bytes: n, Stack: r.stack})
			}
			return true
		})
		return out
	}
	for _, s := range m.spaces.all {
		if n := s.Usage().Reserved; n > 0 {
			out = append(out, tier.Leak{Space: s.ID(), Bytes: n})
		}
	}
	return out
}

// Space returns where the bytes are.
func (r *Reservation) Space() *tier.Space { return r.line.space }

// Bytes returns how many bytes are promised, in use or not; 0 after Release.
func (r *Reservation) Bytes() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.released {
		return 0
	}
	return r.mu.promised
}

// Unused returns how many of the promised bytes are in no buffer; 0 after
// Release.
func (r *Reservation) Unused() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.unusedLocked()
}

// unusedLocked is what the space's books have as reserved for r, but for what a
// call has charged and not settled yet.
func (r *Reservation) unusedLocked() int64 {
	if r.mu.released {
		return 0
	}
	return max(0, r.mu.promised-r.mu.drawn)
}

// Alloc draws a buffer of size bytes in one piece. The caller must release it,
// before or after the reservation. What it takes is Space.Charge(size); if that is
// more than what is unused, the policy decides, and a refusal is an ExceededError.
// It never waits. On an error the reservation is as it was. A size of 0 gives a
// nil buffer.
func (r *Reservation) Alloc(size int64) (*tier.Buffer, error) { return r.AllocCuts(size, nil) }

// AllocCuts is Alloc for memory that may be split at cuts: ascending multiples
// of tier.Page below size. Only host and disk memory is ever split.
func (r *Reservation) AllocCuts(size int64, cuts []int64) (*tier.Buffer, error) {
	return r.allocFor(size, cuts, (*account)(r))
}

// allocFor is AllocCuts with another account in front of the reservation's.
func (r *Reservation) allocFor(size int64, cuts []int64, a tier.Account) (*tier.Buffer, error) {
	if r == nil {
		return nil, errReleased("alloc")
	}
	b, err := r.tryAlloc(size, cuts, a)
	if err != nil && r.memory != nil {
		return r.memory.again(r, size, err, func() (*tier.Buffer, error) { return r.tryAlloc(size, cuts, a) })
	}
	return b, err
}

func (r *Reservation) tryAlloc(size int64, cuts []int64, a tier.Account) (*tier.Buffer, error) {
	if size < 0 {
		return nil, fmt.Errorf("reservation: %s: cannot allocate %d bytes", r.line.space.ID(), size)
	}
	charge := r.line.charge(size)
	if charge == nothing {
		return nil, r.line.exceeded(size)
	}
	grown, err := r.draw(charge)
	if err != nil || size == 0 {
		return nil, err
	}
	b, err := r.line.space.Draw(size, cuts, a)
	if err != nil {
		r.undraw(charge, grown)
		return nil, err
	}
	return b, nil
}

// draw moves charge bytes from unused to drawn, and makes them so that many are
// there if the policy says so. It returns by how much the promise grew.
func (r *Reservation) draw(charge int64) (grown int64, err error) {
	space := r.line.space
	var extra int64 // charged beyond what was unused
	for {
		r.mu.Lock()
		if r.mu.released {
			r.mu.Unlock()
			space.Unreserve(extra)
			return 0, errReleased("alloc")
		}
		before := r.unusedLocked()
		shortfall := charge - before - extra
		if shortfall <= 0 {
			if r.policy.kind == policyIncrease {
				r.mu.promised += extra
				grown = extra
			}
			r.mu.drawn += charge
			spare := before + extra - charge - r.unusedLocked()
			r.mu.Unlock()
			space.Unreserve(spare)
			return grown, nil
		}
		promised := r.mu.promised
		r.mu.Unlock()
		n, ok := r.beyond(shortfall)
		if !ok {
			space.Unreserve(extra)
			var err error
			if r.policy.kind != policyFail {
				err = r.line.full(shortfall)
			}
			return 0, &ExceededError{
				Space: space.ID(), Requested: charge, Available: before, Limit: promised,
				Hint: r.policy.hint(), Cause: err,
			}
		}
		extra += n
	}
}

// beyond charges the space for what an allocation lacks, as the policy says.
func (r *Reservation) beyond(shortfall int64) (int64, bool) {
	switch r.policy.kind {
	case policyIncrease:
		if n := r.policy.padded(shortfall); n > shortfall {
			if n, ok := r.line.take(n, n, n); ok {
				return n, true
			}
		}
	case policyFail:
		return 0, false
	}
	return r.line.take(shortfall, shortfall, shortfall)
}

// undraw is the reverse of draw.
func (r *Reservation) undraw(charge, grown int64) {
	r.mu.Lock()
	before := r.unusedLocked()
	r.mu.drawn -= charge
	r.mu.promised -= min(grown, r.unusedLocked())
	spare := charge - (r.unusedLocked() - before)
	r.mu.Unlock()
	r.line.space.Unreserve(spare)
}

// account is the Reservation as the tier.Account of its buffers.
type account Reservation

// Credit takes n bytes back that a buffer was charged and that are reclaimed. A
// promise that was overdrawn gives the space its part first. After Release all
// of it is the space's.
func (a *account) Credit(n int64) bool {
	r := (*Reservation)(a)
	r.mu.Lock()
	before := r.unusedLocked()
	r.mu.drawn -= n
	if r.mu.released {
		r.mu.Unlock()
		return false
	}
	kept := r.unusedLocked() - before
	r.line.space.Recall(n) // under the lock, so that a Release finds it in the books
	r.mu.Unlock()
	r.line.space.Unreserve(n - kept)
	return true
}

// Grow promises n bytes more, rounded as the space charges them, and waits for
// them as Reserve does: in the reservation's own space, and last in line. An error
// leaves the reservation as it was; one that could never be so large is an
// ExceededError. Who holds bytes while waiting for more may wait for somebody who
// does the same: an owner is told of that with a DeadlockError; others have TryGrow
// and Release.
func (r *Reservation) Grow(ctx context.Context, n int64) error { return r.grow(ctx, true, n) }

// TryGrow is Grow for those who do not wait: no room now is a
// tier.NoSpaceError. On a nil reservation it is tier.ErrReleased.
func (r *Reservation) TryGrow(n int64) error { return r.grow(context.Background(), false, n) }

func (r *Reservation) grow(ctx context.Context, wait bool, n int64) error {
	if r == nil {
		return errReleased("grow")
	}
	l := r.line
	if n < 0 {
		return fmt.Errorf("reservation: %s: cannot grow by %d bytes", l.space.ID(), n)
	}
	if ctx.Err() != nil {
		return ended(ctx, "not grown")
	}
	need := l.charge(n)
	r.mu.Lock()
	released, promised := r.mu.released, r.mu.promised
	r.mu.Unlock()
	if whole := l.charge(promised + n); need != nothing && whole != nothing {
		// Both together, drawn as one, may be charged more than each by itself.
		need = max(need, whole-l.charge(promised))
	}
	switch {
	case released:
		return errReleased("grow")
	case l.m.closed.Load():
		return closedError()
	case need == nothing:
		return l.exceeded(n)
	case need > l.space.Room()-promised:
		return l.exceeded(promised + need)
	}
	charged, ok := l.take(need, n, n)
	if !ok && !wait {
		return l.full(need)
	}
	if !ok {
		var err error
		if charged, err = r.waitToGrow(ctx, n, slot{line: l, need: need, held: promised}); err != nil {
			return err
		}
	}
	r.mu.Lock()
	before := r.unusedLocked()
	released = r.mu.released
	if !released {
		r.mu.promised += charged
	}
	spare := charged - (r.unusedLocked() - before) // an overdraft was charged before
	r.mu.Unlock()
	l.space.Unreserve(spare)
	if released {
		return errReleased("grow")
	}
	return nil
}

// waitToGrow waits in line, until Release at the latest.
func (r *Reservation) waitToGrow(ctx context.Context, n int64, s slot) (int64, error) {
	w := newWaiter([]slot{s}, n, n)
	r.mu.Lock()
	if r.mu.released {
		r.mu.Unlock()
		return 0, errReleased("grow")
	}
	r.mu.growing = append(r.mu.growing, w)
	r.mu.Unlock()
	_, charged, err := r.line.m.waitOf(ctx, w, r.owner)
	r.mu.Lock()
	r.mu.growing = slices.DeleteFunc(r.mu.growing, func(o *waiter) bool { return o == w })
	r.mu.Unlock()
	return charged, err
}

// Shrink gives n unused bytes back. More than are unused is an ExceededError
// and changes nothing.
func (r *Reservation) Shrink(n int64) error {
	if r == nil {
		return errReleased("shrink")
	}
	if n < 0 {
		return fmt.Errorf("reservation: %s: cannot shrink by %d bytes", r.line.space.ID(), n)
	}
	r.mu.Lock()
	unused, promised, released := r.unusedLocked(), r.mu.promised, r.mu.released
	ok := !released && n <= unused
	if ok {
		r.mu.promised -= n
	}
	r.mu.Unlock()
	switch {
	case released:
		return errReleased("shrink")
	case !ok:
		return &ExceededError{
			Space: r.line.space.ID(), Requested: n, Available: unused, Limit: promised,
			Hint: "only what is in no buffer can be given back",
		}
	}
	r.line.space.Unreserve(n)
	return nil
}

// Release gives the promise up: what is unused returns to the space at once,
// and what is in buffers when they are freed. Grow calls that wait end with
// tier.ErrReleased. A second release changes nothing and returns
// tier.ErrReleased (an invariants build panics with the stack that took the
// reservation). Release of a nil reservation does nothing.
func (r *Reservation) Release() error {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	if r.mu.released {
		r.mu.Unlock()
		if invariants.Enabled {
			panic("reservation: released twice; it was taken at\n" + r.stack)
		}
		return tier.ErrReleased
	}
	unused, growing, promised := r.unusedLocked(), r.mu.growing, r.mu.promised
	r.mu.released, r.mu.growing = true, nil
	r.mu.Unlock()
	if invariants.Enabled {
		r.line.m.open.Delete(r)
	}
	r.owner.closed(r, promised)
	r.line.space.Unreserve(unused)
	for _, w := range growing {
		r.line.m.withdraw(w, errReleased("grow"))
	}
	return nil
}

func errReleased(op string) error { return fmt.Errorf("reservation: %s: %w", op, tier.ErrReleased) }

// over says whether r was released.
func (r *Reservation) over() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mu.released
}
