package leases

import (
	"errors"
	"fmt"
	"path/filepath"
	"time"

	spacebooks "github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/notify"
	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
	"golang.org/x/sys/unix"
)

// Lease is one process's part in the ledger of a node, for one GPU. It is a tier.Quota over the live
// processes of the node: it refuses bytes beyond the group's quota, and beyond the GPU's memory. It is
// safe for concurrent use. Join returns it, and the caller must Close it.
//
// A lease is attached while it has a locked file in the ledger. If somebody removes the file, the lease
// notices at its next look at the ledger, refuses one charge, and attaches itself with a new file. Close
// detaches it for good.
type Lease struct {
	terms       Terms
	subscribers notify.Guarded

	files chan struct{} // holds one element while a goroutine uses node; acquired before mu
	node  *node         // nil once the lease is closed

	mu struct {
		lockrank.Mutex[lockrank.Backend]
		books
		over      bool        // the group held more than its limit at the last look
		poll      *time.Timer // nil without subscribers
		blocked   error       // why the last look could not lock the directory; nil if it could
		blockedAt time.Time   // when it gave up
		closed    bool
	}
}

var _ tier.Quota = (*Lease)(nil)

const (
	maxGrain = 64 << 20 // bytes that a process may have counted without using them

	// How often a lease with subscribers looks at the ledger. Each look takes about 15 µs for each peer, with
	// the directory locked. So the looks of n processes take 15 µs × n² in each period, which grows with n to
	// keep the directory unlocked most of the time, up to a few hundred processes.
	pollEvery   = 50 * time.Millisecond
	pollPerPeer = 10 * time.Millisecond // if that comes to more
)

// Charge implements tier.Quota. It takes no system call if the bytes fit into the grains that this
// process has. Otherwise it takes grains, for which it reads the files of all live processes.
//
// If the file of this process was removed, Charge returns a *BrokenError and charges nothing. If another
// process is stopped while it has the ledger locked, or the file cannot be written, Charge returns an
// error too; grains that the process already has can still be charged.
func (l *Lease) Charge(n int64) error {
	if n <= 0 {
		return fmt.Errorf("quota: cannot charge %d bytes", n)
	}
	l.mu.Lock()
	fits := !l.mu.closed && n <= l.mu.own.Granted-l.mu.own.Live
	if fits {
		l.mu.charge(n)
	}
	l.mu.Unlock()
	if fits {
		return nil
	}
	return l.look(n, 0)
}

// Credit implements tier.Quota. It returns grains once more than one is unused. If that fails, this
// process keeps them until its next look. While the ledger is locked by a process that is stopped, only
// the first Credit waits for it.
func (l *Lease) Credit(n int64) {
	l.mu.Lock()
	if !l.mu.closed {
		l.mu.own.Live -= n
	}
	live := l.mu.own.Live
	l.mu.Unlock()
	if live < 0 {
		panic(fmt.Sprintf("quota: %d bytes of %s were credited that were not charged", n, l.terms.Device))
	}
	l.returnGrains()
	l.notify()
}

// returnGrains looks at the ledger if more than one grain is unused, and the last look found it unlocked.
func (l *Lease) returnGrains() {
	l.mu.Lock()
	returns := !l.mu.closed && l.mu.blocked == nil && l.mu.own.Granted-l.mu.own.Live > l.mu.grain()
	l.mu.Unlock()
	if returns {
		_ = l.look(0, 0)
	}
}

func (l *Lease) notify() { l.subscribers.Notify("a subscriber of a quota") }

// Remaining implements tier.Quota, without a system call: it counts others as of the last look. A lease
// looks when it takes or returns grains, and periodically while it has subscribers. While the group holds
// more than a lowered limit, Remaining is negative: this process's share of the excess.
func (l *Lease) Remaining() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	live, held, limit := l.mu.own.Live, l.mu.held(), l.mu.limit()
	switch {
	case l.mu.closed:
		return 0
	case held > limit:
		return spacebooks.Left(limit, held, live)
	}
	return max(0, l.mu.room()-live)
}

// Limit implements tier.Quota: the group's quota, and at most the GPU's memory, as of the last look.
func (l *Lease) Limit() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return min(l.mu.limit(), l.mu.own.Physical)
}

// SetLimit changes the quota that this process asks for its group, to n > 0 bytes; the smallest one that
// a process of the group asks for is the group's limit. It revokes nothing. After an increase the quotas
// of all groups must still be within what is advertised.
func (l *Lease) SetLimit(n int64) error {
	if n <= 0 {
		return fmt.Errorf("quota: a limit of %d bytes: it must be above 0", n)
	}
	return l.look(0, n)
}

// Live returns how many bytes this process holds.
func (l *Lease) Live() int64 { return l.own().Live }

// Lost returns how often this process's file was removed while the process used it.
func (l *Lease) Lost() int64 { return l.own().Lost }

func (l *Lease) own() record {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.own
}

// Subscribe implements tier.Quota. While there are subscribers, the lease looks at the ledger every 50 ms,
// or every 10 ms × peers if that is more: for bytes that other processes returned, for killed processes,
// and for changed quotas.
func (l *Lease) Subscribe(f func()) (cancel func()) {
	cancel = l.subscribers.Add(f)
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.mu.closed && l.mu.poll == nil {
		l.mu.poll = time.AfterFunc(pollEvery, func() {
			labels.Quota.Set()
			l.poll()
		})
	}
	return cancel
}

func (l *Lease) poll() {
	err := l.look(0, 0)
	l.mu.Lock()
	goesOn := !l.mu.closed && !l.subscribers.IsEmpty()
	if goesOn {
		l.mu.poll.Reset(max(pollEvery, pollPerPeer*time.Duration(l.mu.count)))
	} else {
		l.mu.poll = nil
	}
	l.mu.Unlock()
	if goesOn && err != nil {
		l.notify() // a waiter asks again, and gets the error
	}
}

// Close returns everything that this process holds, and removes its file. A second Close returns
// tier.ErrClosed.
func (l *Lease) Close() error {
	l.files <- struct{}{} // so that a charge that has begun ends first
	defer func() { <-l.files }()
	l.mu.Lock()
	closed, poll := l.mu.closed, l.mu.poll
	l.mu.closed = true
	l.mu.own.Live = 0
	l.mu.Unlock()
	if closed {
		return fmt.Errorf("quota: the lease is %w", tier.ErrClosed)
	}
	if poll != nil {
		poll.Stop()
	}
	n := l.node
	l.node = nil
	return n.close()
}

// look reads the ledger, charges so many bytes, and sets the limit that this process asks for unless
// limit is 0. In any case it counts as many grains as this process needs from then on.
func (l *Lease) look(bytes, limit int64) error {
	lockrank.AssertNone("the ledger is read")
	began := time.Now()
	l.files <- struct{}{}
	report, err := l.lookAlone(began, bytes, limit)
	<-l.files
	if report == nil {
		return fmt.Errorf("quota: the ledger in %s: %w", l.terms.Dir, err)
	}
	l.subscribers.Panics.Do("a lease's event", report)
	l.returnGrains() // which are unused if another goroutine has credited bytes in the meantime
	return err
}

// lookAlone is look for one goroutine at a time, which has waited for its turn since began. It returns what
// look has to report; nil if the ledger could not be read or written.
func (l *Lease) lookAlone(began time.Time, bytes, limit int64) (report func(), err error) {
	n := l.node
	if n == nil {
		return nil, fmt.Errorf("the lease is %w", tier.ErrClosed)
	}
	if err := l.lock(began); err != nil {
		return nil, err
	}
	defer n.unlock()
	if !isAt(n.dir, n.path) || !isAt(n.file, filepath.Join(n.path, n.name)) {
		n.unlock() // attach locks the same directory, if it still exists
		broken := l.putBack()
		return func() { l.terms.OnBroken(broken) }, broken
	}
	peers, err := n.read(true)
	if err != nil {
		return nil, err
	}

	l.mu.Lock()
	before, next := l.mu.books, l.mu.books
	wasOver := l.mu.over && before.held() > before.limit()
	next.sum(peers)
	own := &next.own // what the file will have
	if limit > own.Quota {
		err = next.fits(limit)
	}
	if limit > 0 && err == nil {
		own.Quota = limit
	}
	room, grain := next.room(), next.grain()
	if bytes > max(0, room-own.Live) {
		err = next.refusal(bytes)
		bytes = 0
	}
	own.Live += bytes
	own.Granted = own.Live
	if rest := (grain - own.Live%grain) % grain; rest <= room-own.Live {
		own.Granted += rest
	}
	// Until the file is written, other goroutines may charge only bytes that count before and after that.
	l.mu.charge(bytes)
	l.mu.own.Granted = min(l.mu.own.Granted, own.Granted)
	own.Peak = l.mu.own.Peak
	l.mu.Unlock()

	writeErr := n.write(*own)

	l.mu.Lock()
	defer l.mu.Unlock()
	if writeErr != nil {
		l.mu.own.Live -= bytes
		return nil, writeErr
	}
	own.Live, own.Peak = l.mu.own.Live, l.mu.own.Peak
	l.mu.books = next
	over := quota.Over{Quota: next.title(), Used: next.held(), Limit: next.limit()}
	l.mu.over = over.Used > over.Limit
	exceeded, changed := l.mu.over && !wasOver, over.Limit != before.limit() || next.room() > before.room()
	return func() {
		if exceeded {
			l.terms.OnOver(over)
		}
		if changed {
			l.notify()
		}
	}, err
}

// lock locks the directory. If another goroutine has failed to do that since began, lock returns the same
// error, so that goroutines do not wait for a stopped process one after the other.
func (l *Lease) lock(began time.Time) error {
	l.mu.Lock()
	blocked, at := l.mu.blocked, l.mu.blockedAt
	l.mu.Unlock()
	if blocked != nil && at.After(began) {
		return blocked
	}
	err := l.node.lock(unix.LOCK_EX)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.blocked, l.mu.blockedAt = err, time.Now()
	return err
}

// putBack attaches the lease again after its file was removed. It does not check the sum of all quotas:
// in any case others must see what this process holds.
func (l *Lease) putBack() *BrokenError {
	n := l.node
	l.mu.Lock()
	if !n.removed { // a failure that is repeated counts once
		n.removed = true
		l.mu.own.Lost++
	}
	own := l.mu.own
	l.mu.Unlock()
	cause := l.attach(&own, false)
	return &BrokenError{
		Ledger: l.terms.Dir, Device: l.terms.Device, File: n.name, Live: own.Live, Lost: own.Lost, Cause: cause,
	}
}

// attach gives this process a locked file with the content own, after it has checked and completed own if
// the process joins. If attach fails, the lease keeps its node.
func (l *Lease) attach(own *record, joins bool) error {
	n, err := openNode(l.terms.Dir, l.terms.Device, unix.LOCK_EX)
	if err != nil {
		return err
	}
	if joins {
		err = l.agree(n, own)
	}
	if err == nil {
		err = n.create(*own)
	}
	if err != nil {
		return errors.Join(err, n.close())
	}
	n.unlock()
	old := l.node
	l.node = n
	if old != nil {
		return old.close()
	}
	return nil
}

// ErrBroken is the error that a BrokenError matches.
var ErrBroken = errors.New("the ledger is broken")

// BrokenError reports that the file of this process was removed, alone or with its directory. Until the
// process noticed, others did not see it, so that together they may hold more than they should. It
// matches ErrBroken.
type BrokenError struct {
	Ledger string // the directory
	Device string // the GPU
	File   string // the name of the file that is missing
	Live   int64  // how many bytes this process holds
	Lost   int64  // how often this has happened to this process, including this time
	Cause  error  // why there is no new file; nil if there is one
}

func (e *BrokenError) Error() string {
	s := fmt.Sprintf("quota: the ledger in %s: %s was removed while this process, which holds %d bytes of %s, uses it",
		e.Ledger, e.File, e.Live, e.Device)
	if e.Cause != nil {
		s += fmt.Sprintf("; it could not be put back: %v", e.Cause)
	}
	return s + ": keep whatever removes old files away from the directory"
}

// Unwrap returns ErrBroken and the cause.
func (e *BrokenError) Unwrap() []error { return []error{ErrBroken, e.Cause} }
