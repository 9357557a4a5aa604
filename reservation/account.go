package reservation

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/spillway-db/spillway/tier"
)

// mostHolders is how many holders the text of an account names.
const mostHolders = 8

// Account lists the holders of the used bytes of a space. Sizes are bytes.
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

// text returns, for example, `3 handles of plan "q", operator join:0: 4096 bytes`.
func (h Holder) text() string {
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
		if i == mostHolders {
			fmt.Fprintf(&b, ", and %d more", len(a.Holders)-i)
			break
		}
		b.WriteString(", " + h.text())
	}
	if len(a.Holders) == 0 {
		b.WriteString(", no open handle or record keeps any")
	}
	return b.String()
}

// promise is a reservation of an owner.
type promise struct {
	owner string
	bytes int64
}

// accountOf returns the account of a space, with what is promised there to owners. It takes time in
// proportion to the handles and records that are open in the space.
func accountOf(space *tier.Space, promised []promise) Account {
	a := Account{
		Space: space.ID(), Used: space.Used(), Available: space.Available(), Limit: space.Limit(),
		Reserved: space.Usage().Reserved, Engine: space.Inside().Held(),
	}
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
	for _, v := range space.Inside().Holds().Append(nil) {
		d := space.Inside().Describe(&v)
		key := Holder{What: d.Kind, Owner: d.Owner, Plan: d.Plan, Operator: d.Operator, Port: d.Port}
		h := holder(key)
		if h.Batch == 0 || d.Batch < h.Batch {
			h.Batch = d.Batch
		}
		space.Inside().EachKept(&v, func(memory any, bytes int64) {
			if k := (kept{memory, key}); !seen[k] {
				seen[k] = true
				h.Bytes += bytes
			}
		})
	}
	for _, p := range promised {
		if p.bytes > 0 {
			holder(Holder{What: "reservation", Owner: p.owner}).Bytes += p.bytes
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
