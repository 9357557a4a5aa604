package bandwidth

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/tier"
)

// link is two spaces and the edges between them.
type link struct {
	from, to *tier.Space // there is a converter this way
	back     bool        // and one in the other direction
}

// limitOf says what a transfer between two spaces is compared with.
func limitOf(from, to *tier.Space) LimitOf {
	switch {
	case from.Kind() == tier.Disk || to.Kind() == tier.Disk:
		return RequestsOfDisk
	case link{from: from, to: to}.driven():
		return CopyOfDriver
	}
	return Memmove
}

// within keeps the pairs with both ends of the requested kinds.
func (c Config) within(links []link, missing []Row) ([]link, []Row) {
	if c.OneOfEach {
		links = oneOfEach(links)
	}
	if len(c.Between) == 0 {
		return links, missing
	}
	out := func(a, b tier.Kind) bool { return !slices.Contains(c.Between, a) || !slices.Contains(c.Between, b) }
	links = slices.DeleteFunc(links, func(k link) bool { return out(k.from.Kind(), k.to.Kind()) })
	missing = slices.DeleteFunc(missing, func(r Row) bool { return out(r.From.Kind, r.To.Kind) })
	return links, missing
}

// noEdges says why no pair of spaces is measured.
func (c Config) noEdges() error {
	var names []string
	for _, s := range c.Engine.Spaces() {
		if len(c.Between) == 0 || slices.Contains(c.Between, s.Kind()) {
			names = append(names, s.ID().String())
		}
	}
	switch len(names) {
	case 0:
		return fmt.Errorf("%w: there is no such space", ErrNoEdges)
	case 1:
		return fmt.Errorf("%w: there is one such space only, %s, and an edge needs two", ErrNoEdges, names[0])
	}
	return fmt.Errorf("%w: edges between two disks are not measured (%s)", ErrNoEdges, strings.Join(names, ", "))
}

// linksOf returns the pairs of spaces that have a converter one way at least, and a row for each
// way that has none. Two disks are no pair: the limit of a transfer between them depends on whether
// they are one device, which is not known.
func linksOf(eng *spillway.Engine) (links []link, missing []Row) {
	known := make(map[[2]batch.PayloadType]bool)
	for _, e := range eng.Registry().Edges() {
		known[[2]batch.PayloadType{e.From, e.To}] = true
	}
	can := func(a, b *tier.Space) bool {
		from, to := batch.ImageType(a.Kind()), batch.ImageType(b.Kind())
		if known[[2]batch.PayloadType{from, to}] {
			return true
		}
		missing = append(missing, Row{From: a.ID(), To: b.ID(), Err: &convert.NoConverterError{From: from, To: to}})
		return false
	}
	spaces := eng.Spaces()
	for i, a := range spaces {
		for _, b := range spaces[i+1:] {
			if a.Kind() == tier.Disk && b.Kind() == tier.Disk {
				continue
			}
			switch there, back := can(a, b), can(b, a); {
			case there:
				links = append(links, link{a, b, back})
			case back:
				links = append(links, link{b, a, false})
			}
		}
	}
	return links, missing
}

// bench is one load's batches, on their way along all links.
type bench struct {
	cfg     Config
	load    load
	room    *regions
	batches []*batch.Batch
}

// byLoad measures one load along all links.
func (c Config) byLoad(ctx context.Context, l load, rec arrow.RecordBatch, links []link, room *regions) (rows []Row, err error) {
	plan, err := c.Engine.Plan("bandwidth")
	if err != nil {
		return nil, err
	}
	defer func() {
		_, e := plan.Close()
		err = errors.Join(err, e)
	}()
	repo, err := plan.Repository("bandwidth", 0)
	if err != nil {
		return nil, err
	}
	b := bench{cfg: c, load: l, room: room}
	// Also when ctx has ended: a move of the monitor's, if there is one, does soon.
	defer func() { err = errors.Join(err, b.drop(context.WithoutCancel(ctx))) }()
	if err := b.put(ctx, repo, rec); err != nil {
		return nil, err
	}
	for _, k := range links {
		more, err := b.link(ctx, k)
		if err != nil {
			return nil, fmt.Errorf("%s and %s: %w", k.from.ID(), k.to.ID(), err)
		}
		rows = append(rows, more...)
	}
	return rows, nil
}

// put makes the batches.
func (b *bench) put(ctx context.Context, repo *repository.Repository, rec arrow.RecordBatch) error {
	for range b.load.threads {
		if err := repo.Put(ctx, 0, rec); err != nil {
			return err
		}
		x, err := repo.Take(ctx, 0, batch.Idle)
		if err != nil {
			return err
		}
		b.batches = append(b.batches, x)
		x.Subscribe() // until it is dropped: the monitor leaves it alone
	}
	return nil
}

// drop gives the batches' memory back. The monitor may have begun to move one before it was
// stopped.
func (b *bench) drop(ctx context.Context) error {
	var errs []error
	for _, x := range b.batches {
		errs = append(errs, x.Discard(ctx))
	}
	return errors.Join(errs...)
}

// link measures both ways between two spaces.
func (b *bench) link(ctx context.Context, k link) ([]Row, error) {
	if err := b.bring(ctx, k.from); err != nil {
		return nil, err
	}
	from, okFrom := k.from.Pool().(*volumes.Volume)
	to, okTo := k.to.Pool().(*volumes.Volume)
	switch {
	case okFrom:
		return b.toMemory(ctx, k, from)
	case okTo:
		return b.withDisk(ctx, k, to)
	case k.driven():
		return b.byDriver(ctx, k)
	}
	return b.betweenMemories(ctx, k)
}

// moves is our side of a link.
func (b *bench) moves(k link) side {
	s := side{
		there: func(ctx context.Context) error { return b.moveAll(ctx, k.to) },
		back:  func(ctx context.Context) error { return b.moveAll(ctx, k.from) },
	}
	if !k.back {
		s.back = func(ctx context.Context) error { return b.bring(ctx, k.from) }
	}
	return s
}

func (b *bench) moveAll(ctx context.Context, to *tier.Space) error {
	return b.moveSome(ctx, b.batches, to)
}

// bring moves all batches to a space, if need be by way of another.
func (b *bench) bring(ctx context.Context, to *tier.Space) error {
	err := b.moveAll(ctx, to)
	if !errors.Is(err, convert.ErrNoConverter) {
		return err
	}
	for _, via := range b.cfg.Engine.Spaces() {
		if via == to {
			continue
		}
		if e := b.moveAll(ctx, via); e != nil {
			if errors.Is(e, convert.ErrNoConverter) {
				continue
			}
			return e
		}
		if e := b.moveAll(ctx, to); !errors.Is(e, convert.ErrNoConverter) {
			return e
		}
	}
	return err
}

func (b *bench) betweenMemories(ctx context.Context, k link) ([]Row, error) {
	b.begin(k)
	raw := rawMemory(b.room, b.load)
	l := loop{
		pairs: b.cfg.Pairs, progress: b.cfg.Progress, ours: b.moves(k), raw: raw, again: raw,
		steps: []step{{false, untimed}, {true, 1}, {false, 0}, {true, untimed}},
	}
	t, err := l.run(ctx)
	if err != nil {
		return nil, err
	}
	rows := []Row{b.row(k.from, k.to, Memory, t[0])}
	if k.back {
		rows = append(rows, b.row(k.to, k.from, Memory, t[1]))
	}
	return rows, nil
}

// withDisk measures writing, in both states, and reading: the limit where the batches lie, if they
// have a place, else on files of its own.
func (b *bench) withDisk(ctx context.Context, k link, v *volumes.Volume) (rows []Row, err error) {
	var t [figures]timings
	w := b.cfg.Watched[k.to.ID()]
	var at *place
	if w != nil {
		if at, err = b.settled(ctx, k, v, w); err != nil {
			return nil, err
		}
	}
	if at != nil {
		t, err = b.inPlace(ctx, k, v, w)
	}
	// A codec that chooses may take to compressing in the middle of it, or room come in pieces. The
	// batches are in memory then.
	if at == nil || errors.Is(err, errPlace) {
		t, err = b.onFiles(ctx, k, v)
	}
	if err != nil {
		return nil, err
	}
	rows = []Row{b.row(k.from, k.to, Fresh, t[fresh]), b.row(k.from, k.to, Rewritten, t[rewritten])}
	if k.back {
		rows = append(rows, b.row(k.to, k.from, Rewritten, t[read]))
	}
	return rows, nil
}

// The figures of an edge with a disk.
const fresh, rewritten, read = 0, 1, 2

// settled has the batches written to room of their own, and brought back; it returns where they
// were, nil if that is no place.
func (b *bench) settled(ctx context.Context, k link, v *volumes.Volume, w *Watch) (*place, error) {
	if _, err := b.renew(ctx, k.to, v); err != nil {
		return nil, err
	}
	if err := b.moveAll(ctx, k.to); err != nil {
		return nil, err
	}
	at := b.spot(w)
	return at, b.bring(ctx, k.from)
}

// errPlace ends a measurement in the volume's file.
var errPlace = errors.New("bandwidth: the volume's room was not where it was expected")

// inPlace measures all sides in the volume's file: on many disks one place is much faster than
// another. Fresh room is made anew for each side, by the volume. What was written before is
// written and read by all of them in turn, at one place that is another one in each round. Raw
// holds the room while it is there: the volume gives back what lies idle, and a file with it.
func (b *bench) inPlace(ctx context.Context, k link, v *volumes.Volume, w *Watch) (all [figures]timings, err error) {
	b.cfg.Progress.Begin(b.name(k), 2*int64(b.cfg.Pairs))
	var at *place
	var held *tier.Buffer // the room that at is in, while raw is at work
	raw := func(half int) side {
		memory := func(i int) []byte {
			here, there := b.room.pair(b.load, i)
			return [...][]byte{here, there}[half]
		}
		return side{
			there: func(ctx context.Context) error { return at.write(ctx, b.load, memory) },
			back:  func(ctx context.Context) error { return at.read(ctx, b.load, memory) },
			prepare: func(ctx context.Context) (err error) {
				held, err = b.hold(ctx, k.to, v, at)
				return err
			},
			finish: func() (err error) {
				err, held = held.Release(), nil
				return err
			},
		}
	}
	l := loop{pairs: b.cfg.Pairs, progress: b.cfg.Progress, ours: b.moves(k), raw: raw(0), again: raw(1)}
	l.ours.there, l.steady = watching(l.ours.there, v)

	anew := l
	anew.steps = []step{{false, fresh}, {true, untimed}}
	anew.ours.prepare = func(ctx context.Context) error { _, err := b.renew(ctx, k.to, v); return err }
	for _, s := range []*side{&anew.raw, &anew.again} {
		s.back = nil
		s.prepare = func(ctx context.Context) (err error) {
			if err := trim(ctx, v); err != nil {
				return err
			}
			var first int64
			if held, first, err = b.take(ctx, k.to); err != nil {
				return err
			}
			if at = b.laid(w, first, k.to.Charge(b.load.bytes)); at == nil {
				return errPlace
			}
			return nil
		}
	}
	written, err := anew.run(ctx)
	if err != nil {
		return all, err
	}
	l.steps = []step{{false, rewritten}, {true, read}}
	l.before = func(ctx context.Context) (err error) {
		if at, err = b.settled(ctx, k, v, w); err == nil && at == nil {
			err = errPlace
		}
		return err
	}
	all, err = l.run(ctx)
	all[fresh] = written[fresh]
	return all, err
}

// laid returns the place of batches in room that begins at first, each taking so much.
func (b *bench) laid(w *Watch, first, each int64) *place {
	p := &place{file: w.only()}
	if p.file == nil || first < 0 {
		return nil
	}
	for i := range b.load.threads {
		p.at = append(p.at, first+int64(i)*each)
	}
	return p
}

// onFiles measures the limit on files of its own. They are made for each turn, as our room is: the
// figure of a file that stayed would depend on its place.
func (b *bench) onFiles(ctx context.Context, k link, v *volumes.Volume) (t [figures]timings, err error) {
	files := b.cfg.newRawFiles(k.to.ID(), v, b.room, b.load)
	defer func() { err = errors.Join(err, files.close()) }()
	b.begin(k)
	ours := b.moves(k)
	ours.prepare = func(ctx context.Context) error { _, err := b.renew(ctx, k.to, v); return err }
	l := loop{
		pairs: b.cfg.Pairs, progress: b.cfg.Progress, ours: ours, raw: files[0].side(), again: files[1].side(),
		steps: []step{{false, fresh}, {true, untimed}, {false, rewritten}, {true, read}},
	}
	l.ours.there, l.steady = watching(ours.there, v)
	return l.run(ctx)
}

// toMemory measures reading where nothing can be written the same way.
func (b *bench) toMemory(ctx context.Context, k link, v *volumes.Volume) (rows []Row, err error) {
	files := b.cfg.newRawFiles(k.from.ID(), v, b.room, b.load)
	defer func() { err = errors.Join(err, files.close()) }()
	b.begin(k)
	if err := files.renew(ctx); err != nil {
		return nil, err
	}
	for _, f := range files {
		if err := f.write(ctx); err != nil {
			return nil, err
		}
	}
	l := loop{
		pairs: b.cfg.Pairs, progress: b.cfg.Progress, steps: []step{{false, 0}, {true, untimed}},
		ours: b.moves(k), raw: side{there: files[0].read}, again: side{there: files[1].read},
	}
	t, err := l.run(ctx)
	if err != nil {
		return nil, err
	}
	return []Row{b.row(k.from, k.to, Rewritten, t[0])}, nil
}

// watching returns f and what reports whether the volume took no room of the file system since
// it was asked last: room that f takes is fresh, whatever the state was to be.
func watching(f transfer, v *volumes.Volume) (transfer, func() bool) {
	took := false
	return func(ctx context.Context) error {
			before := v.Stats().Fresh
			err := f(ctx)
			took = took || v.Stats().Fresh != before
			return err
		}, func() bool {
			was := took
			took = false
			return !was
		}
}

// renew makes the volume give all its room back, and take as much as the load needs without writing
// there: like the raw file, it then has allocated room. It returns where in its file that begins;
// -1 if it is in pieces.
func (b *bench) renew(ctx context.Context, s *tier.Space, v *volumes.Volume) (at int64, err error) {
	if err := trim(ctx, v); err != nil {
		return 0, err
	}
	buf, at, err := b.take(ctx, s)
	if err != nil {
		return 0, err
	}
	return at, buf.Release()
}

// trim makes the volume give all its room back.
func trim(ctx context.Context, v *volumes.Volume) error {
	if _, err := v.Trim(ctx); err != nil {
		return err
	}
	if st := v.Stats(); st.Backed > st.Used {
		return fmt.Errorf("bandwidth: the volume in %s keeps %d bytes that it was to give back", st.Dir, st.Backed-st.Used)
	}
	return nil
}

// take takes as much room as the load needs, which the caller must release. It returns where in the
// volume's file that begins; -1 if it is in pieces.
func (b *bench) take(ctx context.Context, s *tier.Space) (buf *tier.Buffer, at int64, err error) {
	buf, err = b.beside(ctx, s, s.Charge(b.load.bytes)*int64(b.load.threads))
	if err != nil {
		return nil, 0, errors.Join(err, buf.Release())
	}
	f, _ := buf.Memory().(tier.FileMemory)
	if at, whole := whereIs(f); whole {
		return buf, at, nil
	}
	return buf, -1, nil
}

// hold takes room as take does. It must be what was written before and hold the place; else
// the error is errPlace.
func (b *bench) hold(ctx context.Context, s *tier.Space, v *volumes.Volume, at *place) (*tier.Buffer, error) {
	before := v.Stats().Fresh
	buf, first, err := b.take(ctx, s)
	if err == nil && (v.Stats().Fresh != before || !at.within(first, buf.Size(), b.load.bytes)) {
		err = errPlace
	}
	return buf, err // with errPlace, too: the caller must release it
}

func (b *bench) begin(k link) { b.cfg.Progress.Begin(b.name(k), int64(b.cfg.Pairs)) }

func (b *bench) name(k link) string {
	return fmt.Sprintf("%s and %s, %d × %s", k.from.ID(), k.to.ID(), b.load.threads, size.Format(b.load.bytes))
}

func (b *bench) row(from, to *tier.Space, state State, t timings) Row {
	r := Row{From: from.ID(), To: to.ID(), Bytes: b.load.bytes, Threads: b.load.threads, State: state, LimitOf: limitOf(from, to)}
	t.fill(&r, b.load)
	return r
}
