package reservation

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/spillway-db/spillway/tier"
)

// Strategy selects the spaces in which a request may be served. Strategies are values
// that are made once and used often, from many goroutines.
type Strategy interface {
	// Candidates appends the spaces that may serve the request to dst, best
	// first, and returns it. A request is put into the first that has room below its trigger,
	// where nothing need be moved away for it; or else into the first that has room. A request
	// waits for any of them. No candidate at all is an error of the request.
	// Candidates is called with no lock held, often, and should not allocate.
	Candidates(spaces *Spaces, dst []*tier.Space) []*tier.Space
	// String names the strategy in error messages.
	String() string
}

// AnyInTier is every space of a kind, the one with the most room first, less what others hold on
// its device; of spill volumes the one whose turn it is, so that each gets bytes in proportion to
// how fast it takes them. Two such strategies of one kind are equal.
func AnyInTier(k tier.Kind) Strategy {
	if o := anyInTier[k]; o != nil {
		return o
	}
	return &order{kinds: []tier.Kind{k}} // an unknown kind, which has no spaces
}

// anyInTier holds the strategies that AnyInTier returns.
var anyInTier = func() map[tier.Kind]*order {
	all := make(map[tier.Kind]*order)
	for k := tier.GPU; k.Valid(); k++ {
		all[k] = &order{kinds: []tier.Kind{k}}
	}
	return all
}()

// AnyInTierPreferring is every space of a kind: the one with that ordinal first,
// if there is one, then the others in the order of AnyInTier.
func AnyInTierPreferring(k tier.Kind, ordinal int) Strategy {
	return &order{first: true, space: tier.ID{Kind: k, Ordinal: ordinal}, kinds: []tier.Kind{k}}
}

// Specific is one space. If there is no such space the request is an error.
func Specific(id tier.ID) Strategy { return &order{first: true, space: id} }

// AnyInTiers is every space of the first kind, then every space of the next,
// and so on; within a kind in the order of AnyInTier.
func AnyInTiers(kinds ...tier.Kind) Strategy { return &order{kinds: slices.Clone(kinds)} }

// ToDowngrade is every space of a slower kind to which data in from can move down: the nearest
// first, by Config.Distance between their NUMA nodes and then those that are paired with it, and
// those equally near in the order of AnyInTier. A kind that is not slower, or a space that is
// unknown, has no candidates.
func ToDowngrade(from tier.ID, to tier.Kind) Strategy {
	return &order{way: "down", space: from, kinds: []tier.Kind{to}}
}

// ToUpgrade is every space of a faster kind to which data in from can move up,
// in the order of ToDowngrade.
func ToUpgrade(from tier.ID, to tier.Kind) Strategy {
	return &order{way: "up", space: from, kinds: []tier.Kind{to}}
}

// order is all the strategies above: one space, if first is set, and then those of each kind in turn.
type order struct {
	first bool
	way   string // "up" or "down": the nearest to space come first; else ""
	space tier.ID
	kinds []tier.Kind
}

// Candidates implements Strategy. Spaces change while it looks; then the order is as good as any.
func (o *order) Candidates(spaces *Spaces, dst []*tier.Space) []*tier.Space {
	sp, known := spaces.ByID(o.space)
	switch {
	case o.first && known:
		dst = append(dst, sp)
	case o.way == "":
	case !known, o.kinds[0] == o.space.Kind, (o.kinds[0] > o.space.Kind) != (o.way == "down"):
		return dst
	}
	for _, k := range o.kinds {
		start := len(dst)
		for _, sp := range spaces.InTier(k) {
			if !slices.Contains(dst[:start], sp) {
				dst = append(dst, sp)
			}
		}
		slices.SortStableFunc(dst[start:], func(a, b *tier.Space) int {
			if o.way != "" {
				toA, toB := spaces.distance[[2]tier.ID{o.space, a.ID()}], spaces.distance[[2]tier.ID{o.space, b.ID()}]
				if c := slices.Compare(toA[:], toB[:]); c != 0 {
					return c
				}
			}
			// A GPU that is full of others' memory comes after one that is not, although its books have as
			// much room.
			inA, inB := a.State(), b.State()
			return cmp.Or(a.Pace().Compare(b.Pace()),
				cmp.Compare(inB.Available-inB.External, inA.Available-inA.External))
		})
	}
	return dst
}

func (o *order) String() string {
	kinds := "of no tiers"
	for i, k := range o.kinds {
		if i == 0 {
			kinds = k.String()
		} else {
			kinds += ", then " + k.String()
		}
	}
	switch {
	case o.way != "":
		return fmt.Sprintf("%s from %s to %s", o.way, o.space, kinds)
	case o.first && len(o.kinds) == 0:
		return o.space.String()
	case o.first:
		return fmt.Sprintf("any %s, preferring %d", kinds, o.space.Ordinal)
	}
	return "any " + kinds
}
