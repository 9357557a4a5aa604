package leases

import (
	"cmp"
	"fmt"
	"math"

	"github.com/spillway-db/spillway/tier"
)

// books are the numbers of a lease: its own, and those of all other live processes as of its last look at
// the ledger. Numbers that other users wrote may be false, so sums are cut off at the largest number.
type books struct {
	dir string // the ledger
	// own has this process's numbers as they are now. Granted is what the file has, or less while a look
	// is about to lower the file. Live is at most Granted, except while a look charges.
	own record

	count       int
	granted     int64 // by all other processes
	group       int64 // granted by the others of the own group
	groupLive   int64 // of which they hold so many bytes
	groupLimit  int64 // the smallest limit that one of them asks for
	otherQuotas int64 // the largest limit of each other group, added up
}

// sum replaces the numbers of other processes.
func (b *books) sum(peers []record) {
	*b = books{dir: b.dir, own: b.own, count: len(peers), groupLimit: math.MaxInt64}
	quotas := map[string]int64{}
	for _, p := range peers {
		b.granted = add(b.granted, p.Granted)
		if b.own.Group == "" || p.Group != b.own.Group {
			group := cmp.Or(p.Group, p.file) // a process without a group is one by itself
			quotas[group] = max(quotas[group], p.Quota)
			continue
		}
		b.group = add(b.group, p.Granted)
		b.groupLive = add(b.groupLive, p.Live)
		b.groupLimit = min(b.groupLimit, p.Quota)
	}
	for _, n := range quotas {
		b.otherQuotas = add(b.otherQuotas, n)
	}
}

// add returns a + b, or the largest number if that is too large.
func add(a, b int64) int64 { return a + min(b, math.MaxInt64-a) }

// held returns how many bytes the group holds.
func (b *books) held() int64 { return add(b.groupLive, b.own.Live) }

// limit returns the smallest limit that a process of the group asks for.
func (b *books) limit() int64 { return min(b.own.Quota, b.groupLimit) }

// room returns how many bytes this process may hold, including those that it holds.
func (b *books) room() int64 { return max(0, min(b.limit()-b.group, b.own.Physical-b.granted)) }

func (b *books) grain() int64 { return max(1, min(maxGrain, b.limit()/64)) }

func (b *books) charge(n int64) {
	b.own.Live += n
	b.own.Peak = max(b.own.Peak, b.own.Live)
}

// fits refuses a limit of the group with which the quotas of all groups exceed what is advertised.
func (b *books) fits(limit int64) error {
	left := max(0, b.own.Advertised-b.otherQuotas)
	if limit <= left {
		return nil
	}
	return &tier.OutOfBudgetError{
		Budget: "what is advertised of " + b.own.Device, Requested: limit,
		Remaining: left, Current: b.otherQuotas, Limit: b.own.Advertised,
	}
}

// refusal names the limit that n bytes would exceed: the quota, or the GPU's memory.
func (b *books) refusal(n int64) error {
	e := &tier.OutOfBudgetError{
		Budget: b.title(), Requested: n, Remaining: max(0, b.room()-b.own.Live), Current: b.group, Limit: b.limit(),
	}
	if b.own.Physical-b.granted < e.Limit-e.Current {
		e.Budget = fmt.Sprintf("the memory of %s, which %d processes share by the ledger in %s,",
			b.own.Device, b.count+1, b.dir)
		e.Current, e.Limit = b.granted, b.own.Physical
	}
	e.Current = add(e.Current, b.own.Live)
	return e
}

func (b *books) title() string {
	whose := "this process"
	if b.own.Group != "" {
		whose = fmt.Sprintf("the group %q", b.own.Group)
	}
	return fmt.Sprintf("the quota of %s on %s (ledger %s)", whose, b.own.Device, b.dir)
}
