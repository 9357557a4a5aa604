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
// reservations that are open there, by plan, operator and owner; the buffers of programs; the batches
// at rest and in transit, and dictionaries of copies, by plan and operator; the engine's own; and what
// others hold on the device. Each byte is counted once, as long as nothing moves; tier.Holdings
// says what shows then. False means that the engine has no such space.
// It looks at every batch of the engine: with a million of them it takes some tenths of a second.
func (e *Engine) Holders(id tier.ID) (tier.Holdings, bool) {
	space, ok := e.reservations.Spaces().ByID(id)
	if !ok {
		return tier.Holdings{}, false
	}
	all := space.Holdings(func(add func(tier.Holder, any, int64)) {
		type copied struct {
			by tier.Holder
			of dictionaries
		}
		var copies []copied
		looks := space.Usage().Cached > 0
		e.monitor.Inside().Each(func(b *batch.Batch) {
			now := b.Inside().Cut()
			at := now.Place
			if looks && now.Space != id {
				b.Inside().EachCopy(func(p batch.Payload) {
					if d, ok := p.(sharing); ok && p.Space().ID() == id && len(d.Shared()) > 0 {
						copies = append(copies, copied{tier.Holder{What: "copy", Plan: at.Name, Operator: at.Operator, Port: at.Port, Batch: uint64(now.ID)}, dictionaries{d}})
					}
				})
			}
			if now.Space != id || now.Active > 0 || now.State == batch.Released {
				return
			}
			add(tier.Holder{What: "batch", Plan: at.Name, Operator: at.Operator, Port: at.Port, Batch: uint64(now.ID)}, now.Payload, now.Bytes)
		})
		for _, c := range copies { // last, so that what batches have is theirs
			add(c.by, c.of, 0)
		}
	})
	return all, true
}

// dictionaries are what a copy shares: they stay in use, though its own memory counts as free.
type dictionaries struct{ sharing }

func (dictionaries) Buffers() []*tier.Buffer { return nil }

// sharing is a payload that shares dictionaries with others.
type sharing interface {
	Shared() []batch.Shared
	EachShared(func(*tier.Buffer))
}

// heldBy adds to the final error of a task that ran out of memory who holds the space that it wanted.
func (e *Engine) heldBy(err error) error {
	if err == nil || !admission.OutOfMemory(err) {
		return err
	}
	var attempts *admission.AttemptsError
	var exceeded *reservation.ExceededError
	var full *tier.NoSpaceError
	id := tier.ID{}
	switch {
	case errors.As(err, &attempts):
		id = attempts.Space
	case errors.As(err, &exceeded):
		id = exceeded.Space
	case errors.As(err, &full):
		id = full.Space
	}
	held, ok := e.Holders(id)
	if !ok {
		return err
	}
	return fmt.Errorf("%w; in %s %s", err, id, held)
}
