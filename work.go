package spillway

import (
	"context"
	"fmt"

	"github.com/spillway-db/spillway/reservation/arrowmem"
	"github.com/spillway-db/spillway/tier"
)

// Work returns an operator's own memory in one space: the build side of a join, the groups of a
// group-by, or the runs that a merge reads. It waits for o.Min bytes. The operator may Grow it. Other
// requests that find no room, and no batch to evict, have it shrink by o.Reclaim.
//
// The caller must Close the Work, before or after the plan. One that is not closed when the engine is
// closed is part of the LeakError. The errors are those of Engine.Reserve; a closed plan is
// tier.ErrClosed. In errors the Work has the names of the plan and the operator.
func (p *Plan) Work(ctx context.Context, o WorkOptions) (*Work, error) {
	e := p.engine
	e.mu.Lock()
	open := e.plans[p.name] == p
	e.mu.Unlock()
	if !open {
		return nil, fmt.Errorf("spillway: work in plan %q: %w", p.name, tier.ErrClosed)
	}
	o.Operator = p.name + "/" + o.Operator
	return arrowmem.NewWork(ctx, e.reservations, &e.overflow, o)
}
