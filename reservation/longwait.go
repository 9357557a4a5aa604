package reservation

import (
	"context"
	"time"

	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// longWaitAfter is how long a wait takes before it is reported. The moves that make room
// are over by then: 64 MiB at 20 MB/s, a slow disk, take 3 s. It is reported again after
// twice that time, then four times, and so on.
const longWaitAfter = 5 * time.Second

// longWaitGap is the least time between two reports, or between two reads of the holders of a
// space.
const longWaitGap = time.Second

// LongWait describes a wait that takes long. Sizes are bytes.
type LongWait struct {
	Space     tier.ID
	Requested int64         // by the oldest waiter, as the space charges it
	Waited    time.Duration // by it
	Owner     string        // of it; "" if it has none
	Waiters   int           // all that wait for the space
	Waiting   int64         // the sum of what they need
	Holdings  tier.Holdings // of the space
}

// Holdings lists the holders of a space's bytes; false if the manager does not have the space. It
// takes time in proportion to the buffers there. Batches are Engine.Holders' to tell.
func (m *Manager) Holdings(id tier.ID) (tier.Holdings, bool) { return m.Inside().Holdings(id, nil) }

// Holdings is Manager.Holdings with the batches of the space; see tier.Space.Holdings.
func (m inside) Holdings(id tier.ID, batches func(add func(by tier.Holder, memory any, bytes int64))) (tier.Holdings, bool) {
	i := m.spaces.index(id)
	if i < 0 {
		return tier.Holdings{}, false
	}
	return m.lines[i].space.Inside().Holdings(m.ownedIn(m.lines[i]), batches), true
}

// ownedIn returns what the reservations of owners promise in a line, and have in no buffer.
func (m *Manager) ownedIn(l *line) (promises []tier.Holder) {
	open, _ := m.progress.owners.reservations()
	for o, all := range open {
		for _, r := range all {
			if r.rec.line == l {
				promises = append(promises, tier.Holder{Owner: o.name, Bytes: r.Unused()})
			}
		}
	}
	return promises
}

// giveUp ends a wait that its context has ended. After a second its error names the holders of the
// room. They are looked up when the wait is in no line any more, because that may take long.
func (m *Manager) giveUp(ctx context.Context, w *waiter) {
	err := ended(ctx, w.String())
	if !m.withdraw(w, err) || time.Since(m.made)-w.begun < longWaitGap {
		return
	}
	e, kept := &longError{error: err}, int64(-1)
	for i := range w.slots { // of the candidates the one where holders keep most
		d := m.recent(w.slots[i].line)
		if d == nil {
			continue
		}
		var n int64
		for _, h := range d.Holders {
			n += h.Bytes
		}
		if n > kept {
			kept, e.holdings, e.hint = n, &d.Holdings, w.slots[i].line.space.Inside().Hint()
		}
	}
	if e.holdings != nil {
		w.err = e
	}
}

// recent returns the holdings of the line's space, at most a second old. Of many waits that end at once
// one looks. For the others it returns nil: a payload that does not answer must hold up no more.
func (m *Manager) recent(l *line) *dated {
	if d := l.known(); d != nil || !l.looking.CompareAndSwap(false, true) {
		return d
	}
	defer l.looking.Store(false)
	if d := l.known(); d != nil { // another has looked just now
		return d
	}
	d := &dated{m.holders(l.space.ID()), time.Since(m.made)}
	l.holdings.Store(d)
	return d
}

// known returns the holdings that were looked up last, nil if that is more than a second ago.
func (l *line) known() *dated {
	if d := l.holdings.Load(); d != nil && time.Since(l.m.made)-d.at < longWaitGap {
		return d
	}
	return nil
}

// holders asks Config.Holders.
func (m *Manager) holders(id tier.ID) (h tier.Holdings) {
	lockrank.AssertNone("the holders of a space are looked up")
	ok := false
	if m.config.Holders != nil {
		m.panics.Do("Config.Holders", func() { h, ok = m.config.Holders(id) })
	}
	if !ok {
		h, _ = m.Holdings(id)
	}
	return h
}

// dated is the holdings of a space and when, since Manager.made, it was looked up.
type dated struct {
	tier.Holdings
	at time.Duration
}

// reportLong is called by the alarm: it reports the oldest wait of each line, if it is due.
func (m *Manager) reportLong() {
	lockrank.AssertNone("long waits are reported")
	var all []LongWait
	m.mu.Lock()
	now := time.Since(m.made)
	for _, l := range m.lines {
		head := l.waits.Head()
		if head == nil {
			continue
		}
		w := head.Of.w
		if waited := now - w.begun; waited >= w.due {
			w.due = 2 * waited // a wait in several lines is reported once
			one := LongWait{Space: l.space.ID(), Requested: head.Of.need, Waited: waited, Waiters: l.waits.Len(), Waiting: l.waits.Sum()}
			if w.owner != nil {
				one.Owner = w.owner.name
			}
			all = append(all, one)
		}
	}
	m.mu.Unlock()
	for _, one := range all {
		one.Holdings = m.holders(one.Space)
		m.panics.Do("Config.LongWait", func() { m.config.LongWait(one) })
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.patience.Done()
	if m.mu.ring.next == &m.mu.ring || m.closed.Load() {
		return
	}
	next, now := time.Duration(1<<62), time.Since(m.made)
	for _, l := range m.lines {
		if head := l.waits.Head(); head != nil {
			next = min(next, head.Of.w.begun+head.Of.w.due-now)
		}
	}
	m.patience.Start(max(longWaitGap, min(next, longWaitAfter)), m.reportLong)
}
