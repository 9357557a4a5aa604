// Package roundtrip is what spillbench verify does: it moves batches along every
// edge that an engine's registry knows, there and back, and compares what comes
// out with the record that went in.
//
//	record ─▶ Put ─▶ [ from ─▶ to ─▶ compare ─▶ back ─▶ compare ]  for each edge  ─▶ drop
//
// An edge of the registry is a pair of payload types; here it becomes one for each
// pair of spaces of these tiers. A type to itself, where its tier has a single space, is
// walked by cloning, which uses that converter within the space.
//
// Batches are walked one at a time, and only where two of them fit, so that no
// move can wait for another. The package takes no locks and starts no goroutine.
package roundtrip

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// Edge is a pair of spaces that batches are moved between, and the forms they have there.
type Edge struct {
	From, To         *tier.Space
	FromForm, ToForm batch.PayloadType
}

func (e Edge) String() string {
	return fmt.Sprintf("%s (%s) to %s (%s)", e.From.ID(), e.FromForm, e.To.ID(), e.ToForm)
}

// Edges returns every pair of spaces for which the registry has a converter.
// unknown names the registered pairs of types that are neither an image's nor a table's and
// so lie in no tier that is known here.
func Edges(eng *spillway.Engine) (edges []Edge, unknown []string) {
	kinds := map[batch.PayloadType]tier.Kind{batch.GPUTable: tier.GPU}
	for _, k := range tier.Kinds() {
		kinds[batch.ImageType(k)] = k
		if packed := payload.PackedType(k); packed != "" {
			kinds[packed] = k
		}
	}
	spaces := eng.Reservations().Spaces()
	for _, e := range eng.Registry().Edges() {
		from, to := kinds[e.From], kinds[e.To]
		if !from.Valid() || !to.Valid() {
			unknown = append(unknown, fmt.Sprintf("%s to %s", e.From, e.To))
			continue
		}
		for _, a := range spaces.InTier(from) {
			for _, b := range spaces.InTier(to) {
				if a != b || len(spaces.InTier(from)) == 1 {
					edges = append(edges, Edge{a, b, e.From, e.To})
				}
			}
		}
	}
	return edges, unknown
}

// Source gives the batches of a file and io.EOF at the end; input.Source is one.
type Source interface {
	Next(ctx context.Context) (arrow.RecordBatch, error)
}

// Result is what came out. On an error it holds what was done so far.
type Result struct {
	Batches    int64
	Edges      int // that a batch was moved along, or was to be when it failed
	Mismatches int64
	First      error // the first difference; nil if there is none
}

// Run walks every batch of src along the edges. name says whose batches they
// are, for messages, and names the plan.
func Run(ctx context.Context, eng *spillway.Engine, edges []Edge, name string, src Source) (res Result, err error) {
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
		res.Batches++
		w.name = fmt.Sprintf("%s, batch %d", name, res.Batches)
		err = w.walk(ctx, rec)
		rec.Release()
		if err != nil {
			return res, fmt.Errorf("%s: %w", w.name, err)
		}
	}
}

type walker struct {
	eng   *spillway.Engine
	edges []Edge
	repo  *repository.Repository
	res   *Result
	name  string // of the batch under way
}

// walk takes one record along all edges.
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
	defer b.Subscribe()() // the monitor leaves it alone
	defer func() { err = errors.Join(err, b.Discard(ctx)) }()
	for i, e := range w.edges {
		w.res.Edges = max(w.res.Edges, i+1)
		if err := w.edge(ctx, b, rec, e); err != nil {
			return fmt.Errorf("%s: %w", e, err)
		}
	}
	return nil
}

// fits refuses a batch that two of do not fit into each space at once: a clone, or
// the copy that a record is opened from, would wait for its own original.
func (w *walker) fits(rec arrow.RecordBatch) error {
	l, err := convert.NewLayout(rec)
	if err != nil {
		return err
	}
	defer l.Close()
	for _, s := range w.eng.Spaces() {
		need, have := 2*s.Charge(l.Size()), s.Available()
		for _, d := range l.Dictionaries() {
			need += s.Charge(d.Size()) // both share it
		}
		if need > have {
			return &reservation.ExceededError{Space: s.ID(), Requested: need, Available: have, Limit: s.Limit(),
				Hint: "verifying needs room for a batch twice"}
		}
	}
	return nil
}

// edge walks one edge there and back.
func (w *walker) edge(ctx context.Context, b *batch.Batch, rec arrow.RecordBatch, e Edge) error {
	if err := w.bring(ctx, b, e.From, e.FromForm); err != nil {
		return w.judge(err, e, "before")
	}
	if e.From == e.To && e.FromForm == e.ToForm {
		return w.clone(ctx, b, rec, e)
	}
	if err := w.bring(ctx, b, e.To, e.ToForm); err != nil {
		return w.judge(err, e, "there")
	}
	if err := w.judge(w.compare(ctx, b, rec, e.To), e, "there"); err != nil {
		return err
	}
	if err := w.bring(ctx, b, e.From, e.FromForm); err != nil {
		return w.judge(err, e, "back")
	}
	return w.judge(w.compare(ctx, b, rec, e.From), e, "back")
}

// clone walks the edge of a space to itself: a copy, and a copy of the copy.
func (w *walker) clone(ctx context.Context, b *batch.Batch, rec arrow.RecordBatch, e Edge) (err error) {
	c, err := w.eng.Mover().Clone(ctx, b, nil)
	if err != nil {
		return w.judge(err, e, "cloned")
	}
	defer func() { err = errors.Join(err, c.Discard(ctx)) }()
	return w.judge(w.compare(ctx, c, rec, e.To), e, "cloned")
}

// bring moves b's bytes, by way of an image where there is no direct one: between tables and what
// is compressed.
func (w *walker) bring(ctx context.Context, b *batch.Batch, to *tier.Space, form batch.PayloadType) error {
	w.eng.Mover().Inside().DropCopies()
	there := reservation.Specific(to.ID())
	err := w.eng.Mover().MoveAs(ctx, b, there, form)
	if image := batch.ImageType(to.Kind()); errors.Is(err, convert.ErrNoConverter) &&
		b.Info().Payload.Type() == batch.GPUTable &&
		form != image {
		if err := w.eng.Mover().MoveAs(ctx, b, there, image); err != nil {
			return err
		}
		err = w.eng.Mover().MoveAs(ctx, b, there, form)
	}
	return err
}

// differs is the error of a comparison that found a difference.
type differs struct{ error }

// compare opens the batch where it is and compares it with rec.
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

// judge counts what is wrong with the data and lets the walk go on; other errors
// end it.
func (w *walker) judge(err error, e Edge, way string) error {
	var d differs
	if !errors.As(err, &d) && !errors.Is(err, convert.ErrCorrupt) {
		return err
	}
	w.res.Mismatches++
	if w.res.First == nil {
		w.res.First = fmt.Errorf("%s, from %s, %s: %w", w.name, e, way, err)
	}
	return nil
}
