package convert

import (
	"context"

	"github.com/spillway-db/spillway/batch"
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
	return m.run(ctx, &move{b: b, given: r, reason: ReasonWork, opens: true})
}

// ReadIn is AcquireIn, but leaves pending tasks to their callers.
func (m inside) ReadIn(ctx context.Context, b *batch.Batch, r reservation.Reservation) (*batch.Handle, error) {
	return m.run(ctx, &move{b: b, given: r, reason: ReasonWork, opens: true, keepsPending: true})
}

// Charges returns what batches and the dictionaries that they share take in a space: how many bytes
// are there already, and how many would have to be brought. Batches that were dropped count
// nothing, and those that are just being moved are not there. By the time it returns others may
// have moved some.
func (m inside) Charges(s *tier.Space, batches ...*batch.Batch) (there, missing int64) {
	// Whether a dictionary is in the space depends on the batches there that have it. One that only
	// leaving batches have leaves with them.
	const elsewhere, leaving, staying = 0, 1, 2
	held := make(map[*transfer.Dictionary]int)
	for _, b := range batches {
		info := b.Info()
		if info.State == batch.Released {
			continue
		}
		what, at := m.takes(info.Descriptor, info.Bytes), elsewhere
		switch {
		case info.Space != s.ID():
			missing += s.Charge(what.body)
		case info.State == batch.InTransit:
			missing += s.Charge(what.body)
			at = leaving
		default:
			there += info.Bytes
			at = staying
		}
		for _, d := range what.dicts {
			held[d] = max(held[d], at)
		}
	}
	var absent int64
	var others []*transfer.Dictionary
	for d, at := range held {
		there += s.Charge(d.Body)
		if at == leaving {
			absent += s.Charge(d.Body)
		} else {
			others = append(others, d)
		}
	}
	absent += m.cfg.Builtin.Dicts.Missing(s, others)
	return there - absent, missing + absent
}
