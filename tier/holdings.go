package tier

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// mostHolders is how many holders Holdings.String names.
const mostHolders = 8

// Holdings lists the holders of the used bytes of a space. Sizes are bytes.
type Holdings struct {
	Space     ID
	Used      int64 // in all
	Available int64
	Limit     int64
	Reserved  int64    // promised, and in no buffer
	Engine    int64    // the engine's own for as long as it is open, such as staging
	Retired   int64    // freed, but the device may still read it
	Foreign   int64    // what others hold on the device, as it was sampled; not part of Used
	Cached    int64    // copies, which go when the room is needed; not part of Used
	Holders   []Holder // the largest first
	// Batches are those at rest and in transit, by plan and operator: what the monitor could move,
	// or moves. Engine.Holders alone fills them in.
	Batches []Holder
}

// Holder is a part of Holdings: what one owner, or one operator of a plan, keeps by one
// kind of holds. Those on the same memory count once.
type Holder struct {
	What     string // "handle", "record" or "reservation"; of Batches "batch"
	Owner    string // the task; "" if that is unknown
	Plan     string
	Operator string
	Port     int
	Count    int
	Bytes    int64  // what the memory is charged, or what reservations promise, drawn or not
	Batch    uint64 // one of the batches; 0 if there is none
}

// text returns, for example, `3 handles of plan "q", operator join:0: 4096 bytes`.
func (h Holder) text() string {
	s := "1 " + h.What
	if h.Count != 1 {
		s = fmt.Sprintf("%d %s", h.Count, plural(h.What))
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

func plural(what string) string {
	if strings.HasSuffix(what, "ch") {
		return what + "es"
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
	}{{a.Engine, "the engine's own"}, {a.Retired, "freed and not yet back"}, {a.Foreign, "held by others on the device"}, {a.Cached, "in copies, which go when the room is needed"}} {
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
	if list(a.Holders); len(a.Holders) == 0 {
		b.WriteString(", no open handle or record keeps any")
	}
	list(a.Batches)
	return b.String()
}

// Holdings lists the holders of the space's used bytes, and adds promises, which are reservations
// with an owner. It takes time in proportion to the handles and records that are open in the space.
func (in inside) Holdings(promises []Holder) Holdings {
	a := Holdings{
		Space: in.ID(), Used: in.Used(), Available: in.Available(), Limit: in.Limit(),
		Engine: in.Held(), Foreign: in.Foreign(), Cached: in.Cached(),
	}
	u := in.Usage()
	a.Reserved, a.Retired = u.Reserved, u.Retired
	byKey := make(map[Holder]*Holder)
	holder := func(key Holder) *Holder {
		h := byKey[key]
		if h == nil {
			one := key
			h = &one
			byKey[key] = h
		}
		h.Count++
		return h
	}
	type kept struct {
		memory any
		by     Holder
	}
	seen := make(map[kept]bool)
	for _, v := range in.Holds().Append(nil) {
		d := in.Describe(&v)
		key := Holder{What: d.Kind, Owner: d.Owner, Plan: d.Plan, Operator: d.Operator, Port: d.Port}
		h := holder(key)
		if h.Batch == 0 || d.Batch < h.Batch {
			h.Batch = d.Batch
		}
		in.EachKept(&v, func(memory any, bytes int64) {
			if k := (kept{memory, key}); !seen[k] {
				seen[k] = true
				h.Bytes += bytes
			}
		})
	}
	for _, p := range promises {
		if p.Bytes > 0 {
			holder(Holder{What: "reservation", Owner: p.Owner}).Bytes += p.Bytes
		}
	}
	for _, h := range byKey {
		a.Holders = append(a.Holders, *h)
	}
	slices.SortFunc(a.Holders, func(a, b Holder) int {
		return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.What, b.What), cmp.Compare(a.Owner, b.Owner), cmp.Compare(a.Operator, b.Operator))
	})
	return a
}
