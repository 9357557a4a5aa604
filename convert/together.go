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

// Evict is Move of the first of these batches to one space, for the monitor. It does not wait for room
// or for the batch: no room now is a *tier.NoSpaceError, and a batch in use a *batch.StateError. To write
// to disk it waits only for other moves of the monitor, even if programs have all spill slots. reason
// is for events and Stats.
//
// To a disk, Evict moves as many of the following batches as it can together with the first, which takes
// much less time for each. It returns the errors of the batches that it has tried to move, which are the
// first ones. An error of a write together is returned for all of them, though one may be the cause: the
// caller finds out by passing each alone.
func (m *Mover) Evict(ctx context.Context, all []*batch.Batch, to tier.ID, reason string) []error {
	if len(all) > 1 {
		if errs := m.evictTogether(ctx, all, to, reason); len(errs) > 0 {
			return errs
		}
	}
	_, err := m.run(ctx, &move{b: all[0], to: reservation.Specific(to), reason: reason, evicts: true})
	return []error{err}
}

// joins returns p, the payload of b, if it may be written to a disk together with others from a space.
// If from is nil, that may be any faster one. Otherwise joins returns nil.
func (m *Mover) joins(b *batch.Batch, p batch.Payload, from, to *tier.Space) *batch.Image {
	img, ok := p.(*batch.Image)
	if !ok || img.Parts.Type != payload.PlainImage || from != nil && img.Space() != from ||
		img.Space().Kind().IsStorage() || img.Space().Lost() != nil {
		return nil
	}
	desc := img.Descriptor()
	if len(desc.Dictionaries) > 0 || desc.Body == 0 || m.cfg.Builtin.TypeIn(img, to) != payload.PlainImage ||
		slices.Contains(b.Copies(), to.ID()) {
		return nil
	}
	return img
}

// evictTogether moves batches from one space to a disk, as many from the first on as the disk has room
// for in one piece: few requests write them side by side, and then each has a buffer of its own. Batches
// that cannot be moved together are errLone. The other batches are in one space, share no dictionaries,
// have no clean image there, and are copied uncompressed by Spillway's own converter. If there are less
// than two, evictTogether returns nil and has changed nothing.
func (m *Mover) evictTogether(ctx context.Context, all []*batch.Batch, to tier.ID, reason string) (errs []error) {
	disk, ok := m.cfg.Reservations.Spaces().ByID(to)
	if !ok || !to.Kind.IsStorage() || m.cfg.Persists != nil && m.cfg.Persists(to) {
		return nil
	}
	first := slices.IndexFunc(all, func(b *batch.Batch) bool {
		return m.joins(b, b.Snapshot().Payload, nil, disk) != nil
	})
	if first < 0 {
		return nil
	}
	from, room := all[first].Space(), min(disk.State().Available, disk.Together())
	if from == nil { // it was dropped just now
		return nil
	}
	e := m.cfg.Registry.lookup(ImageIn(from.Kind()), ImageIn(tier.Disk))
	if e == nil || !e.builtin || e.wrapped {
		return nil
	}
	ctx, end, err := m.begin(ctx)
	if err != nil {
		return nil
	}
	defer end()
	ctx = transfer.ForMonitor(ctx)
	type one struct { // a batch in transit
		i       int // which of all
		transit *batch.Transit
		place   batch.Place
		moved   events.Event // with the context of the move
	}
	list := make([]one, 0, len(all))
	images, sizes := make([]*batch.Image, 0, len(all)), make([]int64, 0, len(all))
	var bytes int64 // all sizes
	defer func() {
		for k := range list {
			_ = list[k].transit.Abort() // changes nothing after a Commit
		}
	}()
	for i, b := range all {
		if i < first {
			errs = append(errs, errLone)
			continue
		}
		transit, err := b.TryTransit()
		if err != nil {
			errs = append(errs, err)
			continue
		}
		img := m.joins(b, transit.Payload(), from, disk)
		if img == nil {
			errs = append(errs, errors.Join(errLone, transit.Abort()))
			continue
		}
		n := img.Descriptor().Body
		if bytes+n > room {
			_ = transit.Abort() // it goes with the next ones
			break
		}
		x := one{i: i, transit: transit, place: b.Snapshot().Place}
		x.moved = events.Event{
			Kind: events.MoveBegun, Context: ctx, Batch: uint64(b.ID()),
			From: from.ID(), To: to, Bytes: n, Reason: reason,
		}
		if m.cfg.Events != nil {
			x.moved.Origin = originOf(ctx, x.place)
			x.moved.Context = events.With(ctx, x.moved.Origin)
		}
		list, images, sizes, bytes = append(list, x), append(images, img), append(sizes, n), bytes+n
		errs = append(errs, nil)
	}
	if len(list) < 2 {
		return nil
	}

	start := time.Now()
	r, err := m.cfg.Reservations.TryReserve(reservation.Specific(to), bytes, &reservation.Options{
		Moving: true, From: tier.Host, // as from any faster tier
	})
	if err != nil {
		for k := range list {
			errs[list[k].i] = err
		}
		return errs
	}
	defer func() { _ = r.Release() }() // nobody else has it
	for k := range list {
		m.emit(list[k].moved)
	}
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
		invalidate(ctx, err, from, disk)
		err = fmt.Errorf("moving %d batches from %s to %s: %w", len(list), from.ID(), to, err)
	}
	for k := range list {
		x := &list[k]
		if x.moved.Kind, x.moved.Took, x.moved.Err = events.MoveEnded, took, err; err != nil {
			x.moved.Bytes = 0
		}
		m.emit(x.moved)
		if err != nil {
			errs[x.i] = err
			continue
		}
		b, img := all[x.i], batch.NewImage(images[k].Descriptor(), out[k], disk)
		img.Parts.Program = images[k].Parts.Program
		commit := batch.CommitOptions{Reason: reason, Slower: true}
		if _, err := b.Commit(x.moved.Context, x.transit, img, commit); err != nil {
			errs[x.i] = unfit(b, img, err)
			continue
		}
		m.stats.add(&x.moved, sizes[k], x.place)
	}
	return errs
}
