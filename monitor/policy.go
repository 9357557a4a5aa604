package monitor

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/monitor/internal/decide"
)

// Key places a batch in the order of victims. Keys are compared word by word;
// the smallest goes down first.
type Key [4]uint64

// compare returns a negative number if k goes down before other, a positive one
// if after, and 0 if it is all the same.
func (k Key) compare(other Key) int {
	for i, w := range k {
		if c := cmp.Compare(w, other[i]); c != 0 {
			return c
		}
	}
	return 0
}

// Victim is a batch that could be moved down.
type Victim struct {
	Batch *batch.Batch
	ID    batch.ID
	Bytes int64 // what it is charged where it is, so what a move frees there
	Key   Key
	// Down and Up are about how long it takes to move it to where it would go, and back. Down is 0 if
	// it has a copy in a slower space.
	Down, Up time.Duration

	not    decide.Kinds  // the tiers that it cannot be converted for
	copied decide.Places // the spaces that have a copy of it
}

// Policy says which batches go down first. Its methods must be pure: the same
// arguments give the same result, nothing is kept and nothing is waited for.
// They are called with no lock held, from many goroutines.
type Policy interface {
	// Name is what ByName and reports call it.
	Name() string
	// Key is computed whenever a batch changes, never by the passing of time, so
	// that an index can be kept and no scan is needed.
	Key(info batch.Info) Key
	// Order may rearrange the batches with the smallest keys of one space, at
	// most 1,024, which come ordered by key. It is for what a key cannot say: what things cost, and
	// the time, which is now, by Config.Clock.
	Order(now int64, shortlist []Victim)
}

// shortlistMax is how many victims of a space are looked at in one step at most,
// however many batches there are.
const shortlistMax = 1024

// fewVictims is how many more are looked at than what is needed seems to ask for.
const fewVictims = 32

// ordered is a policy that a key says all about.
type ordered struct {
	name string
	key  func(batch.Info) Key
}

func (p ordered) Name() string            { return p.name }
func (p ordered) Key(info batch.Info) Key { return p.key(info) }
func (p ordered) Order(int64, []Victim)   {}
func (p ordered) String() string          { return p.name }

// descending turns an order around.
func descending(v uint64) uint64 { return ^v }

// signed maps int64 to uint64 so that the order stays.
func signed(v int64) uint64 { return uint64(v) ^ 1<<63 }

// unsigned is the int64 that signed was given.
func unsigned(v uint64) int64 { return int64(v ^ 1<<63) }

// PlanOrder moves first what a plan needs last. Three classes follow each other:
// batches that no task asked for; of those, the ones in a plan's output
// repository; the inputs of tasks that are queued. Within each the youngest plan
// gives first, so that the oldest can finish. Within a plan the classes of
// batches without tasks go from the repository nearest to the output towards the
// scans, the newest batch first: what lies near a scan is consumed next, in the
// order of arrival. Inputs of tasks, of whatever plan, go from the back of the queue: the task that
// was created last comes last. RunTask creates one for each of its inputs before it waits.
func PlanOrder() Policy { return ordered{"plan-order", planKey} }

func planKey(info batch.Info) Key {
	p := info.Place
	plan, seq := descending(p.Plan), descending(p.Seq)
	switch {
	case info.Pending > 0:
		return Key{2, descending(info.Task)}
	case p.Last:
		return Key{1, plan, seq}
	default:
		return Key{0, plan, descending(signed(int64(p.Rank))), seq}
	}
}

// LRU moves first what was used least recently, by batch.Info.LastUse.
func LRU() Policy {
	return ordered{"lru", func(info batch.Info) Key { return Key{signed(info.LastUse)} }}
}

// LargestFirst moves the largest batches first: the fewest moves for the bytes.
func LargestFirst() Policy {
	return ordered{"largest-first", func(info batch.Info) Key { return Key{descending(uint64(max(0, info.Bytes)))} }}
}

// costAware is CostAware.
type costAware struct{}

// CostAware moves first what takes the least time for the most bytes and the longest rest. Batches
// of which nothing is known but their place in a plan go as PlanOrder says, and before those that
// were used, which will be again. Of these, the time until the next use is multiplied by the bytes
// that are freed, and divided by the time for going and coming back: a batch that has a copy goes
// for nothing. The next use is expected after as long as between the last ones, see
// batch.Info.NextUse. What has not been used for much longer than that goes before all these, and
// what Batch.Hint says is not used again before all. The inputs of queued tasks go last, as in
// PlanOrder, and then what a hint keeps.
func CostAware() Policy { return costAware{} }

func (costAware) Name() string   { return "cost-aware" }
func (costAware) String() string { return "cost-aware" }

// The first words of costAware's keys. Between unused and used lie the classes of planKey.
const (
	unneeded = 0
	unused   = 1
	used     = 3
	queued   = 4
	kept     = 5
)

func (costAware) Key(info batch.Info) Key {
	switch {
	case info.NextUse == batch.Stay:
		return Key{kept, signed(info.LastUse)}
	case info.Pending > 0:
		return Key{queued, descending(info.Task)}
	case info.NextUse == batch.Never:
		return Key{unneeded, signed(info.LastUse)}
	case info.NextUse == 0:
		k := planKey(info)
		k[0] += unused
		return k
	}
	return Key{used, descending(signed(info.NextUse)), signed(info.LastUse)}
}

// patience is for how many times the expected gap between uses a batch may have been unused before
// it counts as unneeded.
const patience = 4

// rest returns for how long a batch that was used will not be, as far as can be told, and whether
// it seems to be unneeded. One that is late may come soon, or as late again.
func (k Key) rest(now int64) (ns int64, stale bool) {
	next, last := unsigned(^k[1]), unsigned(k[2])
	return max(1, next-now, now-next), next > last && (now-last)/patience > next-last
}

// stale reports whether a batch seems to be unneeded. Of those that were used, they are among the
// last in the order of keys.
func (costAware) stale(k Key, now int64) bool {
	if k[0] != used {
		return false
	}
	_, stale := k.rest(now)
	return stale
}

// across is the key by which batches of several spaces are compared: what is needed last goes down
// first, whatever that costs, because one of them will.
func (costAware) across(k Key, now int64) Key {
	if k[0] *= 2; k[0] != 2*used {
		return k
	}
	rest, stale := Key{used, k[1], k[2]}.rest(now)
	if stale {
		k[0] = 2*unneeded + 1
	}
	return Key{k[0], descending(uint64(rest))}
}

func (costAware) Order(now int64, list []Victim) {
	type rank struct {
		class float64
		worth float64
	}
	ranks := make(map[batch.ID]rank, len(list))
	for i := range list {
		v := &list[i]
		r := rank{class: float64(v.Key[0])}
		if v.Key[0] == used {
			rest, stale := v.Key.rest(now)
			if stale {
				r.class = unneeded + 0.5
			}
			r.worth = float64(rest) * float64(v.Bytes) / float64(max(1, v.Down+v.Up))
		}
		ranks[v.ID] = r
	}
	slices.SortStableFunc(list, func(a, b Victim) int {
		x, y := ranks[a.ID], ranks[b.ID]
		return cmp.Or(cmp.Compare(x.class, y.class), cmp.Compare(y.worth, x.worth))
	})
}

// policies lists what ByName knows, the default first.
func policies() []Policy { return []Policy{PlanOrder(), LRU(), LargestFirst(), CostAware()} }

// ByName returns the policy of that name: "plan-order", "lru",
// "largest-first" or "cost-aware". The empty name means the default, PlanOrder.
func ByName(name string) (Policy, error) {
	all := policies()
	if name == "" {
		return all[0], nil
	}
	if i := slices.IndexFunc(all, func(p Policy) bool { return p.Name() == name }); i >= 0 {
		return all[i], nil
	}
	return nil, fmt.Errorf("monitor: policy %q is unknown: want one of %s", name, strings.Join(Names(), ", "))
}

// Names lists the policies that ByName knows, the default first.
func Names() []string {
	var names []string
	for _, p := range policies() {
		names = append(names, p.Name())
	}
	return names
}
