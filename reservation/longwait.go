package reservation

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// LongWaitAfter is how long a wait takes before it is reported. The moves that make room
// are over by then: 64 MiB at 20 MB/s, a slow disk, take 3 s. It is reported again after
// twice that time, then four times, and so on.
const LongWaitAfter = 5 * time.Second

// longWaitGap is the least time between two reports, or looks at who holds a space.
const longWaitGap = time.Second

// LongWait describes a wait that takes long. Sizes are bytes.
type LongWait struct {
	Space     tier.ID
	Requested int64         // by the oldest waiter, as the space charges it
	Waited    time.Duration // by it
	Owner     string        // of it; "" if it has none
	Waiters   int           // all that wait for the space
	Waiting   int64         // the sum of what they need
	Account   Account       // of the space
}

// String returns the wait as one line.
func (w LongWait) String() string {
	s := fmt.Sprintf("%s: %d bytes have been waited for since %v", w.Space, w.Requested, w.Waited.Round(time.Second))
	if w.Owner != "" {
		s += fmt.Sprintf(" by %q", w.Owner)
	}
	if w.Waiters > 1 {
		s += fmt.Sprintf(" (%d waiters need %d bytes there)", w.Waiters, w.Waiting)
	}
	return s + "; " + w.Account.String()
}

// LogValue makes a LongWait's attributes for a log.
func (w LongWait) LogValue() slog.Value {
	return slog.GroupValue(slog.String("space", w.Space.String()), slog.Int64("requested", w.Requested),
		slog.Duration("waited", w.Waited), slog.String("owner", w.Owner), slog.Int("waiters", w.Waiters),
		slog.Int64("waiting", w.Waiting), slog.Int64("available", w.Account.Available), slog.String("held", w.Account.String()))
}

// Account says who has the bytes of a space that are in use. Sizes are bytes.
type Account struct {
	Space     tier.ID
	Used      int64 // in all
	Available int64
	Limit     int64
	Reserved  int64    // promised, and in no buffer
	Engine    int64    // the engine's own for as long as it is open, such as staging
	Holders   []Holder // the largest first
}

// Holder is a part of an Account: what one owner, or one operator of a plan, keeps by one
// kind of holds. Those on the same memory count once.
type Holder struct {
	What     string // "handle", "record" or "reservation"
	Owner    string // the task; "" if that is unknown
	Plan     string
	Operator string
	Port     int
	Count    int
	Bytes    int64  // what the memory is charged, or what reservations promise, drawn or not
	Batch    uint64 // one of the batches; 0 if there is none
}

// String returns, for example, `3 handles of plan "q", operator join:0: 4096 bytes`.
func (h Holder) String() string {
	s := "1 " + h.What
	if h.Count != 1 {
		s = fmt.Sprintf("%d %ss", h.Count, h.What)
	}
	if h.Plan != "" {
		s += fmt.Sprintf(" of plan %q", h.Plan)
	}
	if h.Operator != "" {
		s += fmt.Sprintf(", operator %s:%d", h.Operator, h.Port)
	}
	if h.Owner != "" {
		s += fmt.Sprintf(", owner %q", h.Owner)
	}
	if h.Batch != 0 {
		s += fmt.Sprintf(" (batch %d", h.Batch)
		if h.Count > 1 {
			s += " and others"
		}
		s += ")"
	}
	return s + fmt.Sprintf(": %d bytes", h.Bytes)
}

// String returns the account as one line.
func (a Account) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d of %d bytes are available", a.Available, a.Limit)
	if a.Reserved > 0 {
		fmt.Fprintf(&b, ", %d promised", a.Reserved)
	}
	if a.Engine > 0 {
		fmt.Fprintf(&b, ", %d the engine's own", a.Engine)
	}
	for i, h := range a.Holders {
		if i == maxHolders {
			fmt.Fprintf(&b, ", and %d more", len(a.Holders)-i)
			break
		}
		b.WriteString(", " + h.String())
	}
	if len(a.Holders) == 0 {
		b.WriteString(", no open handle or record keeps any")
	}
	return b.String()
}

// Account says who has the bytes of a space; false if the manager does not have it. It
// takes time in proportion to the handles and records that are open there.
func (m *Manager) Account(id tier.ID) (Account, bool) {
	i := m.spaces.index(id)
	if i < 0 {
		return Account{}, false
	}
	l := m.lines[i]
	a := Account{
		Space: id, Used: l.space.Used(), Available: l.space.Available(), Limit: l.space.Limit(),
		Reserved: l.space.Usage().Reserved, Engine: l.space.Held(),
	}
	byKey := make(map[Holder]*Holder)
	seen := make(map[any]map[Holder]bool)
	for _, v := range l.space.Holds(nil) {
		d := v.Describe(id)
		key := Holder{What: d.Kind.String(), Owner: d.Owner, Plan: d.Plan, Operator: d.Operator, Port: d.Port}
		h := byKey[key]
		if h == nil {
			one := key
			h = &one
			byKey[key] = h
		}
		h.Count++
		if h.Batch == 0 || d.Batch < h.Batch {
			h.Batch = d.Batch
		}
		v.Each(func(memory any, bytes int64) {
			if !seen[memory][key] {
				h.Bytes += bytes
				if seen[memory] == nil {
					seen[memory] = make(map[Holder]bool)
				}
				seen[memory][key] = true
			}
		})
	}
	m.ownedIn(l, byKey)
	for _, h := range byKey {
		a.Holders = append(a.Holders, *h)
	}
	slices.SortFunc(a.Holders, func(a, b Holder) int {
		return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.What, b.What), cmp.Compare(a.Owner, b.Owner), cmp.Compare(a.Operator, b.Operator))
	})
	return a, true
}

// ownedIn adds the reservations of owners.
func (m *Manager) ownedIn(l *line, to map[Holder]*Holder) {
	t := &m.progress.owners
	t.Lock()
	var all []*Owner
	for o := range t.open {
		all = append(all, o)
	}
	t.Unlock()
	for _, o := range all {
		for _, r := range o.reservations(t) {
			n := r.Bytes()
			if r.rec.line != l || n == 0 {
				continue
			}
			key := Holder{What: "reservation", Owner: o.name}
			if to[key] == nil {
				one := key
				to[key] = &one
			}
			to[key].Count++
			to[key].Bytes += n
		}
	}
}

// ended is the error of a wait that its context ended. After a second it says who holds
// the room.
func (m *Manager) ended(ctx context.Context, w *waiter, waited time.Duration) error {
	e := ended(ctx, w.String())
	if waited < longWaitGap {
		return e
	}
	kept := int64(-1)
	for i := range w.slots { // of the candidates the one where handles and records keep most
		d := m.recent(w.slots[i].line)
		var n int64
		for _, h := range d.Holders {
			n += h.Bytes
		}
		if n > kept {
			kept, e.account = n, &d.Account
		}
	}
	return e
}

// recent returns an account of the line's space that is at most a second old.
func (m *Manager) recent(l *line) *dated {
	now := time.Since(m.made)
	if d := l.account.Load(); d != nil && now-d.at < longWaitGap {
		return d
	}
	a, _ := m.Account(l.space.ID())
	d := &dated{a, now}
	l.account.Store(d)
	return d
}

// dated is an account and when, since Manager.made, it was looked up.
type dated struct {
	Account
	at time.Duration
}

// patience is how a manager notices that waits take long. There is a timer while
// somebody waits. Guarded by Manager.mu.
type patience struct {
	tell  func(LongWait) // immutable
	timer *time.Timer
	armed bool
}

// expectLocked arranges that a wait that begins now is reported when it has taken long.
func (m *Manager) expectLocked(w *waiter) {
	w.begun = time.Since(m.made)
	w.due = LongWaitAfter
	if p := &m.patience; p.tell != nil && !p.armed {
		m.reportLaterLocked(LongWaitAfter)
	}
}

func (m *Manager) reportLaterLocked(after time.Duration) {
	p := &m.patience
	p.armed = true
	m.progress.looks.Add(1)
	if p.timer == nil {
		p.timer = time.AfterFunc(after, m.reportLong)
		return
	}
	p.timer.Reset(after)
}

// forgetLongLocked ends the reports.
func (m *Manager) forgetLongLocked() {
	if p := &m.patience; p.armed && p.timer.Stop() { // else a report is under way
		p.armed = false
		m.progress.looks.Done()
	}
}

// reportLong is called by the timer: it reports the oldest wait of each line, if it is due.
func (m *Manager) reportLong() {
	defer m.progress.looks.Done()
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
			one := LongWait{Space: l.space.ID(), Requested: head.Need(), Waited: waited, Waiters: l.waits.Len(), Waiting: l.waits.Sum()}
			if w.owner != nil {
				one.Owner = w.owner.name
			}
			all = append(all, one)
		}
	}
	m.mu.Unlock()
	for _, one := range all {
		one.Account, _ = m.Account(one.Space)
		m.panics.Do("Config.LongWait", func() { m.patience.tell(one) })
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.patience.armed = false
	if m.mu.oldest == nil || m.closed.Load() {
		return
	}
	next, now := time.Duration(1<<62), time.Since(m.made)
	for _, l := range m.lines {
		if head := l.waits.Head(); head != nil {
			next = min(next, head.Of.w.begun+head.Of.w.due-now)
		}
	}
	m.reportLaterLocked(max(longWaitGap, min(next, LongWaitAfter)))
}
