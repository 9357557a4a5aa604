package leases

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
	"golang.org/x/sys/unix"
)

// Terms are the arguments of Join. Dir, Device and Physical are required.
type Terms struct {
	// Dir is the ledger's directory. Join creates it if it does not exist, for this user only. It
	// must not be a link. It must be this user's or root's own, writable by no other user unless
	// root has shared it (see Share), and on a local file system.
	Dir string
	// Device is the UUID of the GPU. Each GPU is counted by itself.
	Device string
	// Group is the name of the group whose processes together hold at most Quota, as
	// quota.Settings describes it; empty means that the process has a quota of its own.
	Group string
	// Quota is how many bytes the group may hold, if this is its first process: a later one joins
	// with the quota that the group has. 0 means all that is advertised.
	Quota int64
	// Physical is the size of the GPU in bytes: all processes together never hold more, with any
	// quotas. All processes must give the same.
	Physical int64
	// Advertised is how much the quotas of all groups may come to; 0 means Physical. See
	// Advertised. All processes must give the same.
	Advertised int64
	// OnBroken, if set, is called when this process's file was removed, by the goroutine that
	// noticed, with no lock held. It must not close the lease.
	OnBroken func()
	// OnOver, if set, is called when the group holds more than its quota allows, because one of its
	// processes has lowered that. It is called once, until use is within the quota again. A process
	// that did not lower it notices when it looks at the ledger; see Lease.Subscribe. No lock is
	// held. It must not close the lease.
	OnOver func(quota.Over)
}

// Lease is one process's part in the ledger of a node, for one GPU. It is a tier.Quota over the
// live processes of the node: it refuses bytes beyond the group's quota, and beyond the GPU's
// memory. It is safe for concurrent use. Join returns it, and the caller must Close it.
//
// The process looks at the ledger when it takes or returns grains, and periodically while it has
// subscribers. It has a locked file there. If somebody removes that, other processes do not count
// this one until its next look, which creates another file.
type Lease struct {
	terms       Terms
	subscribers guard.List[struct{}]
	blocked     atomic.Bool // the last look could not lock the directory

	files chan struct{} // holds one element while a goroutine uses the ledger; acquired before mu
	file  *os.File      // used with files acquired; nil before the first look
	own   Holder        // as in the file; Quota is 0 until the process has joined; written with files and mu

	// mu guards the fields below. They have the numbers of the last look; those of this process are
	// as they are now.
	mu        lockrank.Mutex[lockrank.Backend]
	live      int64       // bytes that this process holds
	granted   int64       // bytes that the file has in grains, or is about to have
	usable    int64       // bytes of grains to charge: less than granted while a look takes some
	peers     int         // how many other processes use the GPU
	groupLive int64       // bytes that the other processes of the group hold
	limit     int64       // of the group, and at most the GPU's memory
	room      int64       // how many bytes this process may hold, including those that it holds
	grain     int64       // bytes
	over      bool        // the group held more than its limit at the last look, and has since then
	closed    bool        // written with files acquired as well
	poll      *time.Timer // nil before the first subscription
}

var _ tier.Quota = (*Lease)(nil)

const (
	maxGrain = 64 << 20 // bytes that a process may have counted without using them

	// How often a lease with subscribers looks at the ledger. Each look takes about 15 µs for each
	// peer, with the directory locked. So the looks of n processes take 15 µs × n² in each period,
	// which grows with n to keep the directory unlocked most of the time, up to a few hundred
	// processes.
	pollEvery   = 50 * time.Millisecond
	pollPerPeer = 10 * time.Millisecond // if that comes to more
)

// Join attaches this process to the ledger of a node: from now on its quota counts for others, and
// theirs for it. It holds nothing yet. The caller must Close the lease.
//
// The error is tier.ErrOutOfBudget if the quotas of all groups would exceed what is advertised.
// Another size of the GPU than other processes have is an error too. On a network file system the
// error is tier.ErrNotSupported.
func Join(t Terms) (*Lease, error) {
	var err error
	if t.Dir, err = filepath.Abs(t.Dir); err != nil { // the process may change its directory
		return nil, err
	}
	l := &Lease{terms: t, files: make(chan struct{}, 1), own: Holder{
		Device: cudaName(t.Device), Group: t.Group, PID: os.Getpid(), Started: time.Now(),
		Physical: t.Physical, Advertised: cmp.Or(t.Advertised, t.Physical),
	}}
	if err := l.look(0, 0); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// Charge implements tier.Quota. It takes no system call if the bytes fit into the grains that this
// process has. Otherwise it takes grains, for which it reads the files of all live processes. If
// the ledger cannot be used, Charge returns an error; grains that the process already has can still
// be charged.
func (l *Lease) Charge(n int64) error {
	l.mu.Lock()
	if n <= l.usable-l.live {
		l.live += n
		l.mu.Unlock()
		return nil
	}
	l.mu.Unlock()
	return l.look(n, 0)
}

// Credit implements tier.Quota. It returns grains once more than one is unused. If that fails, this
// process keeps them until its next look. While the ledger is locked by a process that is stopped,
// only the first Credit waits for it.
func (l *Lease) Credit(n int64) {
	l.mu.Lock()
	switch {
	case l.closed:
	case n > l.live:
		l.mu.Unlock()
		panic(fmt.Sprintf("quota: %d bytes of %s were credited that were not charged", n, l.terms.Device))
	default:
		l.live -= n
	}
	l.over = l.over && l.groupLive+l.live > l.limit
	unused := l.granted-l.live > l.grain
	l.mu.Unlock()
	if unused && !l.blocked.Load() {
		_ = l.look(0, 0)
	}
	l.notify()
}

// Remaining implements tier.Quota, without a system call. It may be out of date, because it counts
// others as of the last look; Charge decides. While the group holds more than a lowered limit,
// Remaining is negative: this process's share of the excess.
func (l *Lease) Remaining() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	left := books.Left(l.limit, l.groupLive+l.live, l.live)
	return min(left, max(0, l.room-l.live))
}

// Limit implements tier.Quota: the group's quota, and at most the GPU's memory, as of the last
// look.
func (l *Lease) Limit() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.limit
}

// SetLimit changes the quota that this process asks for its group, to n > 0 bytes; the smallest one
// that a process of the group asks for is the group's limit. It revokes nothing. After an increase
// the quotas of all groups must still be within what is advertised.
func (l *Lease) SetLimit(n int64) error {
	if n <= 0 {
		return fmt.Errorf("quota: a limit of %d bytes: it must be above 0", n)
	}
	return l.look(0, n)
}

// Live returns how many bytes this process holds.
func (l *Lease) Live() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.live
}

// Lost returns how often this process's file was removed while the process used it.
func (l *Lease) Lost() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.own.Lost
}

// Subscribe implements tier.Quota. From the first subscription on, the lease looks at the ledger
// every 50 ms, or every 10 ms × peers if that is more: for bytes that other processes returned, for
// killed processes, and for changed quotas.
func (l *Lease) Subscribe(f func()) (cancel func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.poll == nil {
		l.poll = time.AfterFunc(pollEvery, func() {
			labels.Quota.Set()
			if l.look(0, 0) != nil {
				l.notify() // a waiter charges again, and gets the error
			}
			l.mu.Lock()
			defer l.mu.Unlock()
			if !l.closed {
				l.poll.Reset(max(pollEvery, pollPerPeer*time.Duration(l.peers)))
			}
		})
	}
	return l.subscribers.Add(func(struct{}) { f() })
}

func (l *Lease) notify() { l.subscribers.Call("a subscriber of a quota", struct{}{}) }

// Close returns everything that this process holds, and removes its file. A second Close returns
// tier.ErrClosed.
func (l *Lease) Close() error {
	l.files <- struct{}{} // so that a charge that has begun ends first
	defer func() { <-l.files }()
	if l.closed {
		return fmt.Errorf("quota: the lease is %w", tier.ErrClosed)
	}
	if l.file != nil {
		_ = os.Remove(l.file.Name()) // others ignore a file that stays
		unlock(l.file)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	l.live, l.granted, l.usable, l.groupLive, l.room = 0, 0, 0, 0, 0
	return nil
}

// look reads the ledger, charges bytes, sets the quota that this process asks for unless asked is
// 0, and writes this process's file, with as many grains as the process needs from then on. If look
// returns an error, it has charged and set nothing. The first look joins the ledger. A look that
// finds that the file was removed creates another.
func (l *Lease) look(bytes, asked int64) (err error) {
	lockrank.AssertNone("the ledger is read")
	until := time.Now().Add(lockFor) // for all goroutines that wait now, so that they fail at the same time
	var calls []func()
	l.files <- struct{}{}
	defer func() {
		<-l.files
		for _, call := range calls {
			call()
		}
		if err != nil {
			err = fmt.Errorf("quota: %w", err)
		}
	}()
	if l.closed {
		return fmt.Errorf("the lease is %w", tier.ErrClosed)
	}
	own := l.own // becomes the content of the file
	dir, err := lockGPU(l.terms.Dir, dirName(own.Device), unix.LOCK_EX, until)
	if l.blocked.Store(err != nil); err != nil {
		return err
	}
	defer unlock(dir)
	file, joins := l.file, own.Quota == 0
	if !joins {
		if !isAt(file) { // somebody removed or replaced the file, or its directory
			_ = file.Close()
			file = nil
			own.Lost++
		}
	}

	// Add up the files of the other processes.
	peers, err := read(dir, file, true)
	if err != nil {
		return err
	}
	var granted, groupGranted, groupLive, promised int64
	groupQuota := int64(0)       // smallest that another process of the group asks for
	quotas := map[string]int64{} // largest of each other group
	for _, p := range peers {
		if joins && (p.Physical != own.Physical || p.Advertised != own.Advertised) {
			return fmt.Errorf("%d bytes, %d advertised, are not what another process has (%+v): give all the same",
				own.Physical, own.Advertised, p)
		}
		granted += p.Granted
		switch p.Group {
		case "":
			promised += p.Quota
		case own.Group:
			groupGranted += p.Granted
			groupLive += p.Live
			groupQuota = min(p.Quota, cmp.Or(groupQuota, p.Quota))
		default:
			promised += max(0, p.Quota-quotas[p.Group])
			quotas[p.Group] = max(quotas[p.Group], p.Quota)
		}
	}

	// Check the quota.
	if joins {
		asked = cmp.Or(groupQuota, l.terms.Quota, own.Advertised)
	}
	if left := max(0, own.Advertised-promised); asked > max(own.Quota, left) {
		return &tier.OutOfBudgetError{
			Budget: "what is advertised of " + own.Device, Requested: asked,
			Remaining: left, Current: promised, Limit: own.Advertised,
		}
	}
	own.Quota = cmp.Or(asked, own.Quota)
	limit := min(own.Quota, cmp.Or(groupQuota, own.Quota), own.Physical)
	grain := max(1, min(maxGrain, limit/64))
	room := max(0, min(limit-groupGranted, own.Physical-granted))

	// Charge. Until the file is written, other goroutines may charge only bytes that count before
	// and after the write.
	title := fmt.Sprintf("the quota on %s (group %q, ledger %s; other processes have %d of %d bytes)",
		own.Device, own.Group, l.terms.Dir, granted, own.Physical)
	var refused error
	l.mu.Lock()
	if left := max(0, room-l.live); bytes > left {
		refused = &tier.OutOfBudgetError{
			Budget: title, Requested: bytes, Remaining: left, Current: groupGranted + l.live, Limit: limit,
		}
		bytes = 0
	}
	l.live += bytes
	own.Live, own.Peak, own.Granted = l.live, max(own.Peak, l.live), l.live
	if rest := (grain - own.Live%grain) % grain; rest <= room-own.Live {
		own.Granted += rest // if a whole grain has no room, the process takes only the bytes that it needs
	}
	l.granted, l.usable = own.Granted, min(l.usable, own.Granted)
	l.mu.Unlock()
	file, err = write(dir, file, own)
	if file != nil {
		l.file = file
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil {
		l.live -= bytes
		return err
	}

	if own.Lost > l.own.Lost && l.terms.OnBroken != nil {
		calls = append(calls, l.terms.OnBroken)
	}
	held := groupLive + l.live
	if held > limit && !l.over && l.terms.OnOver != nil {
		calls = append(calls, func() { l.terms.OnOver(quota.Over{Quota: title, Used: held, Limit: limit}) })
	}
	if limit != l.limit || room > l.room {
		calls = append(calls, l.notify)
	}
	l.own, l.peers, l.over = own, len(peers), held > limit
	l.usable, l.groupLive, l.limit, l.room, l.grain = own.Granted, groupLive, limit, room, grain
	return refused
}
