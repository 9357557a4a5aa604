package convert

import (
	"context"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/lookup"
	"github.com/spillway-db/spillway/internal/transfer"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// AcquireIn is Acquire for callers that have room already: it brings b to the space of r, with
// memory drawn from r, and locks it there. Charges returns what it draws; that stays the batch's
// when r is released. A batch that is in the space is locked there and draws nothing.
//
// It never waits for room, only for others that move the batch or hold it elsewhere. Too little in
// r is a *reservation.ExceededError (unless r's policy helps). If the room is in pieces, even after
// reservation.Config.Clear, the error is a *tier.NoSpaceError. It does not wait for more while r is
// held, because others may wait for r's room. r must stay unreleased until AcquireIn returns. If
// ctx names no owner, the handle is that of r's owner.
func (m *Mover) AcquireIn(ctx context.Context, b *batch.Batch, r reservation.Reservation) (*batch.Handle, error) {
	return m.acquireIn(ctx, &trip{b: b, given: r})
}

// ReadIn is AcquireIn, but leaves pending tasks to their callers.
func (m inside) ReadIn(ctx context.Context, b *batch.Batch, r reservation.Reservation) (*batch.Handle, error) {
	return m.acquireIn(ctx, &trip{b: b, given: r, beside: true})
}

// acquireIn is both, for the rest of t.
func (m *Mover) acquireIn(ctx context.Context, t *trip) (*batch.Handle, error) {
	if o := t.given.Owner(); o != nil && reservation.OwnerOf(ctx) == nil {
		ctx = o.Context(ctx)
	}
	t.to, t.reason, t.opens = reservation.Specific(t.given.Space().ID()), ReasonWork, true
	return m.bring(ctx, t)
}

// tooLittle is the error about a reservation that b's body and the dictionaries that
// are not there do not fit into.
func (m *Mover) tooLittle(r reservation.Reservation, what *takes) error {
	s := r.Space()
	return &reservation.ExceededError{
		Space: s.ID(), Requested: s.Charge(what.in(s)), Available: r.Unused(), Limit: r.Bytes(),
		Hint: "reserve more for the inputs",
	}
}

// Charges returns what batches and the dictionaries that they share take in a space: how many bytes
// are there already, and how many would have to be brought. Batches that were dropped count
// nothing, and those that are just being moved are not there. By the time it returns others may
// have moved some.
func (m inside) Charges(s *tier.Space, batches ...*batch.Batch) (there, missing int64) {
	var dicts, stay []*transfer.Dictionary // those of all, and of the batches that are there
	var leave []*transfer.Dictionary       // and of those that leave
	var seen, left, stayed lookup.Table[*transfer.Dictionary]
	for _, b := range batches {
		info := b.Info()
		if info.State == batch.Released {
			continue
		}
		what := m.takes(info.Descriptor, info.Bytes, "")
		size, own := what.body, what.dicts
		switch {
		case info.Space != s.ID():
			missing += s.Charge(size)
		case info.State == batch.InTransit:
			missing += s.Charge(size)
			leave = append(leave, own...)
		default:
			there += info.Bytes
			stay = append(stay, own...)
		}
		for _, d := range own {
			if seen.Of(dicts, d) < 0 {
				dicts = append(dicts, d)
			}
		}
	}
	if len(dicts) == 0 {
		return there, missing
	}
	// What only batches that leave hold there leaves with them.
	var absent int64
	kept := dicts[:0]
	for _, d := range dicts {
		there += s.Charge(d.Body)
		if left.Of(leave, d) >= 0 && stayed.Of(stay, d) < 0 {
			absent += s.Charge(d.Body)
		} else {
			kept = append(kept, d)
		}
	}
	absent += m.cfg.Builtin.Dicts.Missing(s, kept)
	return there - absent, missing + absent
}
