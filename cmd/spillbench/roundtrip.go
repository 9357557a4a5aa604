package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// This file does the work of verify: it moves batches along every edge of an engine's registry,
// there and back, and compares the results with the original records.
//
//	record ─▶ Put ─▶ [ from ─▶ to ─▶ compare ─▶ back ─▶ compare ]  for each edge  ─▶ drop
//
// An edge of the registry is a pair of forms. Here it becomes an edge for each pair of spaces of
// these tiers. If a tier has a single space, a batch is cloned to test the converter of a type to
// itself.
//
// One batch moves at a time, and only if each space has room for two of it, so that no move has to
// wait for room.

// edge is a pair of spaces and the types of payload that batches have in them.
type edge struct {
	from, to         *tier.Space
	fromType, toType batch.PayloadType
}

func (e edge) String() string {
	return fmt.Sprintf("%s (%s) to %s (%s)", e.from.ID(), e.fromType, e.to.ID(), e.toType)
}

// edgesOf returns every pair of spaces for which the registry has a converter between images.
// unknown names the other registered pairs: those of a program's own payloads.
func edgesOf(eng *spillway.Engine) (edges []edge, unknown []string) {
	images := []batch.PayloadType{batch.PlainImage, batch.CompressedImage, batch.ScatteredImage}
	spaces := eng.Reservations().Spaces()
	for _, e := range eng.Registry().Edges() {
		if !slices.Contains(images, e.From.Type) || !slices.Contains(images, e.To.Type) {
			unknown = append(unknown, fmt.Sprintf("%s to %s", e.From, e.To))
			continue
		}
		for _, a := range spaces.InTier(e.From.Kind) {
			for _, b := range spaces.InTier(e.To.Kind) {
				if a != b || len(spaces.InTier(e.From.Kind)) == 1 {
					edges = append(edges, edge{a, b, e.From.Type, e.To.Type})
				}
			}
		}
	}
	return edges, unknown
}

// recordReader returns the batches of a file, and io.EOF at the end. input.Source is one.
type recordReader interface {
	Next(ctx context.Context) (arrow.RecordBatch, error)
}

// roundTrips has the findings. After an error it has those up to then.
type roundTrips struct {
	batches    int64
	edges      int // that a batch was moved along, including the one that failed
	mismatches int64
	first      error // the first difference; nil if there is none
}

// verifyBatches moves every batch of src along the edges. Messages and the plan have name, the name
// of the file.
func verifyBatches(
	ctx context.Context, eng *spillway.Engine, edges []edge, name string, src recordReader,
) (res roundTrips, err error) {
	plan, err := eng.Plan("verify " + name)
	if err != nil {
		return res, err
	}
	defer func() {
		_, e := plan.Close()
		err = errors.Join(err, e)
	}()
	repo, err := plan.Repository("verify", 0)
	if err != nil {
		return res, err
	}
	w := walker{eng: eng, edges: edges, repo: repo, res: &res}
	for {
		rec, err := src.Next(ctx)
		if err == io.EOF {
			return res, nil
		}
		if err != nil {
			return res, err
		}
		res.batches++
		w.name = fmt.Sprintf("%s, batch %d", name, res.batches)
		err = w.walk(ctx, rec)
		rec.Release()
		if err != nil {
			return res, fmt.Errorf("%s: %w", w.name, err)
		}
	}
}

// walker moves the batches of one source.
type walker struct {
	eng   *spillway.Engine
	edges []edge
	repo  *repository.Repository
	res   *roundTrips
	name  string // of the present batch
}

// walk moves one record along all edges.
func (w *walker) walk(ctx context.Context, rec arrow.RecordBatch) (err error) {
	if err := w.fits(rec); err != nil {
		return err
	}
	if err := w.repo.Put(ctx, 0, rec); err != nil {
		return err
	}
	b, err := w.repo.Take(ctx, 0, batch.Idle)
	if err != nil {
		return err
	}
	defer b.Subscribe()() // the monitor must not move it
	defer func() { err = errors.Join(err, b.Discard(ctx)) }()
	for i, e := range w.edges {
		w.res.edges = max(w.res.edges, i+1)
		if err := w.edge(ctx, b, rec, e); err != nil {
			return fmt.Errorf("%s: %w", e, err)
		}
	}
	return nil
}

// fits returns an error unless each space has room for the batch twice. Without it a clone, or the
// copy that compare opens, would wait for its own original.
func (w *walker) fits(rec arrow.RecordBatch) error {
	l, err := convert.NewLayout(rec)
	if err != nil {
		return err
	}
	defer l.Close()
	for _, s := range w.eng.Spaces() {
		need, have := 2*s.Charge(l.Desc.Body), s.State().Available
		for _, d := range l.Dictionaries {
			need += s.Charge(d.Desc.Body) // shared by both
		}
		if need > have {
			return &reservation.ExceededError{Space: s.ID(), Requested: need, Available: have, Limit: s.State().Limit,
				Hint: "verifying needs room for a batch twice"}
		}
	}
	return nil
}

// edge moves the batch along an edge, there and back, and compares it after each move. An edge of a
// space to itself is a clone.
func (w *walker) edge(ctx context.Context, b *batch.Batch, rec arrow.RecordBatch, e edge) error {
	if err := w.bring(ctx, b, e.from, e.fromType); err != nil {
		return w.judge(err, e, "before")
	}
	if e.from == e.to && e.fromType == e.toType {
		c, err := w.eng.Mover().Clone(ctx, b, nil)
		if err != nil {
			return w.judge(err, e, "cloned")
		}
		err = w.judge(w.compare(ctx, c, rec, e.to), e, "cloned")
		return errors.Join(err, c.Discard(ctx))
	}
	for _, leg := range []struct {
		way string
		to  *tier.Space
		as  batch.PayloadType
	}{{"there", e.to, e.toType}, {"back", e.from, e.fromType}} {
		if err := w.bring(ctx, b, leg.to, leg.as); err != nil {
			return w.judge(err, e, leg.way)
		}
		if err := w.judge(w.compare(ctx, b, rec, leg.to), e, leg.way); err != nil {
			return err
		}
	}
	return nil
}

// bring moves b, and its bytes: not onto a clean image.
func (w *walker) bring(ctx context.Context, b *batch.Batch, to *tier.Space, as batch.PayloadType) error {
	mover := w.eng.Mover()
	mover.DropCopies()
	return mover.MoveAs(ctx, b, reservation.Specific(to.ID()), as)
}

// differs is the error of compare for a difference.
type differs struct{ error }

// compare opens the batch in the space that has it, and compares it with rec.
func (w *walker) compare(ctx context.Context, b *batch.Batch, rec arrow.RecordBatch, at *tier.Space) (err error) {
	h, err := w.eng.Mover().Acquire(ctx, b, reservation.Specific(at.ID()))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.Close()) }()
	got, err := w.eng.Mover().Record(ctx, h)
	if err != nil {
		return err
	}
	defer got.Release()
	if err := convert.Equal(rec, got); err != nil {
		return differs{err}
	}
	return nil
}

// judge counts errors of wrong data and returns nil for them. It returns other errors, which end
// the walk.
func (w *walker) judge(err error, e edge, way string) error {
	var d differs
	if !errors.As(err, &d) && !errors.Is(err, convert.ErrCorrupt) {
		return err
	}
	w.res.mismatches++
	if w.res.first == nil {
		w.res.first = fmt.Errorf("%s, from %s, %s: %w", w.name, e, way, err)
	}
	return nil
}
