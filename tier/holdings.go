package tier

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spillway-db/spillway/internal/named"
)

// mostHolders is how many holders Holdings.String names.
const mostHolders = 8

// Holdings lists the holders of the used bytes of a space. Sizes are bytes. The parts are looked up one
// after the other, so they add up to Used while nothing is put, moved or given back. Else they may be
// some more or less.
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
	// What is "handle", "record", "reservation" for what is promised and in no buffer, also to moves,
	// "buffer" for what a program has drawn from a reservation, or "copy" for dictionaries of copies,
	// which no batch there has and which go with them; of Batches "batch".
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
	case h.What == "copy" && h.Count > 1:
		s = fmt.Sprintf("%d copies", h.Count)
	case h.What == "batch" && h.Count > 1:
		s = fmt.Sprintf("%d batches", h.Count)
	case h.Count > 1:
		s = fmt.Sprintf("%d %ss", h.Count, h.What)
	}
	if h.Plan != "" {
		s += " of plan " + named.Quoted(h.Plan)
	}
	if h.Operator != "" {
		s += fmt.Sprintf(", operator %s:%d", named.Plain(h.Operator), h.Port)
	}
	if h.Owner != "" {
		s += ", owner " + named.Quoted(h.Owner)
	}
	if h.Batch != 0 {
		s += fmt.Sprintf(" (batch %d", h.Batch)
		if h.Count > 1 {
			s += " and others"
		}
		s += ")"
	}
	s += fmt.Sprintf(": %d bytes", h.Bytes)
	if h.Shared > 0 {
		s += fmt.Sprintf(", and %d that others of these hold, too", h.Shared)
	}
	return s
}

// String returns the holdings as one line.
func (a Holdings) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d of %d bytes are available", a.Available, a.Limit)
	if a.Reserved > 0 {
		fmt.Fprintf(&b, ", %d promised", a.Reserved)
	}
	for _, part := range []struct {
		bytes int64
		what  string
	}{
		{a.Engine, "the engine's own"},
		{a.Retired, "freed and not yet back"},
		{a.Foreign, "held by others on the device"},
		{a.Cached, "in copies, which go when the room is needed"},
	} {
		if part.bytes > 0 {
			fmt.Fprintf(&b, ", %d %s", part.bytes, part.what)
		}
	}
	list := func(all []Holder) {
		for i, h := range all {
			if i == mostHolders {
				fmt.Fprintf(&b, ", and %d more", len(all)-i)
				break
			}
			b.WriteString(", " + h.text())
		}
	}
	list(a.Holders)
	list(a.Batches)
	if a.Others > 0 {
		fmt.Fprintf(&b, ", %d being moved or changing hands", a.Others)
	}
	if a.Used == 0 {
		b.WriteString(", nothing is held")
	}
	return b.String()
}

// eachBatch calls add for each batch that lies in a space: with whose it is and its id, with its memory,
// and with what that is charged, for memory that does not list its buffers.
type eachBatch = func(add func(by Holder, memory any, bytes int64))

// Holdings lists the holders of the space's used bytes. batches, which may be nil, yields the
// batches that lie in the space. A buffer counts with the first that claims it: handles and records,
// the oldest first, then batches, and otherwise the owner of the reservation that it was drawn from.
// Holdings takes time in proportion to the buffers of the space.
func (s *Space) Holdings(batches eachBatch) Holdings {
	u := s.Usage()
	a := Holdings{
		Space: s.ID(), Used: u.Used(), Available: s.Available(), Limit: s.Limit(), Reserved: u.Reserved,
		Retired: u.Retired, Engine: s.books.Held(), Foreign: s.Foreign(), Cached: u.Cached,
	}
	c := claims{by: make(map[Holder]*Holder), claimed: make(map[any]*Holder), shared: make(map[claim]bool)}
	keep := func(h *Holder, memory any, bytes int64) {
		claim := func(b *Buffer) {
			if b.Space() == s {
				c.claim(h, b, b.charge)
			}
		}
		s.panics.Do("a payload", func() {
			if !eachBuffer(memory, claim) && c.claim(h, memory, bytes) {
				c.opaque = append(c.opaque, bytes)
			}
			eachShared(memory, claim)
		})
	}
	for _, v := range slices.Backward(s.holds.Append(nil)) { // the oldest first
		d := s.Describe(&v)
		by := Holder{What: d.Kind, Owner: d.Owner, Plan: d.Plan, Operator: d.Operator, Port: d.Port}
		keep(c.holder(by, d.Batch), v.Memory, v.Bytes)
	}
	if batches != nil {
		batches(func(by Holder, memory any, bytes int64) {
			id := by.Batch
			by.Batch = 0
			keep(c.holder(by, id), memory, bytes)
		})
	}
	for _, p := range s.books.Promises() {
		if p.Unused > 0 && !p.Moves { // what moves have is in Others
			c.holder(Holder{What: "reservation", Owner: nameOf(p.Owner)}, 0).Bytes += p.Unused
		}
	}
	c.rest(s.outstanding())
	a.Others = a.Used - a.Engine - a.Retired
	for _, h := range c.by {
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

// claims is which holder memory is counted with: the first that has claimed it.
type claims struct {
	by      map[Holder]*Holder
	claimed map[any]*Holder // by buffers, and by memory that does not list its buffers
	shared  map[claim]bool  // those that came later
	opaque  []int64         // the bytes of memory that does not list its buffers
}

// claim is one of memory that is counted with another holder.
type claim struct {
	memory any
	by     *Holder
}

// holder counts one more for a holder.
func (c *claims) holder(key Holder, batch uint64) *Holder {
	h := c.by[key]
	if h == nil {
		one := key
		h = &one
		c.by[key] = h
	}
	if h.Count++; h.Batch == 0 || batch < h.Batch {
		h.Batch = batch
	}
	return h
}

// claim counts memory with h, and reports whether h is the first that claims it.
func (c *claims) claim(h *Holder, memory any, bytes int64) bool {
	switch by := c.claimed[memory]; {
	case by == nil:
		c.claimed[memory] = h
		h.Bytes += bytes
		return true
	case by != h && !c.shared[claim{memory, h}]:
		c.shared[claim{memory, h}] = true
		h.Shared += bytes
	}
	return false
}

// alike is buffers that nobody has claimed, of one owner and one charge.
type alike struct {
	owner string
	bytes int64
}

// rest counts the buffers that nobody has claimed: those of programs, by the owners of the open
// reservations that they were drawn from. Memory that does not list its buffers has some of them,
// best those without an owner: one of its size, or else the largest.
func (c *claims) rest(all []drawn) {
	left := make(map[alike]int64)
	for _, b := range all {
		if b.engines || c.claimed[b.Buffer] != nil {
			continue
		}
		key := alike{bytes: b.charge}
		if b.promise != nil {
			v, open := b.promise.View()
			if open && v.Moves {
				continue // in Others
			}
			if open {
				key.owner = nameOf(v.Owner)
			}
		}
		left[key]++
	}
	order := slices.SortedFunc(maps.Keys(left), func(a, b alike) int {
		return cmp.Or(cmp.Compare(a.owner, b.owner), cmp.Compare(b.bytes, a.bytes))
	})
	var more int64
	for _, bytes := range c.opaque {
		if i := slices.IndexFunc(order, func(k alike) bool { return k.bytes == bytes && left[k] > 0 }); i >= 0 {
			left[order[i]]--
		} else {
			more += bytes
		}
	}
	for _, key := range order {
		n := min(left[key], more/max(1, key.bytes))
		more -= n * key.bytes
		if n < left[key] {
			h := c.holder(Holder{What: "buffer", Owner: key.owner}, 0)
			h.Count += int(left[key]-n) - 1
			h.Bytes += (left[key] - n) * key.bytes
		}
	}
}
