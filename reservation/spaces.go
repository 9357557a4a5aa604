package reservation

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/tier"
)

// Spaces is the set of spaces that a manager hands out, ordered by kind and
// ordinal. It never changes and is safe for concurrent use.
type Spaces struct {
	all   []*tier.Space
	kinds [tier.Disk + 1]struct{ from, to int } // by kind: a range of all
	// distance has at i*len(all)+j that between spaces i and j, and 0 if they are paired, else 1.
	distance [][2]int
}

func newSpaces(spaces []*tier.Space, distance func(a, b int) int, paired func(a, b tier.ID) bool) (_ *Spaces, err error) {
	defer guard.Error(&err, "Config.Distance or Config.Paired")
	if len(spaces) == 0 {
		return nil, errors.New("reservation: at least one space is required")
	}
	if slices.Contains(spaces, nil) {
		return nil, errors.New("reservation: a space is nil")
	}
	s := &Spaces{all: slices.Clone(spaces)}
	slices.SortFunc(s.all, func(a, b *tier.Space) int {
		return cmp.Or(cmp.Compare(a.Kind(), b.Kind()), cmp.Compare(a.ID().Ordinal, b.ID().Ordinal))
	})
	for i, sp := range s.all {
		if i > 0 && s.all[i-1].ID() == sp.ID() {
			return nil, fmt.Errorf("reservation: there are two spaces %s", sp.ID())
		}
		r := &s.kinds[sp.Kind()]
		if r.to == 0 {
			r.from = i
		}
		r.to = i + 1
	}
	if distance == nil {
		distance = func(a, b int) int { // knows only near and far; a node that is unknown is far from all
			if a == b && a >= 0 {
				return 0
			}
			return 1
		}
	}
	for _, a := range s.all {
		for _, b := range s.all {
			d := [2]int{distance(a.Node(), b.Node()), 1}
			if paired != nil && paired(a.ID(), b.ID()) {
				d[1] = 0
			}
			s.distance = append(s.distance, d)
		}
	}
	return s, nil
}

// All returns all spaces, ordered by kind and ordinal. The caller must not
// change the slice.
func (s *Spaces) All() []*tier.Space { return s.all }

// InTier returns the spaces of one kind, ordered by ordinal. The caller must
// not change the slice.
func (s *Spaces) InTier(k tier.Kind) []*tier.Space {
	if !k.Valid() {
		return nil
	}
	r := s.kinds[k]
	return s.all[r.from:r.to:r.to]
}

// ByID returns the space named id, if there is one.
func (s *Spaces) ByID(id tier.ID) (*tier.Space, bool) {
	if i := s.index(id); i >= 0 {
		return s.all[i], true
	}
	return nil, false
}

func (s *Spaces) index(id tier.ID) int {
	if !id.Valid() {
		return -1
	}
	r := s.kinds[id.Kind]
	for i := r.from; i < r.to; i++ {
		if s.all[i].ID() == id {
			return i
		}
	}
	return -1
}

// nearer is negative if a is nearer to from than b, positive if it is farther; all
// are spaces of the set.
func (s *Spaces) nearer(from, a, b tier.ID) int {
	row := s.index(from) * len(s.all)
	return slices.Compare(s.distance[row+s.index(a)][:], s.distance[row+s.index(b)][:])
}
