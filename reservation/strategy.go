package reservation

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spillway-db/spillway/tier"
)

// Strategy says in which spaces a request may be put. Strategies are values
// that are made once and used often, from many goroutines.
type Strategy interface {
	// Candidates appends the spaces that may serve the request to dst, best
	// first, and returns it. A request is put into the first that has room, and
	// waits for any of them. No candidate at all is an error of the request.
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

// AnyInTier is every space of a kind, the one with the most room first, less what others hold on its device; of spill
// volumes the one whose turn it is, so that each gets bytes in proportion to how fast it
// takes them.
func AnyInTier(k tier.Kind) Strategy { return anyInTier(k) }

// AnyInTierPreferring is every space of a kind: the one with that ordinal first,
// if there is one, then the others in the order of AnyInTier.
func AnyInTierPreferring(k tier.Kind, ordinal int) Strategy {
	return preferring{tier.ID{Kind: k, Ordinal: ordinal}}
}

// Specific is one space. If there is no such space the request is an error.
func Specific(id tier.ID) Strategy { return specific{id} }

// AnyInTiers is every space of the first kind, then every space of the next,
// and so on; within a kind in the order of AnyInTier.
func AnyInTiers(kinds ...tier.Kind) Strategy { return anyInTiers(slices.Clone(kinds)) }

// ToDowngrade is every space of a slower kind to which data in from can move
// down: the nearest first, by Config.Distance between their NUMA nodes and then those
// that are paired with it, and those equally near in the order of AnyInTier. A kind that is not slower, or a
// space that is unknown, has no candidates.
func ToDowngrade(from tier.ID, to tier.Kind) Strategy { return move{from, to, true} }

// ToUpgrade is every space of a faster kind to which data in from can move up,
// in the order of ToDowngrade.
func ToUpgrade(from tier.ID, to tier.Kind) Strategy { return move{from, to, false} }

// anyInTier is a byte, so that making one does not allocate.
type anyInTier tier.Kind

func (a anyInTier) Candidates(spaces *Spaces, dst []*tier.Space) []*tier.Space {
	return appendBest(dst, spaces.InTier(tier.Kind(a)), nil)
}

func (a anyInTier) String() string { return "any " + tier.Kind(a).String() }

type preferring struct{ id tier.ID }

func (p preferring) Candidates(spaces *Spaces, dst []*tier.Space) []*tier.Space {
	first, ok := spaces.ByID(p.id)
	if ok {
		dst = append(dst, first)
	}
	return appendBest(dst, spaces.InTier(p.id.Kind), first)
}

func (p preferring) String() string {
	return fmt.Sprintf("any %s, preferring %d", p.id.Kind, p.id.Ordinal)
}

type specific struct{ id tier.ID }

func (s specific) Candidates(spaces *Spaces, dst []*tier.Space) []*tier.Space {
	if sp, ok := spaces.ByID(s.id); ok {
		dst = append(dst, sp)
	}
	return dst
}

func (s specific) String() string { return s.id.String() }

type anyInTiers []tier.Kind

func (a anyInTiers) Candidates(spaces *Spaces, dst []*tier.Space) []*tier.Space {
	for _, k := range a {
		dst = appendBest(dst, spaces.InTier(k), nil)
	}
	return dst
}

func (a anyInTiers) String() string {
	if len(a) == 0 {
		return "any of no tiers"
	}
	names := make([]string, len(a))
	for i, k := range a {
		names[i] = k.String()
	}
	return "any " + strings.Join(names, ", then ")
}

type move struct {
	from tier.ID
	to   tier.Kind
	down bool
}

func (m move) Candidates(spaces *Spaces, dst []*tier.Space) []*tier.Space {
	if _, ok := spaces.ByID(m.from); !ok || m.to == m.from.Kind || (m.to > m.from.Kind) != m.down {
		return dst
	}
	start := len(dst)
	for _, sp := range spaces.InTier(m.to) {
		dst = append(dst, sp)
		for i := len(dst) - 1; i > start; i-- {
			nearer := spaces.nearer(m.from, dst[i].ID(), dst[i-1].ID())
			if nearer > 0 || nearer == 0 && !before(dst[i], dst[i-1]) {
				break
			}
			dst[i], dst[i-1] = dst[i-1], dst[i]
		}
	}
	return dst
}

func (m move) String() string {
	way := "up"
	if m.down {
		way = "down"
	}
	return way + " from " + m.from.Kind.String() + ":" + strconv.Itoa(m.from.Ordinal) + " to " + m.to.String()
}

// before says whether a, of two spaces that are equally good otherwise, should be asked
// for room before b.
func before(a, b *tier.Space) bool {
	if c := a.Pace().Compare(b.Pace()); c != 0 {
		return c < 0
	}
	return left(a) > left(b)
}

// left is what a space could take, less what others hold on its device: a GPU that is full of others' memory
// comes after one that is not, although its books have as much room.
func left(s *tier.Space) int64 { return s.Available() - s.Foreign() }

// appendBest appends all spaces but one, by pace and then by room, and in the order
// given where those are equal. They change while it looks; then the order is as good as
// any.
func appendBest(dst, spaces []*tier.Space, but *tier.Space) []*tier.Space {
	start := len(dst)
	for _, sp := range spaces {
		if sp == but {
			continue
		}
		dst = append(dst, sp)
		for i := len(dst) - 1; i > start && before(dst[i], dst[i-1]); i-- {
			dst[i], dst[i-1] = dst[i-1], dst[i]
		}
	}
	return dst
}
