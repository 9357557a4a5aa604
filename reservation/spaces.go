package reservation

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/tier"
)

// Spaces is the set of spaces that a manager hands out, ordered by kind and ordinal. It never
// changes and is safe for concurrent use.
type Spaces struct {
	all   []*tier.Space
	kinds [tier.KindCount][]*tier.Space
	// distance is how far apart two spaces are: their nodes, and 0 if they are paired, else 1.
	distance map[[2]tier.ID][2]int
}

func newSpaces(spaces []*tier.Space, nodes func(a, b int) int, paired func(a, b tier.ID) bool) (_ *Spaces, err error) {
	defer guard.Error(&err, "Config.Distance or Config.Paired")
	if len(spaces) == 0 {
		return nil, errors.New("reservation: at least one space is required")
	}
	if slices.Contains(spaces, nil) {
		return nil, errors.New("reservation: a space is nil")
	}
	s := &Spaces{all: slices.Clone(spaces), distance: make(map[[2]tier.ID][2]int)}
	slices.SortFunc(s.all, func(a, b *tier.Space) int {
		return cmp.Or(cmp.Compare(a.Kind(), b.Kind()), cmp.Compare(a.ID().Ordinal, b.ID().Ordinal))
	})
	for i, sp := range s.all {
		if i > 0 && s.all[i-1].ID() == sp.ID() {
			return nil, fmt.Errorf("reservation: there are two spaces %s", sp.ID())
		}
		s.kinds[sp.Kind()] = append(s.kinds[sp.Kind()], sp)
	}
	for _, a := range s.all {
		for _, b := range s.all {
			d := [2]int{1, 1}
			switch {
			case nodes != nil:
				d[0] = nodes(a.Node, b.Node)
			case a.Node == b.Node && a.Node >= 0: // an unknown node is far from all
				d[0] = 0
			}
			if paired != nil && paired(a.ID(), b.ID()) {
				d[1] = 0
			}
			s.distance[[2]tier.ID{a.ID(), b.ID()}] = d
		}
	}
	return s, nil
}

// All returns all spaces, ordered by kind and ordinal. The caller must not change the slice.
func (s *Spaces) All() []*tier.Space { return s.all }

// InTier returns the spaces of one kind, ordered by ordinal. The caller must not change the slice.
func (s *Spaces) InTier(k tier.Kind) []*tier.Space {
	if int(k) >= len(s.kinds) {
		return nil
	}
	return s.kinds[k]
}

// ByID returns the space named id, if there is one.
func (s *Spaces) ByID(id tier.ID) (*tier.Space, bool) {
	for _, sp := range s.all {
		if sp.ID() == id {
			return sp, true
		}
	}
	return nil, false
}
