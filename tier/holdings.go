package tier

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/internal/named"
)

// Holding describes one hold on memory for people: an open handle, an open record, or the
// reservations of an owner.
type Holding struct {
	Space     ID
	Kind      string // "handle", "record" or "reservation"
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

// Describe returns what is known about a hold in the space, for people, except its stack. It must be
// called with no lock held.
func (s *Space) Describe(v *books.HoldView) Holding {
	h := Holding{Space: s.ID(), Kind: v.Kind, Bytes: v.Bytes, Owner: nameOf(v.Owner)}
	eachShared(v.Memory, func(b *Buffer) { h.Bytes += b.charge })
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

// eachShared calls f with the dictionaries that memory shares with other memory.
func eachShared(memory any, f func(*Buffer)) {
	if m, ok := memory.(interface{ EachShared(func(*Buffer)) }); ok {
		m.EachShared(f)
	}
}

// Leak is bytes that were still in use when their space was closed: those that one owner has
// promised, those that handles and records keep, or the rest.
type Leak struct {
	Space   ID
	Bytes   int64     // charged
	Promise bool      // of open reservations, drawn or not
	Holders []Holding // what keeps the bytes, as far as that is known
	Stack   string    // where they were reserved; only in an invariants build
}

// Leaks lists the bytes that are in use, the largest leak first. It must be called with no lock
// held. Clean images are not among them, because their batches are in other spaces.
func (s *Space) Leaks() (leaks []Leak) {
	u := s.State().Usage
	rest := u.Live + u.Reserved
	add := func(l Leak) {
		if rest -= l.Bytes; l.Bytes > 0 {
			l.Space = s.ID()
			leaks = append(leaks, l)
		}
	}
	for _, p := range s.Books.Promises() {
		h := Holding{Space: s.ID(), Kind: "reservation", Bytes: p.Promised, Owner: nameOf(p.Owner)}
		add(Leak{Bytes: p.Promised, Promise: true, Holders: []Holding{h}, Stack: p.Stack.String()})
	}
	kept := make(map[any]*Leak)       // by memory
	counted := make(map[*Buffer]bool) // dictionaries, which count with the oldest
	for _, v := range s.Books.Holds() {
		l := kept[v.Memory]
		if l == nil {
			l = &Leak{Bytes: v.Bytes}
			kept[v.Memory] = l
			eachShared(v.Memory, func(b *Buffer) {
				if !counted[b] {
					counted[b] = true
					l.Bytes += b.charge
				}
			})
		}
		h := s.Describe(&v)
		h.Stack = v.Stack.String() // takes long
		l.Holders = append(l.Holders, h)
	}
	for _, l := range kept {
		add(*l)
	}
	add(Leak{Bytes: rest})
	slices.SortFunc(leaks, func(a, b Leak) int { return cmp.Compare(b.Bytes, a.Bytes) })
	return leaks
}

// maxHolders is how many holders, and how many batches, Holdings.String names.
const maxHolders = 8

// Holdings lists the holders of the used bytes of a space. Sizes are bytes. The parts are looked up
// one after the other, so they add up to Used while nothing is put, moved or given back. A batch
// that a program has made of a reservation's memory counts twice until the reservation is released.
type Holdings struct {
	Space     ID
	Used      int64 // in all
	Available int64
	Limit     int64
	Reserved  int64    // promised, and in no buffer
	Engine    int64    // the engine's own for as long as it is open, such as staging
	Retired   int64    // freed, but the device may still read it
	Others    int64    // promised to moves: where data is being moved to
	External  int64    // what others hold on the device, as it was sampled; not part of Used
	Cached    int64    // copies, which go when the room is needed; not part of Used
	Holders   []Holder // the largest first
	// Batches are those at rest and in transit, by plan and operator: what the monitor could move,
	// or moves. A manager that is no engine's does not know them: there they are buffers.
	Batches []Holder
}

// Holder is a part of Holdings: what one owner, or one operator of a plan, keeps by one kind of
// holds. With Engine, Retired and Others the Bytes of all make up Used while nothing moves.
type Holder struct {
	// The field What is the kind of holder: "handle", "record", "reservation" (promised bytes, drawn or not)
	// or "buffer" (all other used bytes: in buffers whose reservation is released, and dictionaries
	// that only clean images use). In Batches it is "batch".
	What     string
	Owner    string // the task; "" if that is unknown
	Plan     string
	Operator string
	Port     int
	Count    int    // of reservations and buffers 0: only their bytes are known
	Bytes    int64  // what the memory is charged; memory of several holds counts with the oldest
	Batch    uint64 // one of the batches; 0 if there is none
}

// text returns, for example, `3 handles of plan "q", operator join:0 (batch 7 and others): 4096 bytes`.
func (h Holder) text() string {
	s := h.What + "s"
	switch {
	case h.Count == 1:
		s = "1 " + h.What
	case h.What == "batch":
		s = fmt.Sprintf("%d batches", h.Count)
	case h.Count > 1:
		s = fmt.Sprintf("%d %s", h.Count, s)
	}
	s += placed(h.Plan, h.Operator, h.Port, "", h.Owner)
	switch {
	case h.Batch != 0 && h.Count > 1:
		s += fmt.Sprintf(" (batch %d and others)", h.Batch)
	case h.Batch != 0:
		s += fmt.Sprintf(" (batch %d)", h.Batch)
	}
	return fmt.Sprintf("%s: %d bytes", s, h.Bytes)
}

// String returns the holdings as one line.
func (a Holdings) String() string {
	s := fmt.Sprintf("%d of %d bytes are available", a.Available, a.Limit)
	part := func(bytes int64, what string) {
		if bytes > 0 {
			s += fmt.Sprintf(", %d %s", bytes, what)
		}
	}
	part(a.Reserved, "promised")
	part(a.Engine, "the engine's own")
	part(a.Retired, "freed and not yet back")
	part(a.External, "held by others on the device")
	part(a.Cached, "in copies, which go when the room is needed")
	for _, all := range [][]Holder{a.Holders, a.Batches} {
		for _, h := range all[:min(len(all), maxHolders)] {
			s += ", " + h.text()
		}
		part(int64(len(all)-maxHolders), "more")
	}
	part(a.Others, "promised to moves")
	if a.Used == 0 {
		s += ", nothing is held"
	}
	return s
}

// Holdings lists the holders of the space's used bytes. batches, which may be nil, calls its argument
// for each batch in the space, with its place and id, its memory, and its charge.
// Holdings takes time in proportion to the handles, records and batches.
func (s *Space) Holdings(batches func(func(by Holder, memory any, bytes int64))) Holdings {
	u := s.State()
	a := Holdings{
		Space: s.ID(), Used: u.Used(), Available: u.Available, Limit: u.Limit, Reserved: u.Reserved,
		Retired: u.Retired, Engine: u.Held - u.Unsure, External: u.External, Cached: u.Cached,
	}
	rest := a.Used - a.Engine - a.Retired
	sums := make(map[Holder]*Holder)
	add := func(by Holder, count int, bytes int64) {
		batch := by.Batch
		by.Batch = 0
		h := sums[by]
		if h == nil {
			h = &by
			sums[by] = h
		}
		h.Count += count
		h.Bytes += bytes
		h.Batch = max(h.Batch, batch)
		rest -= bytes
	}
	for _, p := range s.Books.Promises() {
		switch {
		case p.Owner == books.Occupied:
		case p.Moves:
			a.Others += p.Promised
			rest -= p.Promised
		default:
			add(Holder{What: "reservation", Owner: nameOf(p.Owner)}, 0, p.Promised)
		}
	}
	counted := make(map[any]bool)
	keep := func(by Holder, memory any, bytes int64) {
		s.subscribers.Panics.Do("a payload", func() { // also of a program's type that Go cannot compare
			if counted[memory] {
				bytes = 0
			}
			counted[memory] = true
			eachShared(memory, func(b *Buffer) {
				if !counted[b] {
					counted[b] = true
					bytes += b.charge
				}
			})
		})
		add(by, 1, bytes)
	}
	for _, v := range s.Books.Holds() {
		d := s.Describe(&v)
		by := Holder{What: d.Kind, Owner: d.Owner, Plan: d.Plan, Operator: d.Operator, Port: d.Port, Batch: d.Batch}
		keep(by, v.Memory, v.Bytes)
	}
	if batches != nil {
		batches(keep)
	}
	for _, h := range sums {
		if h.What == "batch" {
			a.Batches = append(a.Batches, *h)
		} else {
			a.Holders = append(a.Holders, *h)
		}
	}
	if rest > 0 {
		a.Holders = append(a.Holders, Holder{What: "buffer", Bytes: rest})
	}
	for _, all := range [][]Holder{a.Holders, a.Batches} {
		slices.SortFunc(all, func(a, b Holder) int {
			return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.What, b.What), cmp.Compare(a.Plan, b.Plan),
				cmp.Compare(a.Operator, b.Operator), cmp.Compare(a.Port, b.Port), cmp.Compare(a.Owner, b.Owner))
		})
	}
	return a
}
