package convert

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// Moved is what Measure returns of two spaces.
type Moved struct {
	From, To tier.ID
	Bytes    int64 // of the body
	Took     time.Duration
	Err      error
}

// Measure moves a batch of rec's data from each space to each other one: once without measuring,
// and then times times. It returns an entry for each pair of spaces, in their order: Bytes is the
// size of a move, Took the median. If a batch cannot go there, Err is the reason: a
// *NoConverterError, or a *reservation.ExceededError if rec is too large for one of the two.
//
// The moves count in Stats, and so teach the monitor how fast each edge is. They wait for room as
// others do, and Took has these waits in it: the engine should be idle. All room is given back.
// Measure ends early only with ctx and with the mover.
func (m *Mover) Measure(ctx context.Context, rec arrow.RecordBatch, times int) (edges []Moved, err error) {
	if times < 1 {
		return nil, fmt.Errorf("convert: measuring %d times: want at least 1", times)
	}
	if rec == nil {
		return nil, errors.New("convert: measuring moves: the record is nil")
	}
	ctx, end, err := m.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	spaces := m.cfg.Reservations.Spaces().All()
	for _, from := range spaces {
		for _, to := range spaces {
			if from == to {
				continue
			}
			e := Moved{From: from.ID(), To: to.ID()}
			var all []time.Duration
			for len(all) <= times && e.Err == nil {
				var took time.Duration
				took, e.Bytes, e.Err = m.moveNew(ctx, rec, from, to)
				all = append(all, took)
			}
			if ctx.Err() != nil {
				err = context.Cause(ctx)
				return nil, fmt.Errorf("convert: measuring moves from %s to %s: %w", from.ID(), to.ID(), err)
			}
			if e.Err == nil {
				all = all[1:]
				slices.Sort(all)
				e.Took = (all[(times-1)/2] + all[times/2]) / 2
			}
			edges = append(edges, e)
		}
	}
	return edges, nil
}

// moveNew moves a batch that it makes, and returns how long that took and how large its body is. The
// batch is in no monitor's index, so none moves it.
func (m *Mover) moveNew(
	ctx context.Context, rec arrow.RecordBatch, from, to *tier.Space,
) (took time.Duration, body int64, err error) {
	p, err := m.Ingest(ctx, rec, reservation.Specific(from.ID()))
	if err != nil {
		return 0, 0, err
	}
	b, err := batch.New(batch.Options{IDs: m.cfg.IDs, Payload: p})
	if err != nil {
		return 0, 0, errors.Join(err, release(p))
	}
	defer func() { err = errors.Join(err, b.Drop()) }()
	if err := from.Lost(); err != nil {
		return 0, 0, err
	}
	if p.Space() != from { // it never fits there
		return 0, 0, &reservation.ExceededError{
			Space: from.ID(), Requested: p.Bytes(), Available: from.State().Available, Limit: from.Capacity,
		}
	}
	start := time.Now()
	if err := m.Move(ctx, b, reservation.Specific(to.ID())); err != nil {
		return 0, 0, err
	}
	return time.Since(start), b.Info().Descriptor.Body, nil // with the reservation and the release of the old payload
}
