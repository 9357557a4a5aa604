package tier

import (
	"fmt"
	"math"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/stripe"
)

// inside has the methods of a Space that only this module's packages call. Callers keep the rules
// that its methods name.
type inside struct{ *Space }

// Inside returns what only this module's packages do with a space. Programs have no use for it.
func (s *Space) Inside() inside { return inside{s} }

// Hint names the setting that would make the space larger, for error messages; it may
// be empty.
func (in inside) Hint() string { return in.cfg.Hint }

// Pace returns how far a volume is ahead of the others that are written side by side with it; see
// stripe.Pace. Other spaces have the zero Pace. Reserved bytes count as if they were being written.
func (in inside) Pace() stripe.Pace {
	if in.paced == nil {
		return stripe.Pace{}
	}
	return in.paced.Pace().After(in.ledger.Snapshot().Reserved)
}

// Shared reports whether the space has a quota, which others may share.
func (in inside) Shared() bool { return in.cfg.Quota != nil }

// Hold marks n of the used bytes as used for as long as the space is open: the engine's own, such
// as the staging chunks. They count as used like any others, and Room does not include them.
func (in inside) Hold(n int64) { in.held.Add(n) }

// HoldBuffer is Hold for the bytes of a buffer that the caller has just drawn. The reservation that
// it was drawn from must be released.
func (in inside) HoldBuffer(b *Buffer) {
	in.mu.Lock()
	b.account = &itsOwn
	in.mu.Unlock()
	in.Hold(b.charge)
}

// itsOwn is the account of the buffers that HoldBuffer was called for: it takes no bytes back.
var itsOwn Account = nobody{}

type nobody struct{}

func (nobody) Credit(uint64, int64) bool { return false }

// Held returns how many bytes are used for as long as the space is open; see Hold and Unsure.
// Room()+Held() is how many may be used at once.
func (in inside) Held() int64 { return in.held.Load() + in.Unsure() }

// Unsure returns how many of the retired bytes stay retired for as long as the space is open,
// because the pool cannot find out whether the device has freed them.
func (in inside) Unsure() int64 {
	if p, ok := in.cfg.Pool.(interface{ Unsure() int64 }); ok {
		return p.Unsure()
	}
	return 0
}

// CountRetired makes n count the bytes that are retired from now on until the next call of
// CountRetired. When the memory of a buffer in n is reclaimed, n falls again, even after that call.
// So the caller learns how old the retired bytes are.
func (in inside) CountRetired(n *atomic.Int64) { in.fresh.Store(n) }

// TryReserveAt is Reserve for a reservation.Manager. It prefers bytes that UnreserveAt parked with
// the same at, which may be any number. n must not be negative. It reports whether the bytes were
// reserved.
func (in inside) TryReserveAt(at uint32, n int64) bool {
	if in.cfg.Quota != nil {
		return in.Reserve(n) == nil
	}
	if !in.ledger.ReserveAt(at, n, in.Limit()) {
		return false
	}
	in.tellPressure()
	return true
}

// UnreserveAt is Unreserve for a reservation.Manager. While nobody attends the space (Attend) and
// it is far from full, it may park the bytes for the next TryReserveAt with the same number, and
// then does not call the listeners. A request for room, or a query of what is used, takes parked
// bytes back.
func (in inside) UnreserveAt(at uint32, n int64) { in.unreserveAt(at, n, in.parkBelow) }

// Attend stops parking while there are waiters for room: parked bytes are free from now on, and
// each release calls the listeners. The caller must call EndAttend once.
func (in inside) Attend() { in.ledger.Attend(1) }

// EndAttend ends what Attend began.
func (in inside) EndAttend() { in.ledger.Attend(-1) }

// Subscribers returns how many subscriptions there are: what each change costs, in calls.
func (in inside) Subscribers() int {
	if ls := in.listeners.Load(); ls != nil {
		return len(*ls)
	}
	return 0
}

// Occupy promises n bytes for memory of the pool's that was in use before the space was
// made: files that outlived a process. The limit does not count, because the bytes are
// there; more than the capacity is a NoSpaceError. The caller must either Adopt or
// Unreserve every byte.
func (in inside) Occupy(n int64) error {
	if n < 0 {
		panic(fmt.Sprintf("tier: %s: cannot occupy %d bytes", in.cfg.ID, n))
	}
	if err := in.Lost(); err != nil {
		return err
	}
	if n == 0 { // which a quota may refuse to charge
		return nil
	}
	if in.cfg.Quota != nil {
		if err := in.cfg.Quota.Charge(n); err != nil {
			return in.refusal(n, err)
		}
	}
	if !in.ledger.Reserve(n, in.cfg.Capacity) {
		if in.cfg.Quota != nil {
			in.cfg.Quota.Credit(n)
		}
		return in.refusal(n, nil)
	}
	in.tellPressure()
	return nil
}

// Adopt is Draw for memory that the pool has handed out already, or that is lent, for
// which the caller holds Charge(mem.Size()) promised bytes. The buffer frees it as its own.
func (in inside) Adopt(mem Memory, account Account) *Buffer {
	charge := in.Charge(mem.Size())
	in.ledger.Draw(charge)
	b := &Buffer{space: in.Space, mem: mem, charge: charge, account: keptOf(account), stack: invariants.Stack()}
	in.list(b)
	return b
}

// Recall turns n retired bytes into reserved ones. Only an Account calls it, in Credit, to keep the
// bytes.
func (in inside) Recall(n int64) { in.ledger.Recall(n) }

// SetForeign records how many bytes others hold on the device, as sampled. Listeners are called if
// that presses the space, or if it is less than before. ForeignOn documents the number.
func (in inside) SetForeign(n int64) {
	n = min(max(0, n), math.MaxInt64-in.cfg.Capacity) // so that the pressure is a number
	old := in.foreign.Swap(n)
	switch {
	case old > n:
		in.notify(released)
	case old < n:
		in.ledger.LimitsChanged() // what may be parked, that is
		if in.PressureBytes() >= in.Trigger() {
			in.notify(pressed)
		}
	}
}

// ForeignOn returns how many bytes of the space's capacity others hold on dev, the device
// that the space is on: other processes, other libraries of this one, and other spaces on
// the same device. It is what is neither free nor in the space's own books. What the device
// keeps of freed memory counts as free, and memory of others that the space has adopted
// as its own. If the device is larger than the space, others may fill the rest
// of it first.
//
// Decorators are looked through, because the limits that they make are not foreign bytes.
// ok is false if that cannot be said now: the space is lost, the device does not answer, or
// the space's books change all the time. The call may take as long as the device's driver
// does; it must be made with no lock held.
func (in inside) ForeignOn(dev Device) (bytes int64, ok bool) {
	for d := range layers(dev) {
		dev = d // the innermost
	}
	for range 4 {
		before := in.Usage()
		free, known := freeOn(dev)
		after := in.Usage()
		if in.Lost() != nil || !known {
			return 0, false
		}
		if before.Live == after.Live && before.Retired == after.Retired {
			return max(0, in.cfg.Capacity-after.Live-after.Retired-free), true
		}
	}
	return 0, false
}

func freeOn(dev Device) (bytes int64, known bool) {
	// Of a device that may fail to find out, FreeBytes says so.
	if t, ok := dev.(interface{ FreeBytes() (int64, error) }); ok {
		free, err := t.FreeBytes()
		return free, err == nil
	}
	free, total := dev.MemInfo()
	return free, total > 0
}

// paced is what a Pool implements that is one of several which are written side by
// side, each as fast as it can: a spill volume. What goes to any of them goes to
// the one whose stripe.Pace is the least. A paced is safe for concurrent use.
type paced interface {
	Pace() stripe.Pace
	// Promised is called before each Alloc with how many bytes of the space are promised and not
	// drawn. inside.Pace counts them, and so must a caller that checks whether the pool was
	// skipped.
	Promised(n int64)
}

// splitter is what a Pool implements that can make several memories of one: a spill volume.
type splitter interface {
	Together() int64
	Split(m Memory, sizes []int64) []Memory
}

// Together returns how many bytes are best drawn as one buffer now, to be written at once and then
// split; 0 where buffers cannot be.
func (in inside) Together() int64 {
	if pool, ok := in.cfg.Pool.(splitter); ok {
		return pool.Together()
	}
	return 0
}

// Split makes several buffers of b, with the bytes that are in it: of so many bytes each, in order,
// which are whole pages and add up to all of it. They are charged together what b is. Only the
// caller may know of b, which is gone then. Where the pool cannot, Split returns nil, and b is as
// it was.
func (in inside) Split(b *Buffer, sizes []int64) []*Buffer {
	mems := in.cfg.Pool.(splitter).Split(b.mem, sizes)
	if mems == nil {
		return nil
	}
	b.holders.Store(0)
	parts := make([]*Buffer, len(mems))
	for i, mem := range mems {
		p := &Buffer{space: in.Space, mem: mem, charge: sizes[i], account: b.account, of: b.of, stack: b.stack}
		p.holders.Store(owned)
		parts[i] = p
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	delete(in.mu.buffers, b)
	for _, p := range parts {
		in.mu.buffers[p] = struct{}{}
	}
	return parts
}
