package monitor

import (
	"context"
	"errors"
	"math"
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
// Clear waits for the moves, and for other calls for the same space, but for no release. A batch
// that is in use, or finds no room in any slower tier, stays. So does one that cannot be converted,
// with the pauses and the one event that it has in Run. Clear may be called while Run is running, and without
// it.
func (m *Monitor) Clear(ctx context.Context, id tier.ID, enough func() bool) {
	i, ok := m.byID[id]
	if !ok || len(m.spaces[i].edges) == 0 {
		return
	}
	s := m.spaces[i]
	select {
	case s.clearing <- struct{}{}:
		defer func() { <-s.clearing }()
	case <-ctx.Done():
		return
	}
	if enough() {
		return
	}
	m.putBack(time.Now())
	targets := s.below(m.cfg.Reservations.Spaces(), nil)
	failures := make(map[tier.ID]int) // in a row
	over := false                     // nothing can be moved any more
	// move moves a batch to the first slower space that has room, and reports whether it did.
	move := func(v Victim) bool {
		m.index.setAside(v.Batch, true) // from Run
		defer m.index.setAside(v.Batch, false)
		not := v.not
		for _, to := range targets {
			if not.Has(to.Kind()) || to.Lost() != nil || failures[to.ID()] >= giveUp {
				continue
			}
			err := m.move(ctx, v, s.ID(), to.ID(), decide.Demand)
			kind := kindOf(err, to.ID())
			m.stats.count(kind, v.Bytes)
			switch kind {
			case moved:
				failures[to.ID()] = 0
				return true
			case noRoom:
			case unmovable:
				r := result{choice: choice{Victim: v, From: i, To: m.byID[to.ID()]}, err: err}
				not = m.fault(r, kind, time.Now())
			case failed:
				failures[to.ID()]++
				over = errors.Is(err, tier.ErrClosed)
			default: // in use, or cancelled
				return false
			}
		}
		return false
	}
	seen := make(map[*batch.Batch]bool)
	limit := m.index.summary(i).count // batches may come as fast as others leave
	for fresh := true; fresh && len(seen) < limit; {
		fresh = false
		victims, _ := m.victims(nil, i, inEach(math.MaxInt64), shortlistMax)
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
