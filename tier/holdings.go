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
	Count    int    // 0 if that is unknown, as of reservations without an owner
	Bytes    int64  // what the memory is charged, or what is promised
	Shared   int64  // bytes that it keeps, too, and that are counted with another holder
	Batch    uint64 // one of the batches; 0 if there is none
}

// text returns, for example, `3 handles of plan "q", operator join:0: 4096 bytes`.
func (h Holder) text() string {
	s := "1 " + h.What
	switch {
	case h.Count == 0:
		s = plural(h.What) + " without an owner"
	case h.Count > 1:
		s = fmt.Sprintf("%d %s", h.Count, plural(h.What))
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

func plural(what string) string {
	switch {
	case strings.HasSuffix(what, "ch"):
		return what + "es"
	case strings.HasSuffix(what, "py"):
		return strings.TrimSuffix(what, "y") + "ies"
	}
	return what + "s"
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
// and with what that is charged, for memory that does not say which buffers it has.
type eachBatch = func(add func(by Holder, memory any, bytes int64))

// Holdings lists the holders of the space's used bytes. promises are reservations with an owner, with
// what is in no buffer; batches, which may be nil, yields the batches that lie in the space. It takes
// time in proportion to the buffers of the space.
func (in inside) Holdings(promises []Holder, batches eachBatch) Holdings {
	u := in.Usage()
	a := Holdings{
		Space: in.ID(), Used: u.Used(), Available: in.Available(), Limit: in.Limit(), Reserved: u.Reserved,
		Retired: u.Retired, Engine: in.held.Load(), Foreign: in.Foreign(), Cached: u.Cached,
	}
	c := claims{space: in.Space, by: make(map[Holder]*Holder), claimed: make(map[*Buffer]*Holder)}
	for _, v := range slices.Backward(in.Holds().Append(nil)) { // the oldest first
		d := in.Describe(&v)
		by := Holder{What: d.Kind, Owner: d.Owner, Plan: d.Plan, Operator: d.Operator, Port: d.Port}
		c.keep(c.holder(by, d.Batch), v.Memory, v.Bytes)
	}
	if batches != nil {
		batches(func(by Holder, memory any, bytes int64) {
			id := by.Batch
			by.Batch = 0
			c.keep(c.holder(by, id), memory, bytes)
		})
	}
	unowned := u.Reserved
	for _, p := range promises {
		if p.Bytes > 0 {
			c.holder(Holder{What: "reservation", Owner: p.Owner}, 0).Bytes += p.Bytes
			unowned -= p.Bytes
		}
	}
	own := c.rest()
	if unowned -= max(0, a.Engine-own); unowned > 0 {
		h := c.holder(Holder{What: "reservation"}, 0)
		h.Count, h.Bytes = 0, unowned
	}
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

// claims says which holder the buffers of a space are counted with: the first that has claimed it.
type claims struct {
	space   *Space
	by      map[Holder]*Holder
	claimed map[*Buffer]*Holder
	opaque  map[any]claimed // memory that does not say which buffers it has
	others  map[claim]struct{}
}

// claimed says which holder memory is counted with, and its bytes.
type claimed struct {
	by    *Holder
	bytes int64
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

// keep counts memory with h, and what it shares.
func (c *claims) keep(h *Holder, memory any, bytes int64) {
	c.space.panics.Do("a payload", func() {
		switch m := memory.(type) {
		case *Buffer:
			c.claim(h, m)
		case interface{ Buffers() []*Buffer }:
			for _, b := range m.Buffers() {
				c.claim(h, b)
			}
		default:
			c.claimOpaque(h, memory, bytes)
		}
		if m, ok := memory.(interface{ EachShared(func(*Buffer)) }); ok {
			m.EachShared(func(b *Buffer) { c.claim(h, b) })
		}
	})
}

func (c *claims) claim(h *Holder, b *Buffer) {
	if b == nil || b.space != c.space {
		return
	}
	switch by := c.claimed[b]; {
	case by == nil:
		c.claimed[b] = h
		h.Bytes += b.charge
	case by != h && c.first(b, h):
		h.Shared += b.charge
	}
}

func (c *claims) claimOpaque(h *Holder, memory any, bytes int64) {
	switch of, ok := c.opaque[memory]; {
	case !ok:
		if c.opaque == nil {
			c.opaque = make(map[any]claimed)
		}
		c.opaque[memory] = claimed{h, bytes}
		h.Bytes += bytes
	case of.by != h && c.first(memory, h):
		h.Shared += of.bytes
	}
}

// first reports whether a claim is not one that there was.
func (c *claims) first(memory any, by *Holder) bool {
	k := claim{memory, by}
	if _, ok := c.others[k]; ok {
		return false
	}
	if c.others == nil {
		c.others = make(map[claim]struct{})
	}
	c.others[k] = struct{}{}
	return true
}

// alike is buffers that nobody has claimed, of one owner and one charge.
type alike struct {
	owner string
	bytes int64
}

// rest counts the buffers that nobody has claimed: those of programs, by the owners of the reservations
// that they were drawn from. It returns what the engine's own have.
func (c *claims) rest() (own int64) {
	left := make(map[alike]int)
	count := func(bytes int64, account *Account, of uint64) {
		if account == &itsOwn {
			own += bytes
			return
		}
		key, moves := alike{bytes: bytes}, false
		if account != nil {
			if o, ok := (*account).(interface {
				OwnerOf(of uint64) (owner string, moves bool)
			}); ok {
				key.owner, moves = o.OwnerOf(of)
			}
		}
		if !moves { // else it is in Others
			left[key]++
		}
	}
	// Buffers that come or go while the lock is free may be left out.
	s := c.space
	s.mu.Lock()
	for b := range s.mu.buffers {
		bytes, account, of := b.charge, b.account, b.of
		s.mu.Unlock()
		if c.claimed[b] == nil && b.holders.Load()&cached == 0 {
			count(bytes, account, of)
		}
		s.mu.Lock()
	}
	s.mu.Unlock()
	over := c.takeOpaque(left)
	for key, n := range left {
		if n > 0 {
			h := c.holder(Holder{What: "buffer", Owner: key.owner}, 0)
			h.Count += n - 1
			h.Bytes += int64(n)*key.bytes - over[key]
		}
	}
	return own
}

// takeOpaque takes the buffers of opaque memory out of those that are left, best those without an
// owner, whose reservations are released. over says how many bytes of some more are such memory's.
func (c *claims) takeOpaque(left map[alike]int) (over map[alike]int64) {
	if len(c.opaque) == 0 {
		return nil
	}
	order := slices.SortedFunc(maps.Keys(left), func(a, b alike) int {
		return cmp.Or(cmp.Compare(a.owner, b.owner), cmp.Compare(b.bytes, a.bytes)) // no owner first, then the largest
	})
	sizes := make(map[int64]int64) // how many of opaque memory have so many bytes
	for _, of := range c.opaque {
		sizes[of.bytes]++
	}
	var more int64
	for _, key := range order { // most have one buffer each
		n := min(int64(left[key]), sizes[key.bytes])
		left[key] -= int(n)
		sizes[key.bytes] -= n
	}
	for bytes, n := range sizes {
		more += n * bytes
	}
	for _, key := range order {
		n := min(int64(left[key]), more/max(1, key.bytes))
		left[key] -= int(n)
		more -= n * key.bytes
	}
	for _, key := range order { // in what is left each buffer has more bytes than this
		if left[key] > 0 && more > 0 {
			return map[alike]int64{key: more}
		}
	}
	return nil
}
