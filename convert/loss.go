package convert

import (
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/tier"
)

// errLost: the space that a record was being laid out in was lost meanwhile. The record is whole, and there may be others.
var errLost = errors.New("convert: the space was lost meanwhile")

// lostIn returns the error of a batch that lies in a space which is lost: its bytes cannot be had any more.
func (m *Mover) lostIn(id tier.ID) error {
	if s, ok := m.cfg.Reservations.Spaces().ByID(id); ok {
		return s.Lost()
	}
	return nil
}

// ofLost says of an error of work in spaces that one of them is lost, if that is so: what a backend says is its own.
func ofLost(err error, spaces ...*tier.Space) error {
	if err == nil || errors.Is(err, tier.ErrLost) {
		return err
	}
	for _, s := range spaces {
		if lost := s.Lost(); lost != nil {
			return fmt.Errorf("%w: %w", lost, err)
		}
	}
	return err
}
