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
	eachKept(v.Memory, v.Bytes, func(_ any, bytes int64) { h.Bytes += bytes })
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

// eachKept calls f with all that a hold or a batch keeps and its charge: the buffers of its memory,
// those that the memory shares with others, and memory that does not list its buffers, which has so
// many bytes. Memory may come twice.
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
		eachKept(v.Memory, v.Bytes, func(memory any, _ int64) { by[memory] = append(by[memory], h) })
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
	type place struct{ owner, stack string }
	at := make(map[place]int)
	for _, p := range s.books.Promises() {
		if p.Unused == 0 {
			continue
		}
		by := place{nameOf(p.Owner), p.Stack.String()}
		i, ok := at[by]
		if !ok {
			i = len(leaks)
			at[by] = i
			leaks = append(leaks, Leak{Space: s.cfg.ID, Promise: true, Stack: by.stack})
			if by.owner != "" {
				leaks[i].Holders = []Holding{{Space: s.cfg.ID, Kind: "reservation", Owner: by.owner}}
			}
		}
		leaks[i].Bytes += p.Unused
		for j := range leaks[i].Holders {
			leaks[i].Holders[j].Bytes += p.Unused
		}
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

// maxHolders is how many holders, and how many batches, Holdings.String names.
const maxHolders = 8

// Holdings lists the holders of the used bytes of a space. Sizes are bytes. The parts are looked up
// one after the other, so they add up to Used while nothing is put, moved or given back. Else they
// may be some more or less.
type Holdings struct {
	Space     ID
	Used      int64 // in all
	Available int64
	Limit     int64
	Reserved  int64    // promised, and in no buffer
	Engine    int64    // the engine's own for as long as it is open, such as staging
	Retired   int64    // freed, but the device may still read it
	Others    int64    // used, and in no other part: where data is being moved to, or what changes hands just now
	Foreign   int64    // what others hold on the device, as it was sampled; not part of Used
	Cached    int64    // copies, which go when the room is needed; not part of Used
	Holders   []Holder // the largest first
	// Batches are those at rest and in transit, by plan and operator: what the monitor could move,
	// or moves. A manager that is no engine's does not know them: there they are buffers.
	Batches []Holder
}

// Holder is a part of Holdings: what one owner, or one operator of a plan, keeps by one
// kind of holds. Memory is counted with one holder alone, so with Engine, Retired and Others
// the Bytes of all make up Used while nothing moves.
type Holder struct {
	// What is the kind of holder: "handle", "record", "reservation" (promised bytes in no buffer,
	// also those of moves), "buffer" (drawn by a program from a reservation), or "copy" (dictionaries
	// that only clean images use, and that are freed with them). In Batches it is "batch".
	What     string
	Owner    string // the task; "" if that is unknown
	Plan     string
	Operator string
	Port     int
	Count    int
	Bytes    int64  // what the memory is charged, or what is promised
	Shared   int64  // bytes that it keeps, too, and that are counted with another holder
	Batch    uint64 // one of the batches; 0 if there is none
}

// text returns, for example, `3 handles of plan "q", operator join:0: 4096 bytes`.
func (h Holder) text() string {
	s := "1 " + h.What
	switch {
	case h.What == "reservation" && h.Owner == "":
		s = "reservations without an owner"
	case h.Count > 1:
		plural := map[string]string{"batch": "batches", "copy": "copies"}[h.What]
		s = fmt.Sprintf("%d %s", h.Count, cmp.Or(plural, h.What+"s"))
	}
	s += placed(h.Plan, h.Operator, h.Port, "", h.Owner)
	switch {
	case h.Batch != 0 && h.Count > 1:
		s += fmt.Sprintf(" (batch %d and others)", h.Batch)
	case h.Batch != 0:
		s += fmt.Sprintf(" (batch %d)", h.Batch)
	}
	s += fmt.Sprintf(": %d bytes", h.Bytes)
	if h.Shared > 0 {
		s += fmt.Sprintf(", and %d that others of these hold, too", h.Shared)
	}
	return s
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
	part(a.Foreign, "held by others on the device")
	part(a.Cached, "in copies, which go when the room is needed")
	for _, all := range [][]Holder{a.Holders, a.Batches} {
		for _, h := range all[:min(len(all), maxHolders)] {
			s += ", " + h.text()
		}
		part(int64(len(all)-maxHolders), "more")
	}
	part(a.Others, "being moved or changing hands")
	if a.Used == 0 {
		s += ", nothing is held"
	}
	return s
}

// eachBatch calls add for each batch that lies in a space: with whose it is and its id, with its
// memory, and with its charge, for memory that does not list its buffers.
type eachBatch = func(add func(by Holder, memory any, bytes int64))

// Holdings lists the holders of the space's used bytes. batches, which may be nil, yields the
// batches that lie in the space. A buffer counts with the first that claims it: handles and
// records, the oldest first, then batches, and otherwise the owner of the reservation that it was
// drawn from. Holdings takes time in proportion to the buffers of the space.
func (s *Space) Holdings(batches eachBatch) Holdings {
	u := s.Usage()
	a := Holdings{
		Space: s.ID(), Used: u.Used(), Available: s.Available(), Limit: s.Limit(), Reserved: u.Reserved,
		Retired: u.Retired, Engine: s.held.Load(), Foreign: s.Foreign(), Cached: u.Cached,
	}
	sums := make(map[Holder]*Holder)
	add := func(by Holder, bytes int64) *Holder {
		batch := by.Batch
		by.Batch = 0
		h := sums[by]
		if h == nil {
			h = &by
			sums[by] = h
		}
		h.Count++
		h.Bytes += bytes
		if h.Batch == 0 || batch < h.Batch {
			h.Batch = batch
		}
		return h
	}

	// Memory is counted with the first holder that claims it, and once with each other as shared.
	claimed := make(map[any]*Holder)
	type claim struct {
		memory any
		by     *Holder
	}
	again := make(map[claim]bool)
	opaque := make(map[int64]int) // of memory that does not list its buffers: how many have so many bytes
	var hidden int64              // and how many bytes they have together
	count := func(h *Holder, memory any, bytes int64) {
		b, listed := memory.(*Buffer)
		switch by := claimed[memory]; {
		case listed && b.Space() != s:
		case by == nil:
			claimed[memory] = h
			h.Bytes += bytes
			if !listed {
				opaque[bytes]++
				hidden += bytes
			}
		case by != h && !again[claim{memory, h}]:
			again[claim{memory, h}] = true
			h.Shared += bytes
		}
	}
	keep := func(by Holder, memory any, bytes int64) {
		h := add(by, 0)
		s.panics.Do("a payload", func() {
			eachKept(memory, bytes, func(memory any, bytes int64) { count(h, memory, bytes) })
		})
	}
	for _, v := range slices.Backward(s.holds.Append(nil)) { // the oldest first
		d := s.Describe(&v)
		by := Holder{What: d.Kind, Owner: d.Owner, Plan: d.Plan, Operator: d.Operator, Port: d.Port, Batch: d.Batch}
		keep(by, v.Memory, v.Bytes)
	}
	if batches != nil {
		batches(keep)
	}

	for _, p := range s.books.Promises() {
		if p.Unused > 0 && !p.Occupied { // else it is the engine's own
			add(Holder{What: "reservation", Owner: nameOf(p.Owner)}, p.Unused)
		}
	}

	// The other buffers are those of programs, of the owners of the reservations that are still
	// open.
	var left []Holder
	for b, p := range s.outstanding() {
		if claimed[b] != nil {
			continue
		}
		h := Holder{What: "buffer", Bytes: b.charge}
		if p != nil {
			v, open := p.View()
			if open && v.Moves {
				continue // in Others
			}
			if open {
				h.Owner = nameOf(v.Owner)
			}
		}
		left = append(left, h)
	}
	// Memory that does not list its buffers has some of them, rather those without an owner: one of
	// its size, or else the largest.
	slices.SortFunc(left, func(a, b Holder) int {
		return cmp.Or(cmp.Compare(a.Owner, b.Owner), cmp.Compare(b.Bytes, a.Bytes))
	})
	left = slices.DeleteFunc(left, func(h Holder) bool {
		if opaque[h.Bytes] == 0 {
			return false
		}
		opaque[h.Bytes]--
		hidden -= h.Bytes
		return true
	})
	for _, h := range left {
		if h.Bytes <= hidden {
			hidden -= h.Bytes
		} else {
			add(Holder{What: h.What, Owner: h.Owner}, h.Bytes)
		}
	}

	a.Others = a.Used - a.Engine - a.Retired
	for _, h := range sums {
		a.Others -= h.Bytes
		if h.What == "batch" {
			a.Batches = append(a.Batches, *h)
		} else {
			a.Holders = append(a.Holders, *h)
		}
	}
	a.Others = max(0, a.Others)
	for _, all := range [][]Holder{a.Holders, a.Batches} {
		slices.SortFunc(all, func(a, b Holder) int {
			return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.What, b.What), cmp.Compare(a.Owner, b.Owner),
				cmp.Compare(a.Plan, b.Plan), cmp.Compare(a.Operator, b.Operator), cmp.Compare(a.Port, b.Port))
		})
	}
	return a
}
