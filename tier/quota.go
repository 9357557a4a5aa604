package tier

import (
	"math"
	"slices"
)

// Quota limits what several spaces, or several processes, take together, beside
// the limit of each space. A space that has one charges it for every byte that it
// reserves and credits it when the byte is free again. A Quota is safe for
// concurrent use, and calls its subscribers with no lock held.
type Quota interface {
	// Charge takes n > 0 bytes, or returns an OutOfBudgetError that names the quota
	// and changes nothing. The check and the charge are one step.
	Charge(n int64) error
	// Credit gives n bytes back that were charged.
	Credit(n int64)
	// Remaining is how many bytes could be charged now; it may be out of date when it
	// returns. Below 0, it says how many of the caller's bytes are above a limit that was
	// lowered: they stay charged, but should be given back.
	Remaining() int64
	// Limit is how many bytes could be charged if none were held.
	Limit() int64
	// Subscribe calls f, which must be quick and must not block, whenever something
	// was credited or the limit changed. The returned function ends that; a call that
	// has begun may still be running when it returns.
	Subscribe(f func()) (cancel func())
}

// Limited is what a device implements that is limited by more than its memory: a
// space over it charges the Quota for what it promises, so that the promise holds.
type Limited interface {
	Quota() Quota
}

// QuotaOf returns the quota of a device and of all that it wraps; nil if none of them
// is Limited.
func QuotaOf(dev Device) Quota {
	var all []Quota
	for d := range layers(dev) {
		if l, ok := d.(Limited); ok {
			all = append(all, l.Quota())
		}
	}
	return Quotas(all...)
}

// Quotas returns a quota that charges all of those given, of which nil ones are
// ignored: what one of them refuses is charged to none. It is nil if there are none.
func Quotas(all ...Quota) Quota {
	all = slices.DeleteFunc(slices.Clone(all), func(q Quota) bool { return q == nil })
	switch len(all) {
	case 0:
		return nil
	case 1:
		return all[0]
	}
	return quotas(all)
}

type quotas []Quota

func (q quotas) Charge(n int64) error {
	for i, one := range q {
		if err := one.Charge(n); err != nil {
			for _, charged := range q[:i] {
				charged.Credit(n)
			}
			return err
		}
	}
	return nil
}

func (q quotas) Credit(n int64) {
	for _, one := range q {
		one.Credit(n)
	}
}

func (q quotas) Remaining() int64 { return q.least(Quota.Remaining) }

func (q quotas) Limit() int64 { return q.least(Quota.Limit) }

func (q quotas) least(f func(Quota) int64) int64 {
	n := int64(math.MaxInt64)
	for _, one := range q {
		n = min(n, f(one))
	}
	return n
}

func (q quotas) Subscribe(f func()) (cancel func()) {
	cancels := make([]func(), len(q))
	for i, one := range q {
		cancels[i] = one.Subscribe(f)
	}
	return func() {
		for _, c := range cancels {
			c()
		}
	}
}
