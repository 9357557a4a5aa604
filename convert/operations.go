package convert

import (
	"context"
	"fmt"

	"github.com/spillway-db/spillway/internal/gate"
	"github.com/spillway-db/spillway/tier"
)

// operations are those of a mover that are under way. Closing cancels them and waits for
// them: what they work on is taken apart after that.
type operations struct {
	inside gate.Gate
	life   context.Context // ends with tier.ErrClosed when they are closed
	end    context.CancelCauseFunc
}

func newOperations() *operations {
	o := new(operations)
	o.life, o.end = context.WithCancelCause(context.Background())
	return o
}

// begin starts an operation. The context that it returns ends with ctx and when the
// operations are closed; end must be called once.
func (o *operations) begin(ctx context.Context) (_ context.Context, end func(), err error) {
	if !o.inside.Enter() {
		return nil, nil, fmt.Errorf("convert: the mover is %w", tier.ErrClosed)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(o.life, func() { cancel(context.Cause(o.life)) })
	return ctx, func() {
		stop()
		cancel(nil)
		o.inside.Leave()
	}, nil
}

// close refuses operations from now on, cancels those under way and waits for them. It
// says whether it was the first.
func (o *operations) close() bool {
	first := o.inside.Shut()
	o.end(tier.ErrClosed)
	o.inside.Wait()
	return first
}
