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

// errLone is returned for batches that cannot be written together with others. Nothing has failed.
var errLone = fmt.Errorf("convert: the batch is not moved together with others: %w", tier.ErrNotSupported)

// Together returns how many batches, from the first on, RelieveTogether would move to a disk now:
// as many as there is room for in one piece. They are in one space, share no dictionaries, have no
// clean image there, and are copied uncompressed by Spillway's own converter.
func (m *Mover) Together(all []*batch.Batch, to tier.ID) (n int) {
	disk, ok := m.cfg.Reservations.Spaces().ByID(to)
	if !ok || to.Kind != tier.Disk || m.cfg.Persists != nil && m.cfg.Persists(to) {
		return 0
	}
	var from *tier.Space
	room := min(disk.Available(), disk.Together())
	for _, b := range all {
		img := m.joins(b, b.Cut().Payload, from, disk)
		if img == nil || img.Descriptor().Body > room {
			break
		}
		from, room, n = img.Space(), room-img.Descriptor().Body, n+1
	}
	if from != nil {
		e := m.cfg.Registry.lookup(ImageIn(from.Kind()), ImageIn(tier.Disk))
		if e == nil || !e.builtin || e.wrapped {
			return 0
		}
	}
	return n
}

// joins returns p, the payload of b, if it may be written to a disk together with others from a space.
// If from is nil, that may be any faster one. Otherwise joins returns nil.
func (m *Mover) joins(b *batch.Batch, p batch.Payload, from, to *tier.Space) *batch.Image {
	img, ok := p.(*batch.Image)
	if !ok || img.Encoding() != payload.Plain || from != nil && img.Space() != from ||
		img.Space().Kind() == tier.Disk || img.Space().Lost() != nil {
		return nil
	}
	desc := img.Descriptor()
	if len(desc.Dictionaries) > 0 || desc.Body == 0 || m.cfg.Builtin.Encoding(img, to) != payload.Plain ||
		slices.Contains(b.Copies(), to.ID()) {
		return nil
	}
	return img
}

// RelieveTogether is Relieve for the batches that Together has counted, and returns the error of
// each. An error of the write is returned for all batches of it, though one of them may be the cause:
// the caller finds out with Relieve.
func (m *Mover) RelieveTogether(ctx context.Context, all []*batch.Batch, to tier.ID, reason string) []error {
	errs := make([]error, len(all))
	err := m.relieveTogether(ctx, all, to, reason, errs)
	for i := range errs {
		if errs[i] == nil {
			errs[i] = err
		}
	}
	return errs
}

// relieveTogether moves batches from one space to a disk: few requests write them side by side, and
// then each has a buffer of its own. It stores the errors of single batches in errs, and returns that
// of all others.
func (m *Mover) relieveTogether(
	ctx context.Context, all []*batch.Batch, to tier.ID, reason string, errs []error,
) error {
	ctx, end, err := m.begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	ctx = transfer.ForMonitor(ctx)
	disk, _ := m.cfg.Reservations.Spaces().ByID(to)
	type one struct { // a batch in transit
		i       int // which of all
		ctx     context.Context
		transit *batch.Transit
		place   batch.Place
		moved   Moved
	}
	var from *tier.Space
	var list []*one
	var images []*batch.Image
	var sizes []int64
	var bytes int64 // all sizes
	defer func() {
		for _, x := range list {
			_ = x.transit.Abort() // changes nothing after a Commit
		}
	}()
	for i, b := range all {
		transit, err := b.TryTransit()
		if err != nil {
			errs[i] = err
			continue
		}
		img := m.joins(b, transit.Payload(), from, disk)
		if img == nil { // it has another form, or a copy, since
			errs[i] = errors.Join(errLone, transit.Abort())
			continue
		}
		from = img.Space()
		x := &one{i: i, ctx: ctx, transit: transit, place: b.Cut().Place}
		x.moved = Moved{Batch: b.ID(), From: from.ID(), To: to, Reason: reason}
		if m.cfg.Events != nil {
			x.ctx = events.With(ctx, originOf(ctx, x.place))
		}
		n := img.Descriptor().Body
		list, images, sizes, bytes = append(list, x), append(images, img), append(sizes, n), bytes+n
	}
	if len(list) == 0 {
		return errLone
	}
	r, err := m.cfg.Reservations.TryReserve(reservation.Specific(to), bytes, reservation.Moving(),
		reservation.MovedFrom(tier.Host)) // as from any faster tier
	if err != nil {
		return err
	}
	defer func() { _ = r.Release() }() // nobody else has it
	for k, x := range list {
		m.emitMove(x.ctx, events.MoveBegun, &x.moved, sizes[k])
	}
	start := time.Now()
	var out []*tier.Buffer
	buf, err := r.Alloc(bytes)
	if err == nil {
		if err = m.cfg.Builtin.Together(ctx, buf, images); err == nil {
			if out = disk.Split(buf, sizes); out == nil {
				err = errLone
			}
		}
		if err != nil {
			err = errors.Join(err, buf.Release())
		}
	}
	took := time.Since(start) / time.Duration(len(list))
	if err = ofLost(err, from, disk); err != nil {
		distrust(ctx, err, from, disk)
		err = fmt.Errorf("moving %d batches from %s to %s: %w", len(list), from.ID(), to, err)
	}
	for k, x := range list {
		if x.moved.Took, x.moved.Err = took, err; err == nil {
			x.moved.Bytes = sizes[k]
		}
		m.emitMove(x.ctx, events.MoveEnded, &x.moved, x.moved.Bytes)
		if err != nil {
			continue
		}
		b, img := all[x.i], batch.NewImage(images[k].Descriptor(), out[k], disk)
		img.Remember(images[k].Program())
		commit := batch.CommitOptions{Reason: reason, Slower: true}
		if _, err := b.Commit(x.ctx, x.transit, img, commit); err != nil {
			errs[x.i] = unfit(b, img, err)
			continue
		}
		m.stats.add(&x.moved, sizes[k], x.place)
	}
	return err
}
