package leases

import (
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/causes"
)

// ErrBroken is what a BrokenError matches.
var ErrBroken = errors.New("the ledger is broken")

// BrokenError reports that files of a ledger were removed while processes used it. For a moment
// processes did not see each other. So together they may hold more than they should. It matches
// ErrBroken.
type BrokenError struct {
	Ledger string // the directory
	Device string // whose books they are
	File   string // what is not there any more: this process's lease, or the node's generation
	Live   int64  // how many bytes this process holds
	Lost   int64  // how often it has happened to this process, and this time
	Cause  error  // why the file could not be put back; nil if it was
}

func (e *BrokenError) Error() string {
	s := fmt.Sprintf("quota: the ledger in %s: %s was removed while this process, which holds %d bytes of %s, uses it", e.Ledger, e.File, e.Live, e.Device)
	if e.Cause != nil {
		s += fmt.Sprintf("; it could not be put back: %v", e.Cause)
	}
	return s + ": keep whatever removes old files away from the directory"
}

// Unwrap returns ErrBroken and the cause, if there is one.
func (e *BrokenError) Unwrap() []error { return []error{ErrBroken, e.Cause} }

// Warnings lists what the lease has to warn of: that its files were removed. Later calls
// may say more.
func (l *Lease) Warnings() []diag.Warning {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.lost == 0 {
		return nil
	}
	return []diag.Warning{(&BrokenError{Ledger: l.terms.Dir, Device: l.terms.Device}).Warning()}
}

// Lost returns how often files of the ledger that this process used were removed.
func (l *Lease) Lost() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.lost
}

// Warning makes a warning of it, whose text is the same each time that it happens to a
// lease.
func (e *BrokenError) Warning() diag.Warning {
	return causes.Warn(causes.Ledger, "files of the ledger in %s were removed while processes use it: for a moment they did not see each other, and may hold more of %s than they should",
		e.Ledger, e.Device)
}

// unlinked reports whether a file of the ledger that this process uses has no name any more.
// It takes two system calls that follow no path.
func (l *Lease) unlinked() bool {
	l.mu.Lock()
	n, own, closed := l.mu.node, l.mu.own, l.mu.closed
	l.mu.Unlock()
	return !closed && (isUnlinked(own.file) || isUnlinked(n.genFile))
}

// look says what is missing of the ledger as this process knows it, by the path; "" for nothing.
func (l *Lease) look() string {
	l.mu.Lock()
	n, own, closed := l.mu.node, l.mu.own, l.mu.closed
	l.mu.Unlock()
	switch {
	case closed:
		return "" // and so may its lease be
	case !n.has(own.name, own.id):
		return own.name
	case !n.has(genName, n.genID):
		return genName
	}
	return ""
}

// mend puts back what is missing: it joins the ledger again, under the name of a new lease, with
// what this process holds. What it knows of others stays. The caller has the right to scan. The
// error is nil if nothing is missing. Otherwise it is a *BrokenError, which the caller must report.
func (l *Lease) mend() error {
	missing := l.look()
	if missing == "" {
		return nil
	}
	cause := l.rejoin()
	l.mu.Lock()
	defer l.mu.Unlock()
	if cause == nil || l.mu.lost == 0 { // and not each time that it is tried again
		l.mu.lost++
	}
	e := &BrokenError{Ledger: l.terms.Dir, Device: l.terms.Device, File: missing, Live: l.mu.own.live.Load(), Lost: l.mu.lost, Cause: cause}
	return e
}

// rejoin makes a new lease where the ledger should be, and gives up the old one. It does not check
// that the quotas of all are still within what is advertised: what is held must be visible.
func (l *Lease) rejoin() error {
	n, err := openNode(l.terms.Dir, l.terms.Device, true)
	if err != nil {
		return err
	}
	unlock, err := n.lock()
	if err != nil {
		return errors.Join(err, n.close())
	}
	defer unlock()
	l.mu.Lock()
	old, oldNode := l.mu.own, l.mu.node
	l.mu.Unlock()
	own, err := n.create(newName(), old.head, old.limit.Load())
	if err != nil {
		return errors.Join(err, n.close())
	}
	l.mu.Lock()
	live := old.live.Load()
	own.live.Store(live)
	own.claim.Store(live)
	own.peak.Store(old.peak.Load())
	own.limit.Store(old.limit.Load()) // which may have been lowered since
	own.lost.Store(l.mu.lost + 1)
	l.mu.own, l.mu.node = own, n
	l.mu.known = -1
	l.mu.Unlock()
	old.close() // its file is removed as those of the dead are, if it is there still
	n.generation.Add(1)
	return oldNode.close()
}
