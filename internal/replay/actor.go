package replay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/transfer"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// thing is a batch.
type thing struct {
	w       *world
	b       *batch.Batch
	desc    *batch.Descriptor
	sizes   *[tier.Disk + 1]int64 // in each tier, of those that it was seen in
	handles []*batch.Handle
	cancels []func() // of subscriptions
}

// in returns what the batch is charged in a space.
func (t *thing) in(id tier.ID) int64 {
	if t.sizes != nil && t.sizes[id.Kind] > 0 {
		if size := t.sizes[id.Kind]; payload.PackedType(id.Kind) != "" {
			return size
		}
	}
	return (t.desc.Body + tier.Page - 1) / tier.Page * tier.Page
}

// do does an op of a stream, the i-th.
func (a *actor) do(o *op, i int) {
	w := a.w
	defer func() {
		w.left[o.epoch]--
		w.openEpochs()
	}()
	if o.failed {
		return
	}
	after := w.now
	if o.fresh {
		if len(w.opened) <= o.epoch {
			a.until(func() bool { return len(w.opened) > o.epoch })
		}
		after = w.opened[o.epoch]
	}
	t := w.things[o.batch]
	if t == nil && o.what != put && o.what != appear {
		a.until(func() bool { t = w.things[o.batch]; return t != nil })
		after = w.now
	}
	a.sleep(after + o.think - w.now)
	begin := w.now
	switch o.what {
	case put, appear:
		a.put(o)
	case bring, open, consume:
		a.bring(o, t)
	case shut:
		for range min(o.n, len(t.handles)) {
			last := len(t.handles) - 1
			_ = t.handles[last].Close()
			t.handles = t.handles[:last]
		}
	case task:
		for range o.n {
			_ = t.b.TryCreateTask()
		}
		for range -o.n {
			_ = t.b.CancelTask()
		}
	case subscribe:
		for range o.n {
			t.cancels = append(t.cancels, t.b.Subscribe())
		}
		for range min(-o.n, len(t.cancels)) {
			t.cancels[0]()
			t.cancels = t.cancels[1:]
		}
	case drop:
		a.settled(t)
		_ = t.b.Drop()
	case place:
		t.b.SetPlace(o.place)
	}
	if o.what <= consume {
		if !w.begun {
			w.first, w.begun = begin, true
		}
		w.ended = w.now
	}
}

// settled waits until a batch is not in transit, and returns what it is then.
func (a *actor) settled(t *thing) batch.Info {
	if t.b.Info().State == batch.InTransit {
		a.until(func() bool { return t.b.Info().State != batch.InTransit })
	}
	return t.b.Info()
}

// put makes a batch.
func (a *actor) put(o *op) {
	w := a.w
	t := &thing{w: w, desc: &batch.Descriptor{Rows: 1, Body: max(o.bytes, w.program.bodies[o.batch])}, sizes: w.program.sizes[o.batch]}
	if o.batch == 0 {
		return // it was given up
	}
	begin := w.now
	r, err := a.reserve(t, o.to, reservation.Incoming(), true, nil)
	if err != nil {
		return
	}
	defer func() { _ = r.Release() }()
	w.result.Stalled += w.now - begin
	if o.what == put {
		a.transfer(t, Edge{To: r.Space().ID()})
	}
	img, err := t.image(r)
	if err != nil {
		return
	}
	t.b, err = batch.New(batch.Options{ID: o.batch, Payload: img, Observer: w.mon, Clock: w.clock})
	if err == nil {
		w.things[o.batch] = t
	}
}

// image draws an image from r, a packed one where the batch was less than that.
func (t *thing) image(r reservation.Reservation) (batch.Payload, error) {
	size := t.in(r.Space().ID())
	if size >= t.desc.Body {
		buf, err := r.Alloc(size)
		if err != nil {
			return nil, err
		}
		return batch.NewImage(t.desc, buf, r.Space()), nil
	}
	runs := make([]payload.Run, (t.desc.Body+payload.RunSize-1)/payload.RunSize)
	for i := range runs {
		part := size / int64(len(runs)-i)
		size -= part
		buf, err := r.Alloc(part)
		if err != nil {
			return nil, err
		}
		runs[i].Buffer = buf
	}
	return payload.NewPacked(t.desc, runs, r.Space()), nil
}

// bring does what convert.Mover does to bring a batch and to open it.
func (a *actor) bring(o *op, t *thing) {
	begin, found := a.w.now, true
	defer func() {
		if o.what != bring {
			a.w.result.Accesses++
			a.w.result.Stalled += a.w.now - begin
			if found {
				a.w.result.Found++
			}
		}
	}()
	ctx := context.Background()
	there := func() bool {
		now := t.b.Info()
		return now.State == batch.Released || now.State != batch.InTransit && (len(o.to) == 0 || slices.Contains(o.to, now.Space))
	}
	for {
		now := a.settled(t)
		switch {
		case now.State == batch.Released || there() && o.what == bring:
			return
		case there():
			var h *batch.Handle
			var err error
			if o.beside {
				h, err = t.b.Inside().Read(ctx, now.Space)
			} else {
				h, err = t.b.Open(ctx, now.Space, o.what == consume)
			}
			if err == nil {
				t.handles = append(t.handles, h)
			}
			return
		case now.State == batch.Processing:
			a.until(func() bool { return t.b.Info().State != batch.Processing })
			continue
		}
		found = false
		origin := a.w.res.Inside().MovedFrom(now.Space.Kind)
		if o.what != bring {
			origin = reservation.Consuming()
		}
		r, err := a.reserve(t, o.to, origin, false, there)
		if err == nil {
			err = a.into(r, t, o, there)
		}
		if !errors.Is(err, errThere) && (err != nil || o.what != bring) {
			return // it is open, or can never fit there
		}
	}
}

// into moves a batch into r, unless another actor has brought it or opened it: errThere.
func (a *actor) into(r reservation.Reservation, t *thing, o *op, there func() bool) error {
	defer func() { _ = r.Release() }()
	if now := a.settled(t); there() || now.State == batch.Processing {
		return errThere
	}
	transit, err := t.b.TryTransit()
	if err != nil {
		return err
	}
	return a.move(t, transit, r, "work", o)
}

// move moves a batch in transit into r, and opens it if o says so.
func (a *actor) move(t *thing, transit *batch.Transit, r reservation.Reservation, reason string, o *op) (err error) {
	defer func() { _ = transit.Abort() }() // changes nothing after a Commit
	w, from, to := a.w, transit.Payload().Space().ID(), r.Space().ID()
	begin := w.now
	out := t.b.Inside().Revive("", r)
	copied := out != nil
	if !copied {
		a.transfer(t, Edge{from, to})
		if out, err = t.image(r); err != nil {
			return err
		}
	}
	opens, last := o != nil && o.what != bring, o != nil && o.what == consume
	if to.Kind < from.Kind && !last {
		t.b.Inside().Keep(transit, nil)
	}
	var h *batch.Handle
	switch {
	case !opens:
		err = transit.Commit(out, false)
	case o.beside:
		h, err = t.b.Inside().CommitRead(context.Background(), transit, out)
	default:
		h, err = transit.CommitOpen(context.Background(), out, last)
	}
	if err != nil {
		return errors.Join(err, out.Release())
	}
	if h != nil {
		t.handles = append(t.handles, h)
	}
	w.result.add(Edge{from, to}, t.desc.Body, w.now-begin, copied, reason)
	w.vain = 0
	return nil
}

// transfer lets the time of a transfer pass. Meanwhile one that compresses, or the other way round,
// has scratch of host memory, as package transfer draws it: where there is room.
func (a *actor) transfer(t *thing, k Edge) {
	w := a.w
	var scratch []reservation.Reservation
	defer func() {
		for _, r := range scratch {
			w.scratch -= r.Bytes()
			_ = r.Release()
		}
	}()
	if packs := t.packedIn(k.From) || t.packedIn(k.To); packs {
		runs := int((t.desc.Body + payload.RunSize - 1) / payload.RunSize)
		for range min(runs, transfer.StagedUnderWay) {
			if w.scratch += transfer.BlockSize; w.scratch > max(w.mostScratch, transfer.LeastBlocks*transfer.BlockSize) {
				w.scratch -= transfer.BlockSize
				break
			}
			r, err := w.res.TryReserve(reservation.AnyInTier(tier.Host), transfer.BlockSize)
			if err == nil {
				scratch = append(scratch, r)
			} else {
				w.scratch -= transfer.BlockSize
			}
		}
	}
	w.path(k.path()).carry(a, w.cost(k, t.desc.Body))
}

// packedIn reports whether the batch is packed in a space.
func (t *thing) packedIn(id tier.ID) bool {
	return payload.PackedType(id.Kind) != "" && t.in(id) < t.desc.Body
}

// Relieve implements monitor.Mover.
func (w *world) Relieve(_ context.Context, b *batch.Batch, to tier.ID, reason string) error {
	t := w.things[b.ID()]
	r, err := w.res.TryReserve(sized{reservation.Specific(to), t}, t.desc.Body, w.res.Inside().MovedFrom(b.Info().Space.Kind))
	if err != nil {
		return err
	}
	defer func() { _ = r.Release() }()
	transit, err := b.TryTransit()
	if err != nil {
		return err
	}
	return w.at.move(t, transit, r, reason, nil)
}

func (w *world) path(id tier.ID) *path {
	p := w.paths[id]
	if p == nil {
		p = &path{w: w}
		w.paths[id] = p
	}
	return p
}

// cost returns what the next move of an edge takes.
func (w *world) cost(k Edge, bytes int64) time.Duration {
	s, known := w.costs[k]
	if !known {
		s = likest(w.costs, k)
		w.costs[k] = s
	}
	return s.next(bytes)
}

// sized is a strategy for a batch, which takes more in some spaces than in others. Spaces with a
// copy come first.
type sized struct {
	reservation.Strategy
	t *thing
}

func (s sized) BytesIn(sp *tier.Space, _ int64) int64 { return s.t.in(sp.ID()) }

// among is a strategy for some spaces, in their order.
type among []*tier.Space

func (c among) Candidates(_ *reservation.Spaces, dst []*tier.Space) []*tier.Space {
	return append(dst, c...)
}
func (c among) String() string { return fmt.Sprintf("%d spaces", len(c)) }

// waiter is a call that waits for room.
type waiter struct {
	thing *thing
	to    []*tier.Space
	keeps bool // it leaves headroom free
	tried bool // in vain, since something has changed
}

// wants is what it needs, where.
func (o *waiter) wants() reservation.Choice {
	var c reservation.Choice
	for _, s := range o.to {
		d := reservation.Demand{Space: s.ID(), Bytes: o.thing.in(s.ID()), Waiters: 1}
		if o.keeps {
			d.Headroom = max(0, min(o.thing.w.mon.Inside().Headroom(s.ID(), d.Bytes), s.Room()-d.Bytes))
		}
		c = append(c, d)
	}
	return c
}

// errThere: there is no need for the room any more.
var errThere = errors.New("the batch is there")

// reserve waits for room, behind those that began to wait before. What is to be opened goes before
// what leaves headroom. over, which may be nil, ends the wait.
func (a *actor) reserve(t *thing, ids []tier.ID, origin reservation.Option, keeps bool, over func() bool) (r reservation.Reservation, err error) {
	w := a.w
	o := &waiter{thing: t, keeps: keeps}
	for _, s := range w.spaces {
		if slices.Contains(ids, s.ID()) && t.in(s.ID()) <= s.Room() {
			o.to = append(o.to, s)
		}
	}
	for i := 0; len(o.to) == 0 && keeps && len(ids) > 0 && i < len(w.spaces); i++ { // what never fits is put into a slower tier
		if s := w.spaces[i]; s.ID().Kind > ids[0].Kind && t.in(s.ID()) <= s.Room() {
			o.to = append(o.to, s)
		}
	}
	if len(o.to) == 0 {
		if len(ids) > 0 { // else nobody knows what was asked for
			w.never = fmt.Errorf("%w: a batch of %d bytes never fits in %v", ErrStuck, t.in(ids[0]), ids)
		}
		return r, reservation.ErrExceeded
	}
	slices.SortStableFunc(o.to, func(x, y *tier.Space) int { return slices.Index(ids, x.ID()) - slices.Index(ids, y.ID()) })
	waits := false
	a.until(func() bool {
		if over != nil && over() {
			err = errThere
		} else {
			r, err = w.take(o, origin)
		}
		if errors.Is(err, tier.ErrNoSpace) {
			if !waits {
				waits = true
				w.waiters = append(w.waiters, o)
				w.mon.Inside().Wake()
			}
			o.tried = true
			return false
		}
		w.waiters = slices.DeleteFunc(w.waiters, func(x *waiter) bool { return x == o })
		return true
	})
	return r, err
}

// take reserves what a waiter wants, except where others come first.
func (w *world) take(o *waiter, origin reservation.Option) (reservation.Reservation, error) {
	var to among
	for _, s := range o.to {
		if !slices.ContainsFunc(w.waiters, func(x *waiter) bool {
			return x != o && x.tried && (o.keeps || !x.keeps) && slices.Contains(x.to, s)
		}) {
			to = append(to, s)
		}
	}
	if len(to) == 0 {
		return reservation.Reservation{}, &tier.NoSpaceError{}
	}
	return w.res.TryReserve(sized{to, o.thing}, o.thing.desc.Body, origin)
}
