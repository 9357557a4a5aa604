package monitor

import (
	"cmp"
	"slices"

	"github.com/spillway-db/spillway/batch"
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
// Batch.Hint says is not used again before all. The inputs of queued tasks go last, as in PlanOrder,
// and then what a hint keeps.
func CostAware() Policy { return costAware{} }

func (costAware) Name() string   { return "cost-aware" }
func (costAware) String() string { return "cost-aware" }

// The first words of costAware's keys. From unused on lie the classes of planKey.
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

// Order does without what the monitor knows of how batches are used: so those that were used seldom
// go before the others.
func (p costAware) Order(now int64, list []Victim) { p.order(now, list, &habits{}) }

func (costAware) order(now int64, list []Victim, h *habits) {
	var listed [2]int // of those that were never used, and once
	for i := range list {
		v := &list[i]
		v.rank, v.worth = v.Key, 0
		var rest float64
		switch uses := v.Key[0]; {
		case uses == used:
			rest = v.Key.rest(now)
			if h.stale(v.Key, now) {
				v.rank[0] = stale
			}
		case uses >= unused && uses <= once && h.gap > 0:
			n := 0
			if uses == once {
				n = 1
			}
			rest = h.rest(n, listed[n])
			listed[n]++
			v.rank[0] = used
		default:
			continue
		}
		v.rank = Key{v.rank[0], descending(uint64(rest))}
		back := float64(v.Up)
		if most := h.round(); h.gap > 0 && rest > most { // it may not come back
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

// habits is how the batches of all spaces are used, as far as has been seen. A use of a batch
// belongs to one of three kinds: its first, its second, or a later one.
type habits struct {
	seen  int        // uses
	last  int64      // when the last was
	gap   float64    // ns between two; 0 before the second
	share [3]float64 // of each kind in the uses
	count [3]int     // the batches whose next use is of that kind
}

// recent is how many uses habits remember, about. For the gap it is as many as there are batches.
const recent = 64

// useOf returns which kind the next use of a batch is of.
func useOf(uses uint8) int { return int(min(uses, 2)) }

// use notes a use of a batch that had so many.
func (h *habits) use(uses uint8, at int64) {
	if h.seen == 0 {
		h.share[0] = 1
	}
	part := max(1./recent, 1/float64(h.seen+2))
	for i := range h.share {
		h.share[i] *= 1 - part
	}
	h.share[useOf(uses)] += part
	among := min(max(recent, h.batches()), float64(h.seen+2)) // a task may use all batches at once
	if gap := float64(max(1, at-h.last)); h.seen == 1 {
		h.gap = gap
	} else if h.seen > 1 {
		h.gap += (min(gap, 4*among*h.gap) - h.gap) / among // a long pause is no habit
	}
	h.seen, h.last = h.seen+1, max(h.last, at)
}

// longest is what habits expect at most, in ns: some days.
const longest = 1e15

// rest returns when a batch is expected that was used so often, never or once: with before as many
// such batches that are needed later.
func (h *habits) rest(uses, before int) float64 {
	const none = 1e-9
	of := none // kinds of which there are batches
	for i, n := range h.count {
		if n > 0 {
			of += h.share[i]
		}
	}
	n := float64(max(1, h.count[uses]-before))
	return max(1, min(longest*n/float64(max(1, h.count[uses])), n*h.gap*of/(h.share[uses]+none)))
}

// batches returns how many there are.
func (h *habits) batches() float64 { return float64(h.count[0] + h.count[1] + h.count[2]) }

// round returns how long it takes to use as many batches as there are.
func (h *habits) round() float64 { return max(1, h.batches()*h.gap) }

// patience is for how many times the expected gap between uses a batch may have been unused before
// it counts as unneeded.
const patience = 4

// stale reports whether a batch that was used again and again seems to be unneeded. Gaps that were
// short by chance do not make it so: as many uses count, too, as there are batches.
func (h *habits) stale(k Key, now int64) bool {
	if k[0] != used {
		return false
	}
	next, last := unsigned(^k[1]), unsigned(k[2])
	return next > last && float64(now-last)/patience > max(float64(next-last), h.round())
}
