package monitor

import (
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/decide"
	"github.com/spillway-db/spillway/internal/guard"
)

// Key places a batch in the order of victims. Keys are compared word by word;
// the smallest goes down first.
type Key [4]int64

// Victim is a batch that could be moved down.
type Victim struct {
	Batch *batch.Batch
	ID    batch.ID
	Bytes int64 // what it is charged where it is, so what a move frees there
	Key   Key
	// Down and Up are about how long it takes to move it to where it would go, and back. Down is 0 if
	// it has a clean image in a slower space.
	Down, Up time.Duration

	not    decide.Kinds  // the tiers that it is not to be moved to now
	copied decide.Places // the spaces that have a clean image of it
	alone  bool          // it is not moved together with others
}

// Policy orders the batches: those that go down first. Its methods must be pure: the same
// arguments give the same result, nothing is kept and nothing is waited for.
// They are called with no lock held, from many goroutines.
type Policy interface {
	// Name is what ByName and reports call it.
	Name() string
	// Key is computed whenever a batch changes, never by the passing of time, so
	// that an index can be kept and no scan is needed.
	Key(info batch.Info) Key
	// Order may rearrange the batches with the smallest keys of one space, at most 1,024, which come
	// ordered by key. It may also replace their Keys, by which victims of several spaces are compared.
	// It is for what a key cannot contain: costs, and the time, which is now, in unix nanoseconds.
	Order(now int64, shortlist []Victim)
}

// ordered is a policy that consists of its key.
type ordered struct {
	name string
	key  func(batch.Info) Key
}

func (p ordered) Name() string            { return p.name }
func (p ordered) Key(info batch.Info) Key { return p.key(info) }
func (p ordered) Order(int64, []Victim)   {}
func (p ordered) String() string          { return p.name }

// guarded is a policy of the program's. Its panics are logged: a batch then has the zero key, and a
// shortlist the order of the keys.
type guarded struct {
	Policy
	panics *guard.Log
}

func (p guarded) Key(info batch.Info) (key Key) {
	defer p.panics.Recover("Policy.Key")
	return p.Policy.Key(info)
}

func (p guarded) Order(now int64, list []Victim) {
	defer p.panics.Recover("Policy.Order")
	p.Policy.Order(now, list)
}

// PlanOrder moves first what a plan needs last. Three classes follow each other: batches that no task
// asked for; of those, the ones in a plan's output repository; the inputs of tasks that are queued.
// Within each the youngest plan gives first, so that the oldest can finish. Within a plan the batches
// without tasks go from the repository nearest to the output towards the scans, the newest batch
// first: what is near a scan is consumed next, in the order of arrival. Inputs of tasks, of whatever
// plan, go from the back of the queue: the task that was created last comes last. RunTask creates one
// for each of its inputs before it waits.
func PlanOrder() Policy {
	return ordered{"plan-order", func(info batch.Info) Key { return planKey(info, false) }}
}

// PlanOrderFromScans is PlanOrder the other way round: within a plan batches go from the scans towards
// the output. It is for plans that consume what is near the output first, and can read what was
// scanned again later.
func PlanOrderFromScans() Policy {
	return ordered{"plan-order-from-scans", func(info batch.Info) Key { return planKey(info, true) }}
}

func planKey(info batch.Info, fromScans bool) Key {
	p := info.Place
	// As signed words, the largest of the numbers comes first.
	plan, rank, seq := int64(p.Plan^math.MaxInt64), int64(p.Rank), int64(p.Seq^math.MaxInt64)
	if !fromScans {
		rank = -rank
	}
	switch {
	case info.Pending > 0:
		return Key{2, int64(info.Task ^ math.MaxInt64)}
	case p.Last:
		return Key{1, plan, math.MaxInt64, seq} // behind all ranks
	}
	return Key{0, plan, rank, seq}
}

// LRU moves first what was used least recently, by batch.Info.LastUse.
func LRU() Policy {
	return ordered{"lru", func(info batch.Info) Key { return Key{info.LastUse} }}
}

// LargestFirst moves the largest batches first: the fewest moves for the bytes.
func LargestFirst() Policy {
	return ordered{"largest-first", func(info batch.Info) Key { return Key{-info.Bytes} }}
}

// policies lists the policies of ByName, the default first.
func policies() []Policy {
	return []Policy{CostAware(), PlanOrder(), PlanOrderFromScans(), LRU(), LargestFirst()}
}

// ByName returns the policy of that name, which is one of Names. The empty name means the default,
// CostAware.
func ByName(name string) (Policy, error) {
	for _, p := range policies() {
		if name == "" || p.Name() == name {
			return p, nil
		}
	}
	return nil, fmt.Errorf("monitor: policy %q is unknown: want one of %s", name, strings.Join(Names(), ", "))
}

// Names lists the names that ByName accepts, the default first.
func Names() []string {
	var names []string
	for _, p := range policies() {
		names = append(names, p.Name())
	}
	return names
}
