package tier

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/spillway-db/spillway/internal/holds"
	"github.com/spillway-db/spillway/internal/named"
)

// Holding describes one hold on memory, an open handle or an open record, for people.
type Holding struct {
	Space     ID
	Kind      string // "handle" or "record"
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
	var b strings.Builder
	b.WriteString(h.Kind)
	if h.Batch != 0 {
		fmt.Fprintf(&b, " on batch %d", h.Batch)
	}
	if h.Plan != "" {
		b.WriteString(" of plan " + named.Quoted(h.Plan))
	}
	if h.Operator != "" {
		fmt.Fprintf(&b, ", operator %s:%d, partition %d", named.Plain(h.Operator), h.Port, h.Partition)
	}
	if h.Owner != "" {
		b.WriteString(", owner " + named.Quoted(h.Owner))
	}
	return b.String()
}

// Holds returns the account of what keeps memory of the space.
func (in inside) Holds() *holds.List { return &in.holds }

// Describe returns what a view of one of the space's holds says, for people. It must be called with
// no lock held.
func (in inside) Describe(v *holds.View) Holding {
	h := Holding{Space: in.cfg.ID, Kind: v.Kind, Stack: v.Stack.String()}
	in.EachKept(v, func(_ any, bytes int64) { h.Bytes += bytes })
	if about, ok := v.About.(interface{ Describe(*Holding) }); ok {
		about.Describe(&h)
	}
	if o, ok := v.Owner.(interface{ Name() string }); ok {
		h.Owner = o.Name()
	}
	return h
}

// EachKept calls f with all that a hold keeps and what that is charged: the memory, and what it
// shares with others.
func (inside) EachKept(v *holds.View, f func(memory any, bytes int64)) {
	f(v.Memory, v.Bytes)
	eachShared(v, func(b *Buffer) { f(b, b.Charge()) })
}

func eachShared(v *holds.View, f func(*Buffer)) {
	if m, ok := v.Memory.(interface{ EachShared(func(*Buffer)) }); ok {
		m.EachShared(f)
	}
}

// holdsByBuffer returns the open holds by the buffers that they keep.
func (s *Space) holdsByBuffer() map[*Buffer][]*Holding {
	out := make(map[*Buffer][]*Holding)
	for _, v := range s.holds.Append(nil) {
		h := s.Inside().Describe(&v)
		switch m := v.Memory.(type) {
		case *Buffer:
			out[m] = append(out[m], &h)
		case interface{ Buffers() []*Buffer }:
			for _, b := range m.Buffers() {
				out[b] = append(out[b], &h)
			}
		}
		eachShared(&v, func(b *Buffer) { out[b] = append(out[b], &h) })
	}
	return out
}

// Leak is what was still outstanding when its space was closed: a buffer, or bytes
// that were promised.
type Leak struct {
	Space   ID
	Bytes   int64     // charged
	Promise bool      // bytes that a reservation holds, in no buffer
	Holders []Holding // what keeps the buffer, as far as that is known
	Stack   string    // where the bytes were taken; only in an invariants build
}

// Leaks lists the outstanding buffers, the largest first, and what keeps them. It must be called
// with no lock held.
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
	slices.SortFunc(out, func(a, b Leak) int {
		return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Stack, b.Stack))
	})
	return out
}

func (s *Space) outstanding() []*Buffer {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []*Buffer
	for b := range s.mu.buffers {
		if b.holders.Load()&cached == 0 { // else its batch is what leaks, elsewhere
			out = append(out, b)
		}
	}
	return out
}
