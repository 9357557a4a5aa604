package convert

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/transfer"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// together is one move of small batches from one space to a disk. One request writes many of them,
// side by side. Then each has a buffer of its own.
type together struct {
	m        *Mover
	from, to *tier.Space
	reason   string

	// Of the batches in transit:
	of     []int // which of those that were given
	ways   []*batch.Transit
	images []*batch.Image
	sizes  []int64
	bytes  int64 // all sizes
	moved  []Moved
	places []batch.Place
}

// Together returns how many batches, from the first on, RelieveTogether would move to a disk now:
// as many as there is room for in one piece. They lie in one space, share no dictionaries, have no
// copy there, and go byte for byte, by Spillway's own converter.
func (m inside) Together(all []*batch.Batch, to tier.ID) (n int) {
	disk, ok := m.cfg.Reservations.Spaces().ByID(to)
	if !ok || to.Kind != tier.Disk || m.cfg.Persists != nil && m.cfg.Persists(to) {
		return 0
	}
	t := &together{m: m.Mover, to: disk}
	room := min(disk.Available(), disk.Together())
	for _, b := range all {
		img := t.image(b.Inside().Cut().Payload)
		if img == nil || slices.Contains(b.Copies(), to) || t.bytes+img.Descriptor().Body > room {
			break
		}
		t.from = img.Space()
		t.add(img)
		n++
	}
	if n == 0 || !m.cfg.Registry.plain(batch.ImageType(t.from.Kind()), batch.DiskImage) {
		return 0
	}
	return n
}

// RelieveTogether is Relieve for the batches that Together has counted, and returns the error of
// each. An error of the write is returned for all batches of it, though one of them may be the cause:
// the caller finds out with Relieve.
func (m inside) RelieveTogether(ctx context.Context, all []*batch.Batch, to tier.ID, reason string) []error {
	errs := make([]error, len(all))
	ctx, end, err := m.operations.begin(ctx)
	if err == nil {
		defer end()
		disk, _ := m.cfg.Reservations.Spaces().ByID(to)
		t := &together{m: m.Mover, to: disk, reason: reason}
		err = t.move(transfer.ForMonitor(ctx), all, errs)
	}
	for i := range errs {
		if errs[i] == nil {
			errs[i] = err
		}
	}
	return errs
}

// image returns a payload if it may be moved together with what is in t.from; else nil.
func (t *together) image(p batch.Payload) *batch.Image {
	img, ok := p.(*batch.Image)
	if !ok || img.Encoding() != payload.Plain || t.from != nil && img.Space() != t.from ||
		img.Space().Kind() == tier.Disk || img.Space().Lost() != nil {
		return nil
	}
	desc := img.Descriptor()
	form := t.m.cfg.Builtin.Form(img, t.to, t.m.cfg.Registry.has)
	if len(desc.Dictionaries) > 0 || desc.Body == 0 || form != batch.DiskImage {
		return nil
	}
	return img
}

func (t *together) add(img *batch.Image) {
	n := img.Descriptor().Body
	t.sizes, t.bytes = append(t.sizes, n), t.bytes+n
}

// move moves batches. It stores the errors of single batches in errs, and returns that of all others.
func (t *together) move(ctx context.Context, all []*batch.Batch, errs []error) error {
	var room int64
	for _, b := range all {
		if img, ok := b.Inside().Cut().Payload.(*batch.Image); ok {
			room += img.Descriptor().Body
		}
	}
	if room == 0 {
		return errLone
	}
	origin := reservation.MovedFrom(tier.Host) // as from any faster tier
	r, err := t.m.cfg.Reservations.TryReserve(reservation.Specific(t.to.ID()), room, reservation.Moving(), origin)
	if err != nil {
		return err
	}
	defer func() { _ = r.Release() }() // nobody else has it
	defer func() {
		for _, way := range t.ways {
			_ = way.Abort() // changes nothing after a Commit
		}
	}()
	t.lock(all, errs)
	if len(t.ways) == 0 {
		return errLone
	}
	for k := range t.moved {
		t.m.emitMove(t.origin(ctx, k), events.MoveBegun, &t.moved[k], t.sizes[k])
	}
	start := time.Now()
	out, err := t.write(ctx, r)
	took := time.Since(start) / time.Duration(len(t.ways))
	if err = ofLost(err, t.from, t.to); err != nil {
		distrust(ctx, err, t.from, t.to)
		err = fmt.Errorf("moving %d batches from %s to %s: %w", len(t.ways), t.from.ID(), t.to.ID(), err)
		for k := range t.moved {
			t.moved[k].Took, t.moved[k].Err = took, err
			t.m.emitMove(t.origin(ctx, k), events.MoveEnded, &t.moved[k], t.moved[k].Bytes)
		}
		return err
	}
	for k, i := range t.of {
		errs[i] = t.arrive(ctx, all[i], k, out[k], took)
	}
	t.m.relieved[t.from.ID()].Store(int64(time.Since(t.m.begun)))
	return nil
}

// errLone is returned for batches that cannot be written together with others. Nothing has failed.
var errLone = fmt.Errorf("convert: the batch is not moved together with others: %w", tier.ErrNotSupported)

// lock puts the batches that can be written together in transit.
func (t *together) lock(all []*batch.Batch, errs []error) {
	n := len(all)
	t.of, t.ways = make([]int, 0, n), make([]*batch.Transit, 0, n)
	t.images, t.sizes = make([]*batch.Image, 0, n), make([]int64, 0, n)
	t.moved, t.places = make([]Moved, 0, n), make([]batch.Place, 0, n)
	for i, b := range all {
		way, err := b.TryTransit()
		if err != nil {
			errs[i] = err
			continue
		}
		img := t.image(way.Payload())
		if img == nil || slices.Contains(b.Copies(), t.to.ID()) { // it has another form, or a copy, since
			errs[i] = errors.Join(errLone, way.Abort())
			continue
		}
		t.from = img.Space()
		t.of, t.ways, t.images = append(t.of, i), append(t.ways, way), append(t.images, img)
		t.add(img)
		t.moved = append(t.moved, Moved{Batch: b.ID(), From: t.from.ID(), To: t.to.ID(), Reason: t.reason})
		t.places = append(t.places, b.Inside().Cut().Place)
	}
}

// write writes the images to r's space, and returns the buffers that they are in.
func (t *together) write(ctx context.Context, r reservation.Reservation) ([]*tier.Buffer, error) {
	buf, err := r.Alloc(t.bytes)
	if err != nil {
		return nil, err
	}
	if err := t.m.cfg.Builtin.Together(ctx, buf, t.images); err != nil {
		return nil, errors.Join(err, buf.Release())
	}
	out := t.to.Split(buf, t.sizes)
	if out == nil {
		return nil, errors.Join(errLone, buf.Release())
	}
	return out, nil
}

// origin returns a context with the origin of the k-th batch in transit.
func (t *together) origin(ctx context.Context, k int) context.Context {
	if t.m.cfg.Events == nil {
		return ctx
	}
	return events.With(ctx, originOf(ctx, t.places[k]))
}

// arrive ends the move of the k-th batch in transit.
func (t *together) arrive(ctx context.Context, b *batch.Batch, k int, buf *tier.Buffer, took time.Duration) error {
	m, moved := t.m, &t.moved[k]
	moved.Bytes, moved.Took = t.sizes[k], took
	m.emitMove(t.origin(ctx, k), events.MoveEnded, moved, moved.Bytes)
	out := batch.NewImage(t.images[k].Descriptor(), buf, t.to)
	commit := batch.CommitOptions{Reason: t.reason, Slower: true}
	if _, err := b.Inside().Commit(ctx, t.ways[k], out, commit); err != nil {
		return unfit(b, out, err)
	}
	m.stats.add(moved, moved.Bytes, took, t.places[k])
	return nil
}
