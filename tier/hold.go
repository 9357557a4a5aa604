package tier

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/internal/holds"
	"github.com/spillway-db/spillway/internal/named"
)

// Holding describes one hold on memory for people: an open handle, an open record, or a
// reservation.
type Holding struct {
	Space     ID
	Kind      string // "handle", "record", or of a leak "reservation"
	Bytes     int64  // charged for all that it keeps, shared or not
	Batch     uint64 // its id; 0 if it is none
	Plan      string // the plan's name; "" if it is in none
	Operator  string
	Port      int
	Partition int
	Owner     string // the task's name; "" if that is unknown
	Stack     string // where it was taken; only in an invariants build
}

// String returns, for example, `handle on batch 7 of plan "q", operator join:0, partition
// 3, owner "probe"`.
func (h Holding) String() string {
	s := h.Kind
	if h.Batch != 0 {
		s += fmt.Sprintf(" on batch %d", h.Batch)
	}
	return s + placed(h.Plan, h.Operator, h.Port, fmt.Sprintf(", partition %d", h.Partition), h.Owner)
}

// placed describes a place, as far as it is known. partition is for a place that has an operator.
func placed(plan, operator string, port int, partition, owner string) (s string) {
	if plan != "" {
		s = " of plan " + named.Quoted(plan)
	}
	if operator != "" {
		s += fmt.Sprintf(", operator %s:%d%s", named.Plain(operator), port, partition)
	}
	if owner != "" {
		s += ", owner " + named.Quoted(owner)
	}
	return s
}

// Describe returns what is known about a view of one of the space's holds, for people. It must be
// called with no lock held.
func (s *Space) Describe(v *holds.View) Holding {
	h := Holding{Space: s.cfg.ID, Kind: v.Kind, Owner: nameOf(v.Owner), Stack: v.Stack.String()}
	s.EachKept(v, func(_ any, bytes int64) { h.Bytes += bytes })
	if about, ok := v.About.(interface{ Describe(*Holding) }); ok {
		about.Describe(&h)
	}
	return h
}

// nameOf returns the name of an owner; "" for none.
func nameOf(owner any) string {
	if o, ok := owner.(interface{ Name() string }); ok {
		return o.Name()
	}
	return ""
}

// EachKept calls f with all that a hold keeps and its charge: the buffers of its memory, those that
// the memory shares with others, and memory that does not list its buffers. Memory may come twice.
func (*Space) EachKept(v *holds.View, f func(memory any, bytes int64)) {
	eachKept(v.Memory, v.Bytes, f)
}

func eachKept(memory any, bytes int64, f func(memory any, bytes int64)) {
	switch m := memory.(type) {
	case *Buffer:
		f(m, m.Charge())
	case interface{ Buffers() []*Buffer }:
		for _, b := range m.Buffers() {
			f(b, b.Charge())
		}
	default:
		f(memory, bytes)
	}
	if m, ok := memory.(interface{ EachShared(func(*Buffer)) }); ok {
		m.EachShared(func(b *Buffer) { f(b, b.Charge()) })
	}
}

// Leak is what was still outstanding when its space was closed: a buffer, or bytes
// that were promised.
type Leak struct {
	Space   ID
	Bytes   int64     // charged
	Promise bool      // bytes that reservations of one owner hold, in no buffer
	Holders []Holding // what keeps the bytes, as far as that is known
	Stack   string    // where the bytes were taken; only in an invariants build
}

// Leaks lists the outstanding buffers, the largest first, and what keeps them. It must be called
// with no lock held. Clean images are not among them: their batches are what leaks, elsewhere.
func (s *Space) Leaks() (leaks []Leak) {
	by := make(map[any][]Holding)
	for _, v := range s.holds.Append(nil) {
		h := s.Describe(&v)
		s.EachKept(&v, func(memory any, _ int64) { by[memory] = append(by[memory], h) })
	}
	for b := range s.outstanding() {
		leaks = append(leaks, Leak{Space: s.cfg.ID, Bytes: b.charge, Holders: by[b], Stack: b.stack.String()})
	}
	slices.SortFunc(leaks, func(a, b Leak) int {
		return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Stack, b.Stack))
	})
	return leaks
}

// PromiseLeaks lists what open reservations hold in no buffer: one entry for each owner, and in an
// invariants build for each place where they were made.
func (s *Space) PromiseLeaks() (leaks []Leak) {
	for _, p := range s.books.Promises() {
		if p.Unused == 0 {
			continue
		}
		l := Leak{Space: s.cfg.ID, Promise: true, Stack: p.Stack.String()}
		if name := nameOf(p.Owner); name != "" {
			l.Holders = []Holding{{Space: s.cfg.ID, Kind: "reservation", Owner: name}}
		}
		i := slices.IndexFunc(leaks, func(o Leak) bool {
			return o.Stack == l.Stack && slices.Equal(o.Holders, l.Holders)
		})
		if i < 0 {
			i, leaks = len(leaks), append(leaks, l)
		}
		leaks[i].Bytes += p.Unused
	}
	return leaks
}

// outstanding returns the buffers that are in use, and the promises that they were drawn from.
func (s *Space) outstanding() map[*Buffer]*books.Promise {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make(map[*Buffer]*books.Promise)
	for b := range s.mu.buffers {
		if b.holders.Load()&cached == 0 {
			all[b] = b.promise
		}
	}
	return all
}
