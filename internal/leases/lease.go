package leases

import (
	"errors"
	"fmt"
	"io/fs"
	"runtime"
	"sync"
	"time"

	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/internal/ledger"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/notify"
	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
)

// Lease is a process's part in the ledger of a node, for one GPU. It is a tier.Quota
// that refuses what would be more than its group's quota, or than the GPU has, counted
// over all processes that are alive. It is safe for concurrent use. Join makes it.
type Lease struct {
	terms Terms
	group string // unique if the terms name none

	scanning chan struct{} // holds one thing while the directory is read

	subscribers notify.Guarded
	polling     sync.WaitGroup
	hurry       chan struct{} // holds one thing if poll should look soon
	done        chan struct{} // closed by Close

	mu struct {
		lockrank.Mutex[lockrank.Backend]
		node   *node // as own, others when the files were removed and put back
		own    *ownLease
		lost   int64   // how often that was
		peers  []*peer // the others, as of generation known
		known  int64
		closed bool
		polls  bool
		over   bool        // the group held more than its quota, and was not seen within it since
		owed   *quota.Over // OnOver is to be called with it; nil if not
		floor  int64       // the least room that any caller has seen since the last poll
	}
}

var _ tier.Quota = (*Lease)(nil)

// outcome is what became of an attempt to charge.
type outcome int

const (
	charged   outcome = iota
	stale             // others have come or gone: the directory must be read first
	contended         // there is room, but others are trying for it at this moment
	full
	failed
)

// How often an attempt is repeated before it is refused, because others cannot be made to
// stand still.
const (
	mostScans     = 100
	mostContended = 200
)

// Charge implements tier.Quota.
//
// A charge is first written to the process's own word, and then the words of all are added up. Of
// two simultaneous charges at least one sees the other. So together they never hold more than they
// may. Nothing is locked, and a process that is stopped or killed at any point does not block
// others.
//
// If files of the ledger were removed since the last look, the charge is refused with a
// *BrokenError. The ledger is joined again, so that others see what this process holds. Later
// charges go on if that succeeded. A moved directory is found when the ledger is looked at.
func (l *Lease) Charge(n int64) error {
	if n <= 0 {
		return fmt.Errorf("quota: cannot charge %d bytes", n)
	}
	if l.unlinked() {
		if err := l.rescan(); err != nil {
			return err
		}
	}
	scans, tries, looked := 0, 0, false
	for {
		what, err := l.tryCharge(n)
		switch {
		case what == charged || what == failed:
			return err
		case what == stale && scans < mostScans:
			scans++
		case what == contended && tries < mostContended:
			if tries++; tries <= mostContended/10 {
				runtime.Gosched()
			} else {
				time.Sleep(time.Duration(tries) * time.Microsecond)
			}
			continue
		case what != stale && !looked:
			looked, tries = true, 0 // a holder may have been killed
		default:
			l.refuse(n)
			return err
		}
		if err := l.rescan(); err != nil {
			return err
		}
	}
}

// tryCharge charges n bytes if there is room. Unless it has charged them there is an
// error to be returned if nothing else is tried.
func (l *Lease) tryCharge(n int64) (outcome, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.closed {
		return failed, fmt.Errorf("quota: the lease is %w", tier.ErrClosed)
	}
	w := l.mu.own.words
	if n > l.terms.Physical-w.live.Load() { // so that no sum overflows, not even for a moment in which others look
		return full, l.refusalLocked(n)
	}
	w.claim.Add(n)
	if l.mu.node.generation.Load() != l.mu.known {
		w.claim.Add(-n)
		return stale, l.refusalLocked(n)
	}
	if group, all, err := l.sumLocked(claims); err != nil {
		w.claim.Add(-n)
		return failed, err
	} else if group <= l.limitLocked() && all <= l.terms.Physical {
		ledger.Raise(w.peak, w.live.Add(n))
		return charged, nil
	}
	w.claim.Add(-n)
	refusal := l.refusalLocked(n)
	if n > refusal.Remaining {
		return full, refusal
	}
	return contended, refusal
}

// Credit implements tier.Quota.
func (l *Lease) Credit(n int64) {
	l.mu.Lock()
	if !l.mu.closed {
		if l.mu.own.words.live.Add(-n) < 0 {
			l.mu.Unlock()
			panic(fmt.Sprintf("quota: %d bytes were credited to %s that were not charged", n, l.title()))
		}
		l.mu.own.words.claim.Add(-n)
	}
	l.mu.Unlock()
	l.subscribers.Notify("a subscriber of a quota")
}

// Remaining implements tier.Quota. Until this process looks, it still counts what killed processes
// hold, and misses new processes. It looks when it charges, and ten times a second while there are
// subscribers. Remaining is below 0 while the group holds more than a lowered quota allows: by this
// process's share of the excess.
func (l *Lease) Remaining() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.closed {
		return 0
	}
	room := l.roomLocked()
	l.mu.floor = min(l.mu.floor, room) // a waiter waits for more than that
	return room
}

func (l *Lease) roomLocked() int64 {
	group, all, _ := l.sumLocked(lives)
	limit := l.limitLocked()
	l.noteOverLocked(group, limit)
	if group > limit {
		return ledger.Left(limit, group, l.mu.own.words.live.Load())
	}
	return l.remainingLocked(group, all)
}

func (l *Lease) remainingLocked(group, all int64) int64 {
	return max(0, min(l.limitLocked()-group, l.terms.Physical-all))
}

// Limit implements tier.Quota: the group's quota, and no more than the GPU has.
func (l *Lease) Limit() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return min(l.limitLocked(), l.terms.Physical)
}

// limitLocked is the least that a process of the group says.
func (l *Lease) limitLocked() int64 {
	n := l.terms.Quota
	if !l.mu.closed {
		n = l.mu.own.words.limit.Load()
	}
	for _, p := range l.mu.peers {
		if p.group == l.group {
			n = min(n, p.words.limit.Load())
		}
	}
	return n
}

// SetLimit changes the group's quota, as far as this process is concerned, to n > 0
// bytes; the least of what its processes say counts. It revokes nothing. Raised, the
// quotas of all groups must still be within what is advertised.
func (l *Lease) SetLimit(n int64) error {
	if n <= 0 {
		return fmt.Errorf("quota: a limit of %d bytes: it must be above 0", n)
	}
	if err := l.rescan(); err != nil { // before the directory is locked, which joining again does too
		return err
	}
	l.mu.Lock()
	dir := l.mu.node
	l.mu.Unlock()
	unlock, err := dir.lock()
	if errors.Is(err, fs.ErrClosed) { // the directory is, by Close
		return fmt.Errorf("quota: the lease is %w", tier.ErrClosed)
	}
	if err != nil {
		return fmt.Errorf("quota: the ledger in %s: %w", l.terms.Dir, err)
	}
	defer l.subscribers.Notify("a subscriber of a quota")
	defer l.tellOver()
	defer unlock()
	if err := l.exclusively(l.scan); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.closed {
		return fmt.Errorf("quota: the lease is %w", tier.ErrClosed)
	}
	if n > l.mu.own.words.limit.Load() {
		promised := make(map[string]int64)
		for _, p := range l.mu.peers {
			promised[p.group] = max(promised[p.group], p.words.limit.Load())
		}
		if err := l.fits(promised, n); err != nil {
			return fmt.Errorf("quota: %w", err)
		}
	}
	l.mu.own.words.limit.Store(n)
	return nil
}

// Subscribe implements tier.Quota. While there are subscribers, a goroutine looks at the ledger at
// least ten times a second. It finds what other processes give back, which of them come and go, and
// changed quotas. Close ends it.
func (l *Lease) Subscribe(f func()) (cancel func()) {
	cancel = l.subscribers.Add(f)
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.mu.closed && !l.mu.polls {
		l.mu.polls = true
		l.polling.Go(func() {
			labels.Quota.Set()
			l.poll()
		})
	}
	return cancel
}

// Live returns how many bytes this process holds.
func (l *Lease) Live() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.closed {
		return 0
	}
	return l.mu.own.words.live.Load()
}

// Close gives the lease up, and all that is held by it. A second Close returns
// ErrClosed.
func (l *Lease) Close() error {
	l.mu.Lock()
	if l.mu.closed {
		l.mu.Unlock()
		return fmt.Errorf("quota: the lease is %w", tier.ErrClosed)
	}
	l.mu.closed = true
	l.mu.Unlock()
	close(l.done)
	l.polling.Wait()
	l.scanning <- struct{}{} // nothing reads the directory any more
	l.mu.Lock()
	own, dir := l.mu.own, l.mu.node
	l.mu.Unlock()
	own.live.Store(0)
	own.claim.Store(0)
	err := dir.remove(own.name)
	own.close()
	dir.generation.Add(1) // after the lease is unlocked: only a live holder counts
	l.dropPeers()
	return errors.Join(err, dir.close())
}

func claims(w words) int64 { return w.claim.Load() }

func lives(w words) int64 { return w.live.Load() }

// sumLocked adds up what the group holds, and what all do. A number that no process could have
// written is an error.
func (l *Lease) sumLocked(of func(words) int64) (group, all int64, err error) {
	group = of(l.mu.own.words)
	all = group
	for _, p := range l.mu.peers {
		n := of(p.words)
		if n < 0 || p.words.limit.Load() <= 0 {
			return 0, 0, fmt.Errorf("quota: the ledger in %s: process %d holds %d bytes by %s, or has a limit, which cannot be", l.terms.Dir, p.head.pid, n, p.name)
		}
		all = add(all, n)
		if p.group == l.group {
			group = add(group, n)
		}
	}
	return group, all, nil
}

// refusalLocked says what is in the way of n bytes: the quota, or the GPU's memory.
func (l *Lease) refusalLocked(n int64) *tier.OutOfBudgetError {
	group, all, _ := l.sumLocked(lives)
	limit := l.limitLocked()
	e := &tier.OutOfBudgetError{Budget: l.title(), Requested: n, Remaining: l.remainingLocked(group, all), Current: group, Limit: limit}
	if l.terms.Physical-all < limit-group {
		e.Budget = fmt.Sprintf("the memory of %s, which %d processes share by the ledger in %s,", l.terms.Device, len(l.mu.peers)+1, l.terms.Dir)
		e.Current, e.Limit = all, l.terms.Physical
	}
	return e
}

func (l *Lease) title() string {
	if l.terms.Group == "" {
		return fmt.Sprintf("the quota of this process on %s (ledger %s)", l.terms.Device, l.terms.Dir)
	}
	return fmt.Sprintf("the quota of the group %q on %s (ledger %s)", l.terms.Group, l.terms.Device, l.terms.Dir)
}

// rescan reads the directory again. If files were removed it says so, after it has put
// them back.
func (l *Lease) rescan() error {
	err := l.exclusively(func() error {
		if err := l.mend(); err != nil {
			return err
		}
		return l.scan()
	})
	var broken *BrokenError
	if errors.As(err, &broken) && l.terms.OnBroken != nil {
		lockrank.AssertNone("a lease's event is sent")
		l.subscribers.Panics.Do("Terms.OnBroken", func() { l.terms.OnBroken(broken) })
	}
	return err
}

// exclusively calls f, which may read the directory, while no other goroutine does.
func (l *Lease) exclusively(f func() error) error {
	select {
	case l.scanning <- struct{}{}:
	case <-l.done:
		return fmt.Errorf("quota: the lease is %w", tier.ErrClosed)
	}
	defer func() { <-l.scanning }()
	err := f()
	if err != nil && !errors.Is(err, ErrBroken) {
		err = fmt.Errorf("quota: the ledger in %s: %w", l.terms.Dir, err)
	}
	return err
}

// scan finds the live processes. A dead one is forgotten, and its lease removed. A live one counts,
// even if its lease was removed. One caller at a time.
func (l *Lease) scan() (err error) {
	lockrank.AssertNone("the ledger is read")
	l.mu.Lock()
	dir, own := l.mu.node, ""
	if l.mu.own != nil {
		own = l.mu.own.name
	}
	l.mu.Unlock()
	generation := dir.generation.Load() // before the names: the next scan finds a process that comes later
	names, err := dir.leases()
	if err != nil {
		return err
	}
	l.mu.Lock()
	before := make(map[string]*peer, len(l.mu.peers))
	for _, p := range l.mu.peers {
		before[p.name] = p
	}
	l.mu.Unlock()
	var peers []*peer
	for _, name := range names {
		if name == own {
			continue
		}
		if p := before[name]; p != nil {
			if dir.alive(p) {
				peers = append(peers, p)
				delete(before, name)
			}
			continue
		}
		p, openErr := dir.open(name)
		if openErr != nil {
			err = errors.Join(err, openErr)
		} else if p != nil {
			peers = append(peers, p)
		} else {
			dir.reap(name)
		}
	}
	for name, p := range before {
		if dir.alive(p) {
			peers = append(peers, p)
			delete(before, name)
		}
	}
	l.mu.Lock()
	l.mu.peers = peers
	if err == nil {
		l.mu.known = generation
	}
	l.mu.Unlock()
	for _, p := range before { // they are not read any more
		p.close()
		dir.reap(p.name)
	}
	return err
}

func (l *Lease) dropPeers() {
	l.mu.Lock()
	peers := l.mu.peers
	l.mu.peers = nil
	l.mu.Unlock()
	for _, p := range peers {
		p.close()
	}
}

// How often the ledger is looked at: first after a refusal or a notification, and when nothing
// happens.
const (
	pollFirst = 10 * time.Millisecond
	pollMost  = 100 * time.Millisecond
)

// refuse records that n bytes were refused, so that a caller may be waiting, and has the ledger
// looked at soon.
func (l *Lease) refuse(n int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.closed {
		return
	}
	l.mu.floor = min(l.mu.floor, l.roomLocked(), n-1) // if there was room, others were only in the way
	select {
	case l.hurry <- struct{}{}:
	default:
	}
}

// tellOver reports use above the group's quota, once for each time that it occurs.
func (l *Lease) tellOver() {
	if over := l.takeOwed(); over != nil && l.terms.OnOver != nil {
		lockrank.AssertNone("a lease's event is sent")
		l.terms.OnOver(*over)
	}
}

func (l *Lease) takeOwed() *quota.Over {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.closed {
		return nil
	}
	if group, _, err := l.sumLocked(lives); err == nil {
		l.noteOverLocked(group, l.limitLocked())
	}
	over := l.mu.owed
	l.mu.owed = nil
	return over
}

// noteOverLocked notes whether the group holds more than its quota. The monitor may look, and
// have moved the excess, before poll looks.
func (l *Lease) noteOverLocked(group, limit int64) {
	if group > limit && !l.mu.over {
		l.mu.owed = &quota.Over{Quota: l.title(), Used: group, Limit: limit}
	}
	l.mu.over = group > limit
}

// poll notifies the subscribers when the limit has changed, or there is more room than any caller
// has seen since the last poll. A waiter does not ask again until it is notified. So poll cannot
// know whether there are waiters: it ends with the last subscriber.
func (l *Lease) poll() {
	delay, limit := pollFirst, l.Limit()
	timer := time.NewTimer(delay)
	defer timer.Stop()
	for {
		select {
		case <-l.done:
			return
		case <-l.hurry:
			if delay > pollFirst {
				delay = pollFirst
				timer.Reset(delay)
			}
			continue
		case <-timer.C:
		}
		err := l.rescan() // killed processes are forgotten
		l.tellOver()
		now := l.Limit()
		l.mu.Lock()
		if l.mu.closed || l.subscribers.IsEmpty() {
			l.mu.polls = false
			l.mu.Unlock()
			return
		}
		room := l.roomLocked()
		tell := room > l.mu.floor || now != limit || err != nil && delay == pollMost
		l.mu.floor = room
		l.mu.Unlock()
		if limit = now; tell {
			l.subscribers.Notify("a subscriber of a quota") // after an error too: a waiter then finds it
			delay = pollFirst
		} else {
			delay = min(2*delay, pollMost)
		}
		timer.Reset(delay)
	}
}
