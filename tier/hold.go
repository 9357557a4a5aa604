package tier

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/spillway-db/spillway/internal/invariants"
)

// HoldKind says what keeps memory of a space.
type HoldKind uint8

// The kinds.
const (
	HandleHold HoldKind = iota + 1 // an open handle on a batch
	RecordHold                     // an open record, whose arrays lie in the memory
)

// String returns "handle" or "record".
func (k HoldKind) String() string {
	switch k {
	case HandleHold:
		return "handle"
	case RecordHold:
		return "record"
	}
	return "unknown"
}

// Hold is an entry in a space's account of who keeps its memory: an open handle or an
// open record. While it is entered, the memory can neither be freed nor moved. The zero
// value is ready for Begin, and must not be copied. It is safe for concurrent use.
//
// Entering costs one lock of the space and allocates nothing. The account is read only by
// those who wait, or who ask: Space.Holds.
type Hold struct {
	view  HoldView
	space *Space

	// Guarded by the space's lock.
	next, prev *Hold
	entered    bool
}

// HoldView is what one Hold says.
type HoldView struct {
	Kind HoldKind
	// Memory is what is kept. Holds with the same Memory keep the same bytes. It is a
	// *Buffer, or something with a method Buffers() []*Buffer. If it has EachShared(func(*Buffer)),
	// the buffers that this calls its function with are kept, too, as dictionaries are.
	Memory any
	Bytes  int64 // charged for the memory, without what is shared
	Owner  any   // the task that holds it, a *reservation.Owner; nil if that is unknown
	About  About // what the memory belongs to; may be nil
	Stack  invariants.Trace
}

// Each calls f with all that is kept and what that is charged: the memory, and what it shares
// with others.
func (v *HoldView) Each(f func(memory any, bytes int64)) {
	f(v.Memory, v.Bytes)
	v.eachShared(func(b *Buffer) { f(b, b.Charge()) })
}

func (v *HoldView) eachShared(f func(*Buffer)) {
	if m, ok := v.Memory.(interface{ EachShared(func(*Buffer)) }); ok {
		m.EachShared(f)
	}
}

// About describes what memory belongs to.
type About interface {
	// Describe fills in what it knows. It is called with no lock held.
	Describe(*Holding)
}

// Begin enters h into the account of the space. It must be called once.
func (h *Hold) Begin(s *Space, v HoldView) {
	v.Stack = invariants.Stack()
	h.view, h.space = v, s
	s.mu.Lock()
	defer s.mu.Unlock()
	h.entered = true
	h.next = s.mu.holds
	if h.next != nil {
		h.next.prev = h
	}
	s.mu.holds = h
	s.holdChanges.Add(1)
}

// SetOwner says whose the hold is. It may be called while the hold is entered.
func (h *Hold) SetOwner(owner any) {
	s := h.space
	s.mu.Lock()
	defer s.mu.Unlock()
	h.view.Owner = owner
	s.holdChanges.Add(1)
}

// Owner returns whose the hold is.
func (h *Hold) Owner() any {
	h.space.mu.Lock()
	defer h.space.mu.Unlock()
	return h.view.Owner
}

// End takes h out of the account. Ending it again, or before Begin, does nothing.
func (h *Hold) End() {
	s := h.space
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !h.entered {
		return
	}
	h.entered = false
	if h.prev != nil {
		h.prev.next = h.next
	} else {
		s.mu.holds = h.next
	}
	if h.next != nil {
		h.next.prev = h.prev
	}
	h.next, h.prev = nil, nil
	s.holdChanges.Add(1)
}

// Holds appends a view of each open hold of the space to dst and returns it. The order
// is not defined.
func (s *Space) Holds(dst []HoldView) []HoldView {
	s.mu.Lock()
	defer s.mu.Unlock()
	for h := s.mu.holds; h != nil; h = h.next {
		dst = append(dst, h.view)
	}
	return dst
}

// HoldChanges rises whenever a hold of the space begins or ends.
func (s *Space) HoldChanges() uint64 { return s.holdChanges.Load() }

// Holding describes one hold for people.
type Holding struct {
	Space     ID
	Kind      HoldKind
	Bytes     int64  // charged for all that it keeps, shared or not
	Batch     uint64 // its id; 0 if it is none
	Plan      string // the plan's name; "" if it is in none
	Operator  string
	Port      int
	Partition int
	Owner     string // the task's name; "" if that is unknown
	Stack     string // where it was taken; only in an invariants build
}

// Describe returns what v says, for people. It must be called with no lock held.
func (v *HoldView) Describe(id ID) Holding {
	h := Holding{Space: id, Kind: v.Kind, Stack: v.Stack.String()}
	v.Each(func(_ any, bytes int64) { h.Bytes += bytes })
	if v.About != nil {
		v.About.Describe(&h)
	}
	if o, ok := v.Owner.(interface{ Name() string }); ok {
		h.Owner = o.Name()
	}
	return h
}

// String returns, for example, `handle on batch 7 of plan "q", operator join:0, partition
// 3, owner "probe"`.
func (h Holding) String() string {
	var b strings.Builder
	b.WriteString(h.Kind.String())
	if h.Batch != 0 {
		fmt.Fprintf(&b, " on batch %d", h.Batch)
	}
	if h.Plan != "" {
		fmt.Fprintf(&b, " of plan %q", h.Plan)
	}
	if h.Operator != "" {
		fmt.Fprintf(&b, ", operator %s:%d, partition %d", h.Operator, h.Port, h.Partition)
	}
	if h.Owner != "" {
		fmt.Fprintf(&b, ", owner %q", h.Owner)
	}
	return b.String()
}

// holdsByBuffer returns the open holds by the buffers that they keep.
func (s *Space) holdsByBuffer() map[*Buffer][]*Holding {
	out := make(map[*Buffer][]*Holding)
	for _, v := range s.Holds(nil) {
		h := v.Describe(s.cfg.ID)
		switch m := v.Memory.(type) {
		case *Buffer:
			out[m] = append(out[m], &h)
		case interface{ Buffers() []*Buffer }:
			for _, b := range m.Buffers() {
				out[b] = append(out[b], &h)
			}
		}
		v.eachShared(func(b *Buffer) { out[b] = append(out[b], &h) })
	}
	return out
}

// Leak is what was still outstanding when its space was closed: a buffer, or bytes
// that were promised.
type Leak struct {
	Space   ID
	Bytes   int64     // charged
	Promise bool      // bytes that a reservation holds, in no buffer
	Holders []Holding // who keeps the buffer, as far as that is known
	Stack   string    // where the bytes were taken; only in an invariants build
}

// Leaks lists the outstanding buffers, the largest first, and who keeps them. It must be
// called with no lock held.
func (s *Space) Leaks() []Leak {
	by := s.holdsByBuffer()
	var out []Leak
	for _, b := range s.outstanding() {
		l := Leak{Space: s.cfg.ID, Bytes: b.charge, Stack: b.stack.String()}
		for _, h := range by[b] {
			l.Holders = append(l.Holders, *h)
		}
		out = append(out, l)
	}
	slices.SortFunc(out, func(a, b Leak) int { return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Stack, b.Stack)) })
	return out
}

func (s *Space) outstanding() []*Buffer {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]*Buffer, 0, len(s.mu.buffers))
	for b := range s.mu.buffers {
		out = append(out, b)
	}
	return out
}
