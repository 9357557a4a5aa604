package spillway

import (
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/tier"
)

// Holders answers why a space is full: who holds its bytes. These are the handles, records and
// reservations that are open there, by plan, operator and owner; the batches at rest and in transit,
// by plan and operator; the engine's own; other buffers; and what others hold on the device. False
// means that the engine has no such space. It looks at every batch of the engine: with a million of
// them it takes some tenths of a second.
func (e *Engine) Holders(id tier.ID) (tier.Holdings, bool) {
	space, ok := e.reservations.Spaces().ByID(id)
	if !ok {
		return tier.Holdings{}, false
	}
	return space.Holdings(func(add func(tier.Holder, any, int64)) {
		e.monitor.Each(func(b *batch.Batch) {
			now := b.Snapshot()
			if now.Space != id || now.Active > 0 || now.State == batch.Released {
				return
			}
			add(tier.Holder{
				What: "batch", Plan: now.Place.Name, Operator: now.Place.Operator, Port: now.Place.Port,
				Batch: uint64(now.ID),
			}, now.Payload, now.Bytes)
		})
	}), true
}

// heldBy adds to the final error of a task that ran out of memory who holds the space that it wanted.
func (e *Engine) heldBy(err error) error {
	if err == nil || !admission.OutOfMemory(err) {
		return err
	}
	var id tier.ID
	if attempts, ok := errors.AsType[*admission.AttemptsError](err); ok {
		id = attempts.Space
	} else if exceeded, ok := errors.AsType[*reservation.ExceededError](err); ok {
		id = exceeded.Space
	} else if full, ok := errors.AsType[*tier.NoSpaceError](err); ok {
		id = full.Space
	}
	held, ok := e.Holders(id)
	if !ok {
		return err
	}
	return fmt.Errorf("%w; in %s %s", err, id, held)
}
