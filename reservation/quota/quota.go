// Package quota limits how much GPU memory a process, or a group of processes on a
// node, takes by Spillway.
//
//	environment ─▶ Settings ─▶ Quota ──┐
//	program     ─┘                     ├─▶ Device ─▶ tier.Space charges them for
//	other processes ◀─ Ledger ─▶ Lease ┘   │         each byte that it promises
//	                                       ▼
//	                                  a backend's device
//
// A [Quota] is one number over all GPU spaces of a process. A lease is a process's part
// in a ledger that all processes of a node share for one GPU. Both implement tier.Quota:
// the check and the charge are one step, made when bytes are reserved, so that a device
// is never asked for what would be refused. What is above a limit that was lowered stays
// where it is until the monitor has moved it down.
//
// Only what is reserved through Spillway is limited. Other libraries in the same process,
// and other programs on the same GPU, are not: what they hold shows as foreign bytes of a
// space, and nothing here keeps them from taking more.
//
// # The ledger
//
// A ledger is a directory with one directory for each GPU. There each process has a file, the lease, that
// it keeps locked while it lives. There is no daemon: the kernel releases the lock when the process ends
// in any way, and an unlocked lease counts for nothing. Three rules hold over all live processes:
//
//   - the quotas of all groups together are no more than what is advertised of the GPU:
//     its memory times the oversubscription ratio,
//   - the processes of a group together hold no more than the group's quota,
//   - all processes together hold no more than the GPU has. What does not fit is spilled.
//
// Processes count in grains of a 64th of their quota, at most 64 MiB. Each process may have one grain
// counted that it does not use. Most charges stay within a process's grains and take no system call. One
// that takes a grain locks the directory for a moment and reads the leases of all.
//
// The files must not be touched while processes use them. If one is removed all the same, its process
// notices when it next looks at the ledger, warns, and creates another. Until then the others do not see
// what it holds. A process that may write to the directory can break the rules. So a ledger is for one
// user's processes, which trust each other, or for those that reach one that root has made for all
// users. Containers share it as a mount.
//
// # Ownership
//
// A Quota has nothing to close; an engine closes its leases. A Device belongs to its creator.
// Closing it closes the wrapped device.
//
// # Locks
//
// The mutexes here have the rank Backend; subscribers, events and files are never called
// or read with one held.
//
//	… → Reservation → Space → Ledger → Backend
package quota

import (
	"cmp"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/ledger"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/notify"
	"github.com/spillway-db/spillway/tier"
)

// Quota is one limit over the GPU memory of a process: over all spaces whose devices have a Member
// of it. It is safe for concurrent use, has no goroutine, and need not be closed.
type Quota struct {
	name string

	limit atomic.Int64
	used  atomic.Int64
	peak  atomic.Int64
	over  atomic.Bool // use was above the limit, and has not been within it since

	subscribers notify.Guarded

	mu       lockrank.Mutex[lockrank.Backend] // held to change over and watchers
	watchers []*func(Over)                    // replaced, never changed in place
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
	if cfg.Limit <= 0 {
		return nil, fmt.Errorf("quota: a limit of %d bytes: it must be above 0", cfg.Limit)
	}
	q := &Quota{name: cmp.Or(cfg.Name, "the GPU memory quota")}
	q.limit.Store(cfg.Limit)
	return q, nil
}

// OnOver calls f whenever more is in use than the limit allows, until cancel is called. The caller
// of f is the goroutine that lowered the limit, or one that charged at the same moment. It holds no
// lock. An engine emits events.QuotaExceeded for its quota; programs need OnOver only without an
// engine.
func (q *Quota) OnOver(f func(Over)) (cancel func()) {
	w := &f
	q.mu.Lock()
	defer q.mu.Unlock()
	q.watchers = append(slices.Clone(q.watchers), w)
	return func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		q.watchers = slices.DeleteFunc(slices.Clone(q.watchers), func(o *func(Over)) bool { return o == w })
	}
}

// charge checks and charges in one compare and swap.
func (q *Quota) charge(n int64) error {
	if n <= 0 {
		return fmt.Errorf("quota: cannot charge %d bytes", n)
	}
	for {
		used, limit := q.used.Load(), q.limit.Load()
		if n > limit-used {
			return &tier.OutOfBudgetError{
				Budget: q.name, Requested: n, Remaining: max(0, limit-used), Current: used, Limit: limit,
			}
		}
		if q.used.CompareAndSwap(used, used+n) {
			ledger.Raise(&q.peak, used+n)
			if used+n > q.limit.Load() { // it was lowered meanwhile, by a goroutine that may not have seen this charge
				q.look()
			}
			return nil
		}
	}
}

func (q *Quota) credit(n int64) {
	if q.used.Add(-n) < 0 {
		panic(fmt.Sprintf("quota: %d bytes were credited to %s that were not charged", n, q.name))
	}
	q.look()
	q.subscribers.Notify("a subscriber of a quota")
}

// SetLimit changes the limit to n > 0 bytes. It revokes nothing: a limit below what is
// in use refuses what is new, and monitors move down what is above it.
func (q *Quota) SetLimit(n int64) error {
	if n <= 0 {
		return fmt.Errorf("quota: a limit of %d bytes: it must be above 0", n)
	}
	if q.limit.Swap(n) != n {
		q.look()
		q.subscribers.Notify("a subscriber of a quota")
	}
	return nil
}

// look calls the watchers if use is above the limit, once for each time that this happens.
func (q *Quota) look() {
	if q.used.Load() <= q.limit.Load() && !q.over.Load() {
		return
	}
	q.mu.Lock()
	used, limit := q.used.Load(), q.limit.Load() // a goroutine that changes them after this looks after us
	tell := used > limit && !q.over.Load()
	q.over.Store(used > limit)
	watchers := q.watchers
	q.mu.Unlock()
	if !tell {
		return
	}
	lockrank.AssertNone("a quota's watchers are called")
	for _, f := range watchers {
		q.subscribers.Panics.Do("a watcher of a quota", func() { (*f)(Over{Quota: q.name, Used: used, Limit: limit}) })
	}
}

// Stats are a quota's numbers, in bytes.
type Stats struct {
	Name  string `json:"name"`  // what errors call it
	Limit int64  `json:"limit"` // how much may be charged
	Used  int64  `json:"used"`
	Peak  int64  `json:"peak"` // largest Used so far
}

// Stats returns the numbers. Each is exact; they are not a cut.
func (q *Quota) Stats() Stats {
	return Stats{Name: q.name, Limit: q.limit.Load(), Used: q.used.Load(), Peak: q.peak.Load()}
}

// memInfo is what a device of so many bytes shows under a quota: no more than the
// limit, and of that no more free than what is left.
func memInfo(q tier.Quota, free, total int64) (int64, int64) {
	total = min(total, q.Limit())
	return min(free, total, max(0, q.Remaining())), total
}

// Lease is a process's part in the ledger of a node, for one GPU. An engine joins the ledger and
// closes the lease. Methods may be called at any time. Sizes are in bytes.
type Lease interface {
	Live() int64      // what this process holds
	Remaining() int64 // what is left for it; below 0 while its group holds more than a lowered limit
	Limit() int64     // the group's quota, and no more than the GPU has
	// SetLimit changes the group's quota to n > 0 bytes as this process asks for it; the least of
	// what the group's processes ask for counts. It takes back nothing. The quotas of all groups
	// must stay within what is advertised.
	SetLimit(n int64) error
	Lost() int64 // how often this process's file was removed from the ledger while the process used it
}
