package monitor

import (
	"cmp"
	"slices"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/decide"
)

// costAware is CostAware.
type costAware struct{}

// CostAware moves first what takes the least time for the most bytes and the longest rest: the time
// until the next use is multiplied by the bytes that are freed, and divided by the time for going
// and coming back. A batch that has a copy goes for nothing. The next use of a batch is expected
// after as long as between the last ones, see batch.Info.NextUse. One that was never used, or once,
// is expected as those like it are: by how many there are, and how many of the uses are of such
// batches. Those never used go in PlanOrder, those used once the latest first.
//
// What has not been used for much longer than between its uses goes before all these, and what
// Batch.Hint declares as never used again before all. The inputs of queued tasks go last, as in PlanOrder,
// and then what a hint keeps.
func CostAware() Policy { return costAware{} }

func (costAware) Name() string   { return "cost-aware" }
func (costAware) String() string { return "cost-aware" }

// The first words of costAware's keys. The classes of planKey begin at unused.
const (
	unneeded = iota
	stale
	unused
	_
	once
	used
	queued
	kept
)

func (costAware) Key(info batch.Info) Key {
	switch {
	case info.NextUse == batch.Stay:
		return Key{kept, signed(info.LastUse)}
	case info.Pending > 0:
		return Key{queued, descending(info.Task)}
	case info.NextUse == batch.Never:
		return Key{unneeded, signed(info.LastUse)}
	case info.NextUse != 0:
		return Key{used, descending(signed(info.NextUse)), signed(info.LastUse)}
	case info.Uses > 0:
		return Key{once, descending(signed(info.LastUse))}
	}
	k := planKey(info)
	k[0] += unused
	return k
}

// Order does without habits, so batches that were used seldom go before the others.
func (p costAware) Order(now int64, list []Victim) { p.OrderBy(now, list, &decide.Habits{}) }

// OrderBy is Order for a caller that has observed how all batches are used.
func (costAware) OrderBy(now int64, list []Victim, h *decide.Habits) {
	var listed [2]int // of those that were never used, and once
	for i := range list {
		v := &list[i]
		v.rank, v.worth = v.Key, 0
		var rest float64
		switch uses := v.Key[0]; {
		case uses == used:
			rest = v.Key.rest(now)
			if v.Key.stale(now, h) {
				v.rank[0] = stale
			}
		case uses >= unused && uses <= once && h.Gap > 0:
			n := 0
			if uses == once {
				n = 1
			}
			rest = h.Rest(n, listed[n])
			listed[n]++
			v.rank[0] = used
		default:
			continue
		}
		v.rank = Key{v.rank[0], descending(uint64(rest))}
		back := float64(v.Up)
		if most := h.Round(); h.Gap > 0 && rest > most { // it may not come back
			back *= most / rest
		}
		v.worth = rest * float64(v.Bytes) / max(1, float64(v.Down)+back)
	}
	slices.SortStableFunc(list, func(a, b Victim) int {
		return cmp.Or(cmp.Compare(a.rank[0], b.rank[0]), cmp.Compare(b.worth, a.worth))
	})
}

// rest returns for how long a batch that was used will not be, in ns. One that is late may come
// soon, or as late again.
func (k Key) rest(now int64) float64 {
	next := unsigned(^k[1])
	return float64(max(1, next-now, now-next))
}

// stale reports whether a batch that was used again and again seems to be unneeded.
func (k Key) stale(now int64, h *decide.Habits) bool {
	return k[0] == used && h.Stale(unsigned(^k[1]), unsigned(k[2]), now)
}
