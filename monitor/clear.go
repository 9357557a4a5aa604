package monitor

import (
	"context"
	"errors"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/decide"
	"github.com/spillway-db/spillway/tier"
)

// Clear moves batches at rest out of a space, one after the other in the policy's order, until
// enough returns true or none is left that can be moved. It is for callers that have room in a
// space, but not in one piece: each batch that has left may have made the piece. enough is called
// at the beginning, too, and never by two calls for one space at the same time.
//
// Clear waits for the moves, and for others that evict from the space, but for no release. A batch
// that is in use, or finds no room in any slower tier, stays. So does one that cannot be converted,
// with the pauses and the one event that follow other moves, too.
func (m *Monitor) Clear(ctx context.Context, id tier.ID, enough func() bool) {
	i, known := m.byID[id]
	if !known || m.spaces[i].lower == 0 {
		return
	}
	s := m.spaces[i]
	if !s.take(ctx) {
		return
	}
	defer m.give(s)
	if enough() {
		return
	}
	m.putBack(time.Now())
	targets, failures := s.below(m), make(map[*space]int) // in a row
	over := false                                         // nothing can be moved any more
	// move moves a batch to the first slower space that has room, and reports whether it did.
	move := func(v Victim) bool {
		for _, to := range targets {
			if v.not.Has(to.Kind()) || to.Lost() != nil || failures[to] >= giveUp {
				continue
			}
			err := m.move(ctx, v, s, to, decide.Demand)
			if kindOf(err, to.ID()) == failed { // which says nothing of other moves
				m.stats.count(failed, v.Bytes)
				failures[to]++
				over = errors.Is(err, tier.ErrClosed)
				continue
			}
			switch m.noteMove(v, s, to, err) {
			case moved:
				failures[to] = 0
				return true
			case busy, cancelled:
				return false
			}
		}
		return false
	}
	seen := make(map[*batch.Batch]bool)
	limit := m.index.summary(i).count // batches may come as fast as others leave
	for fresh := true; fresh && len(seen) < limit; {
		fresh = false
		victims, _ := m.victims(s, shortlistMax)
		for _, v := range victims {
			if seen[v.Batch] {
				continue
			}
			seen[v.Batch], fresh = true, true
			if move(v) && enough() || ctx.Err() != nil || over {
				return
			}
		}
	}
}
