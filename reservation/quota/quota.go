// Package quota limits how much GPU memory a process, or a group of processes on a node, takes by
// Spillway. A Budget limits what is allocated through some devices.
//
//	environment ─▶ Settings ─▶ Quota ──┐
//	program     ─┘                     ├─▶ Under ─▶ tier.Space charges them for
//	other processes ◀─ ledger ─▶ Lease ┘   │        each byte that it promises
//	                                       ▼
//	                                  a backend's device
//
// A [Quota] is one number over all GPU spaces of a process. A [Lease] is a process's part in a
// ledger that all processes of a node share for one GPU. Both are a tier.Quota: the check and the
// charge are one step, made when bytes are reserved, so that a device never gets a request that
// would be refused. Bytes above a limit that was lowered stay charged until the monitor has moved
// batches down.
//
// A quota limits only bytes that are reserved through Spillway. It does not limit other libraries
// in the same process and other programs on the same GPU: their bytes are the external bytes of a
// space.
//
// # The ledger
//
// A ledger is a directory with one directory for each GPU. There each process has a file, the
// lease, that it keeps locked while it lives. There is no daemon: the kernel releases the lock when
// the process ends in any way, and an unlocked lease counts for nothing. Three rules hold over all
// live processes:
//
//   - the quotas of all groups together are no more than what is advertised of the GPU:
//     its memory times the oversubscription ratio,
//   - the processes of a group together hold no more than the group's quota,
//   - all processes together hold no more than the GPU has. Batches that do not fit are spilled.
//
// Processes count in grains of a 64th of their quota, at most 64 MiB. Each process may have one
// grain counted that it does not use. Most charges stay within a process's grains and take no
// system call. One that takes a grain locks the directory for a moment and reads the leases of all.
//
// The files must not be changed while processes use them. If one is removed, its process
// notices when it next looks at the ledger, warns, and creates another. Until then other processes
// do not count its bytes. A process that may write to the directory can break the rules. So a
// ledger is for one user's processes, which trust each other, or for the users that reach a ledger
// that root has created for all users. Containers share it as a mount.
//
// # Ownership
//
// A Quota has nothing to close; an engine closes its leases. A device that Under returns belongs to
// its creator. Closing it closes the wrapped device.
//
// # Locks
//
// The mutexes of quotas and leases have the rank Backend. With one locked, subscribers are not
// called, and files are not used.
//
//	… → Reservation → Space → Backend
//
// # Budgets
//
// A Budget decorates devices. It sets one byte limit for everything that is allocated
// through any number of devices, and Logged logs what is allocated and freed on a device.
//
//	engine ─▶ Device ──┐                        ┌── Device ◀─ another engine, a program
//	          │ inner  └─▶ Budget: limit,     ◀─┘    │ inner
//	          ▼            reserved, peak            ▼
//	          Logged device                          a backend's device
//	          │ inner
//	          ▼
//	          a backend's device
//
// Both decorators are devices themselves, have a method Unwrap, and stack in any order over any
// device. A budget over a logged device logs the calls that the budget lets through. A logged
// device over a budget also logs the calls that the budget refuses.
//
// A budget reserves what the device charges for an allocation before it calls the device, in one
// step with the check against the limit. It rolls the reservation back if the call fails or panics.
// While no call is in progress,
//
//	reserved = live + retired
//
// Freed bytes are retired until the device is done with them. Free records an event after each
// free, and Reap credits the frees whose event is done. Reap queries the events, then reaps the
// device, and then credits. So a device that only takes memory back when it is reaped has done so
// before the bytes are credited. A request that does not fit reaps the devices of the budget and
// tries once more.
//
// If the device refuses to record an event, the next event after a free on that stream counts, or
// that nothing is outstanding on the device.
//
// The limit counts only what is allocated through the devices that Wrap returns. Bytes that were on
// a device before, or that others allocate on it, are not charged; they cannot be freed through the
// budget either. Each call of Wrap returns a device that counts by itself.
//
// # Spaces over a device
//
// A tier.Space over the device charges its reservations to the budget (tier.QuotaOf). So other
// users of the budget cannot take what the space has promised, and the space's waiters wake when
// others give bytes back. Promised bytes are charged once: the device charges the larger of what is
// promised and what is allocated through it.
//
// A program that allocates through the same device as a space uses up the space's promises,
// and later draws from them are refused. It should call Wrap for a device of its own, or reserve in
// the space. On devices without a space, asynchronous frees are credited at the next reap or free,
// or when a request does not fit, because a budget has no goroutine.
//
// A caller that owns a wrapped device closes the wrapper, and with it the device. Closing credits
// what was charged. Neither a Budget nor a wrapper has a goroutine, so nothing else needs closing.
//
// A budget has one mutex, of rank lockrank.Space because the mutex of its quota, of rank Backend,
// is locked under it. It is never held while a device, an event, a logger or a subscriber is
// called.
package quota

import (
	"cmp"
	"fmt"

	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// Quota is one limit over the GPU memory of a process: over all spaces whose devices have a Member
// of it. It is safe for concurrent use, has no goroutine, and need not be closed.
type Quota struct {
	subscribers guard.List[*Over] // see unlock

	mu    lockrank.Mutex[lockrank.Backend] // guards the fields below
	stats Stats
	over  bool // the limit was lowered below the bytes in use, which have not been within it since
}

// Over reports that more is in use than the limit allows, because the limit was lowered. There is
// one report until use has been within the limit again.
type Over struct {
	Quota string // its name
	Used  int64  // bytes charged, by all that share it
	Limit int64  // bytes that may be charged
}

// Config describes a Quota. Limit is required.
type Config struct {
	Limit int64  // bytes, above 0
	Name  string // for errors, such as the setting that has the limit; empty is a general one
}

// New returns a quota.
func New(cfg Config) (*Quota, error) {
	q := &Quota{stats: Stats{Name: cmp.Or(cfg.Name, "the GPU memory quota")}}
	return q, q.SetLimit(cfg.Limit)
}

// SetLimit changes the limit to n > 0 bytes. It revokes nothing: a limit below the bytes in use
// refuses new charges, and monitors move down the excess.
func (q *Quota) SetLimit(n int64) error {
	if n <= 0 {
		return fmt.Errorf("quota: a limit of %d bytes: it must be above 0", n)
	}
	q.mu.Lock()
	q.stats.Limit = n
	q.unlock()
	return nil
}

// unlock unlocks mu after a credit or a change of the limit, and calls the subscribers. They get an
// Over if use is above the limit, once for each time that this happens, and else nil.
func (q *Quota) unlock() {
	var over *Over
	exceeds := q.stats.Used > q.stats.Limit
	if exceeds && !q.over {
		over = &Over{Quota: q.stats.Name, Used: q.stats.Used, Limit: q.stats.Limit}
	}
	q.over = exceeds
	q.mu.Unlock()
	q.subscribers.Call("a subscriber of a quota", over)
}

// OnOver calls f whenever more is in use than the limit allows, until cancel is called. The
// goroutine that lowered the limit calls f, and holds no lock. An engine emits events.QuotaExceeded
// for its quota; programs need OnOver only without an engine.
func (q *Quota) OnOver(f func(Over)) (cancel func()) {
	return q.subscribers.Add(func(o *Over) {
		if o != nil {
			f(*o)
		}
	})
}

// Stats are a quota's numbers, in bytes.
type Stats struct {
	Name  string `json:"name"`  // what errors call it
	Limit int64  `json:"limit"` // how much may be charged
	Used  int64  `json:"used"`
	Peak  int64  `json:"peak"` // largest Used so far
}

// Stats returns the numbers, all of the same moment.
func (q *Quota) Stats() Stats {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.stats
}

// Member returns a quota that charges q and counts how much of it is its own: each space should
// have one. When a limit is lowered below the bytes in use, a member's Remaining returns its share
// of the excess.
func (q *Quota) Member() tier.Quota { return &member{Quota: q} }

type member struct {
	*Quota
	own int64 // bytes charged by this member; guarded by mu
}

// Charge implements tier.Quota.
func (m *member) Charge(n int64) error {
	if n <= 0 {
		return fmt.Errorf("quota: cannot charge %d bytes", n)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	s := &m.stats
	if left := max(0, s.Limit-s.Used); n > left {
		return &tier.OutOfBudgetError{
			Budget: s.Name, Requested: n, Remaining: left, Current: s.Used, Limit: s.Limit,
		}
	}
	m.own += n
	s.Used += n
	s.Peak = max(s.Peak, s.Used)
	return nil
}

// Credit implements tier.Quota.
func (m *member) Credit(n int64) {
	m.mu.Lock()
	if n > m.stats.Used {
		m.mu.Unlock()
		panic(fmt.Sprintf("quota: %d bytes were credited to %s that were not charged", n, m.stats.Name))
	}
	m.own -= n
	m.stats.Used -= n
	m.unlock()
}

// Remaining implements tier.Quota.
func (m *member) Remaining() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return books.Left(m.stats.Limit, m.stats.Used, m.own)
}

// Limit implements tier.Quota.
func (m *member) Limit() int64 { return m.Stats().Limit }

// Subscribe implements tier.Quota.
func (m *member) Subscribe(f func()) (cancel func()) {
	return m.subscribers.Add(func(*Over) { f() })
}

// device is a device under quotas.
type device struct {
	tier.Device
	quota tier.Quota
}

// Under returns dev under all of those quotas. A tier.Space over it charges them for each byte that
// it promises, before it allocates. MemInfo shows the least of what the quotas allow and of what
// the device has. All else is the device's own. It counts nothing by itself: allocations that are
// made through it without a space are not limited. Under no quota the device is dev itself.
func Under(dev tier.Device, quotas ...tier.Quota) tier.Device {
	if q := tier.Quotas(quotas...); q != nil {
		return &device{dev, q}
	}
	return dev
}

// Unwrap returns the device that is under the quotas.
func (d *device) Unwrap() tier.Device { return d.Device }

// Quota implements tier.Limited.
func (d *device) Quota() tier.Quota { return d.quota }

// MemInfo implements tier.Device.
func (d *device) MemInfo() (free, total int64, err error) {
	free, total, err = d.Device.MemInfo()
	return min(free, max(0, d.quota.Remaining())), min(total, d.quota.Limit()), err
}

// Lease is a process's part in the ledger of a node, for one GPU. An engine joins the ledger and
// closes the lease. Methods may be called at any time. Sizes are in bytes.
type Lease interface {
	Live() int64      // what this process holds
	Remaining() int64 // what is left for it; below 0 while its group holds more than a lowered limit
	Limit() int64     // the group's quota, and no more than the GPU has
	// SetLimit changes the group's quota to n > 0 bytes as this process asks for it; the smallest
	// quota that one of the group's processes asks for counts. It takes back nothing. The quotas of
	// all groups must stay within what is advertised.
	SetLimit(n int64) error
	Lost() int64 // how often this process's file was removed from the ledger while the process used it
}
