package monitor

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/spillway-db/spillway/batch"
)

// costAware is CostAware.
type costAware struct{}

// CostAware moves first what takes the least time for the most bytes and the longest rest: the time
// until the next use is multiplied by the bytes that are freed, and divided by the time for going
// and coming back. A batch that has a copy costs nothing to evict. The next use of a batch is expected
// after as long as between the last ones, see batch.Info.NextUse. Batches that were used fewer than
// twice go before these: first those never used that are in no repository; then those used once,
// the latest first, because operators use most batches once; then those that wait in a repository
// for their first use, in PlanOrder.
//
// Batches that were not used for a minute, and for much longer than between their uses, go before
// all these, and those that Batch.Hint declares as never used again before all. The inputs of
// queued tasks go last, as in PlanOrder, and then those that a hint keeps.
func CostAware() Policy { return costAware{} }

func (costAware) Name() string   { return "cost-aware" }
func (costAware) String() string { return "cost-aware" }

// The first words of costAware's keys. The classes of planKey begin at unused.
const (
	unneeded = iota
	stale
	loose
	once
	unused
	_
	used
	queued
	kept
)

func (costAware) Key(info batch.Info) Key {
	switch {
	case info.NextUse == batch.Stay:
		return Key{kept, info.LastUse}
	case info.Pending > 0:
		return Key{queued, int64(info.Task ^ math.MaxInt64)}
	case info.NextUse == batch.Never:
		return Key{unneeded, info.LastUse}
	case info.NextUse != 0:
		return Key{used, -info.NextUse, info.LastUse}
	case info.Uses > 0:
		return Key{once, -info.LastUse}
	}
	k := planKey(info, false)
	if k[0] += unused; info.Place.Operator == "" {
		k[0] = loose
	}
	return k
}

// Order sorts the batches that were used more than once by what they cost, and puts stale ones
// before all but unneeded ones. It replaces their keys: the second word is the time until the next
// use, the longest first. A batch that is late is expected after as much time again.
func (costAware) Order(now int64, list []Victim) {
	for i := range list {
		k := list[i].Key
		if k[0] != used {
			continue
		}
		next := -k[1]
		list[i].Key = Key{used, -max(1, next-now, now-next)}
		if k.stale(now) {
			list[i].Key[0] = stale
		}
	}
	worth := func(v Victim) float64 {
		if v.Key[0] != used && v.Key[0] != stale {
			return 0
		}
		return float64(-v.Key[1]) * float64(v.Bytes) / float64(max(1, v.Down+v.Up))
	}
	slices.SortStableFunc(list, func(a, b Victim) int {
		return cmp.Or(cmp.Compare(a.Key[0], b.Key[0]), cmp.Compare(worth(b), worth(a)))
	})
}

const (
	// staleAfter is how long a batch that was used more than once must not have been used to be stale.
	staleAfter = int64(time.Minute)
	// patience is for how many times the expected gap between two uses it must not have been used.
	patience = 8
)

// stale reports whether a batch that was used more than once seems to be unneeded by now.
func (k Key) stale(now int64) bool {
	next, last := -k[1], k[2]
	return k[0] == used && next > last && now-last > staleAfter && (now-last)/patience > next-last
}
