package reservation

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/spillway-db/spillway/tier"
)

// Strategy says in which spaces a request may be put. Strategies are values
// that are made once and used often, from many goroutines.
type Strategy interface {
	// Candidates appends the spaces that may serve the request to dst, best
	// first, and returns it. A request is put into the first that has room below its trigger,
	// where nothing need be moved away for it; or else into the first that has room. One of
	// ReserveUpTo goes to the first that has room. A request waits for any of them. No candidate
	// at all is an error of the request.
	// Candidates is called with no lock held, often, and should not allocate.
	Candidates(spaces *Spaces, dst []*tier.Space) []*tier.Space
	// String names the strategy in error messages.
	String() string
}

// Sized is a Strategy whose requests take more in some spaces than in others: a batch needs
// room for a dictionary only where that is not yet.
type Sized interface {
	Strategy
	// BytesIn returns how many bytes a request for bytes takes in s, one of the candidates.
	// It must not be negative. It is called as Candidates is, once for each candidate when
	// the request is made: what changes while the request waits does not change what it
	// waits for.
	BytesIn(s *tier.Space, bytes int64) int64
}

// AnyInTier is every space of a kind, the one with the most room first, less what others hold on
// its device; of spill volumes the one whose turn it is, so that each gets bytes in proportion to
// how fast it takes them.
func AnyInTier(k tier.Kind) Strategy { return anyInTier(k) }

// AnyInTierPreferring is every space of a kind: the one with that ordinal first,
// if there is one, then the others in the order of AnyInTier.
func AnyInTierPreferring(k tier.Kind, ordinal int) Strategy {
	return preferring{Kind: k, Ordinal: ordinal}
}

// Specific is one space. If there is no such space the request is an error.
func Specific(id tier.ID) Strategy { return specific(id) }

// AnyInTiers is every space of the first kind, then every space of the next,
// and so on; within a kind in the order of AnyInTier.
func AnyInTiers(kinds ...tier.Kind) Strategy { return anyInTiers(slices.Clone(kinds)) }

// ToDowngrade is every space of a slower kind to which data in from can move down: the nearest
// first, by Config.Distance between their NUMA nodes and then those that are paired with it, and
// those equally near in the order of AnyInTier. A kind that is not slower, or a space that is
// unknown, has no candidates.
func ToDowngrade(from tier.ID, to tier.Kind) Strategy { return move{from, to, "down"} }

// ToUpgrade is every space of a faster kind to which data in from can move up,
// in the order of ToDowngrade.
func ToUpgrade(from tier.ID, to tier.Kind) Strategy { return move{from, to, "up"} }

// anyInTier is a byte, so that making one does not allocate.
type anyInTier tier.Kind

func (a anyInTier) Candidates(spaces *Spaces, dst []*tier.Space) []*tier.Space {
	return spaces.appendBest(dst, tier.Kind(a), nil)
}

func (a anyInTier) String() string { return "any " + tier.Kind(a).String() }

type specific tier.ID

func (s specific) Candidates(spaces *Spaces, dst []*tier.Space) []*tier.Space {
	if sp, ok := spaces.ByID(tier.ID(s)); ok {
		dst = append(dst, sp)
	}
	return dst
}

func (s specific) String() string { return tier.ID(s).String() }

type preferring tier.ID

func (p preferring) Candidates(spaces *Spaces, dst []*tier.Space) []*tier.Space {
	return spaces.appendBest(specific(p).Candidates(spaces, dst), p.Kind, nil)
}

func (p preferring) String() string { return fmt.Sprintf("any %s, preferring %d", p.Kind, p.Ordinal) }

type anyInTiers []tier.Kind

func (a anyInTiers) Candidates(spaces *Spaces, dst []*tier.Space) []*tier.Space {
	for _, k := range a {
		dst = spaces.appendBest(dst, k, nil)
	}
	return dst
}

func (a anyInTiers) String() string {
	if len(a) == 0 {
		return "any of no tiers"
	}
	s := "any " + a[0].String()
	for _, k := range a[1:] {
		s += ", then " + k.String()
	}
	return s
}

type move struct {
	from tier.ID
	to   tier.Kind
	way  string // "up" or "down"
}

func (m move) Candidates(spaces *Spaces, dst []*tier.Space) []*tier.Space {
	if _, ok := spaces.ByID(m.from); !ok || m.to == m.from.Kind || (m.to > m.from.Kind) != (m.way == "down") {
		return dst
	}
	return spaces.appendBest(dst, m.to, &m.from)
}

func (m move) String() string { return fmt.Sprintf("%s from %s to %s", m.way, m.from, m.to) }

// appendBest appends the spaces of a kind that are not in dst yet: the nearest to from first, if
// that is not nil, and of those equally near by pace and then by room. Spaces change while it looks;
// then the order is as good as any.
func (s *Spaces) appendBest(dst []*tier.Space, k tier.Kind, from *tier.ID) []*tier.Space {
	start := len(dst)
	for _, sp := range s.InTier(k) {
		if !slices.Contains(dst[:start], sp) {
			dst = append(dst, sp)
		}
	}
	slices.SortStableFunc(dst[start:], func(a, b *tier.Space) int {
		if from != nil {
			if c := s.compareDistance(*from, a, b); c != 0 {
				return c
			}
		}
		return cmp.Or(a.Pace().Compare(b.Pace()), cmp.Compare(left(b), left(a)))
	})
	return dst
}

// left returns what a space could take, less what others hold on its device. A GPU that is full of
// others' memory comes after one that is not, although its books have as much room.
func left(s *tier.Space) int64 { return s.Available() - s.Foreign() }
