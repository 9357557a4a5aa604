package bandwidth

import (
	"context"
	"errors"
	"slices"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// driven reports whether bytes between a space and host memory are copied by a driver, beside the
// processors: then memmove is not what limits them.
func driven(s *tier.Space) bool {
	dev := deviceOf(s)
	return dev != nil && dev.Info().Backend != "sim"
}

// deviceOf returns the device of a space, nil if it has none.
func deviceOf(s *tier.Space) tier.Device {
	p, ok := s.Pool().(interface{ Device() tier.Device })
	if !ok {
		return nil
	}
	return p.Device()
}

// driven reports whether one end of the link is a GPU of a driver's and the other host memory.
func (k link) driven() bool {
	return driven(k.from) && k.to.Kind() == tier.Host || driven(k.to) && k.from.Kind() == tier.Host
}

// anyDriven reports whether one of the engine's GPUs has a driver.
func anyDriven(eng *spillway.Engine) bool { return slices.ContainsFunc(eng.Spaces(), driven) }

// lane is what one thread of raw copies between, on a stream of its own: memory of the two spaces,
// as a batch's would be.
type lane struct {
	device tier.Device
	stream tier.Stream
	gpu    *tier.Buffer
	host   *tier.Buffer
}

// lanes are those of a load.
type lanes []*lane

// newLanes takes as much room as the load needs in both spaces, beside that of the batches. Both
// are filled. The caller must close them.
func (b *bench) newLanes(ctx context.Context, gpu, host *tier.Space) (all lanes, err error) {
	defer func() {
		if err != nil {
			err = errors.Join(err, all.close())
		}
	}()
	for range b.load.threads {
		l := &lane{device: deviceOf(gpu)}
		all = append(all, l)
		if l.gpu, err = b.beside(ctx, gpu, b.load.bytes); err != nil {
			return all, err
		}
		if l.host, err = b.beside(ctx, host, b.load.bytes); err != nil {
			return all, err
		}
		if l.stream, err = l.device.NewStream(); err != nil {
			return all, err
		}
		if err := l.copy(ctx, false); err != nil { // so that both have been written
			return all, err
		}
	}
	return all, nil
}

// beside takes so much room beside that of the batches, which the caller must release.
func (b *bench) beside(ctx context.Context, s *tier.Space, bytes int64) (*tier.Buffer, error) {
	r, err := b.cfg.Engine.Reserve(ctx, reservation.Specific(s.ID()), s.Charge(bytes))
	if err != nil {
		return nil, err
	}
	buf, err := r.Alloc(bytes)
	return buf, errors.Join(err, r.Release())
}

func (all lanes) close() error {
	var errs []error
	for _, l := range all {
		if l.stream != nil {
			errs = append(errs, l.stream.Close()) // waits, so that nothing is copied when the memory goes
		}
		errs = append(errs, l.gpu.Release(), l.host.Release())
	}
	return errors.Join(errs...)
}

// copy has the driver copy all bytes, in one piece unless the arena's are in several, and waits for
// that. After an error some may be under way until the lane's stream is closed.
func (l *lane) copy(ctx context.Context, toHost bool) error {
	at := l.gpu.Memory().(tier.DeviceMemory).Addr()
	for _, piece := range l.host.Memory().(tier.HostMemory).Extents() {
		var err error
		if toHost {
			err = l.device.CopyToHost(l.stream, piece, at)
		} else {
			err = l.device.CopyToDevice(l.stream, at, piece)
		}
		if err != nil {
			return err
		}
		at += tier.Addr(len(piece))
	}
	e, err := l.device.Record(l.stream)
	if err != nil {
		return err
	}
	return tier.Wait(ctx, e)
}

// copyAll copies with all of them at once.
func (all lanes) copyAll(ctx context.Context, toHost bool) error {
	return together(len(all), func(i int) error { return all[i].copy(ctx, toHost) })
}

// byDriver measures a link whose limit are a driver's copies: each way, and if batches can be
// parted into two equal halves both ways at once.
func (b *bench) byDriver(ctx context.Context, k link) (rows []Row, err error) {
	gpu, host, down := k.from, k.to, true
	if k.from.Kind() == tier.Host {
		gpu, host, down = k.to, k.from, false
	}
	all, err := b.newLanes(ctx, gpu, host)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, all.close()) }()
	b.begin(k)
	raw := side{
		there: func(ctx context.Context) error { return all.copyAll(ctx, down) },
		back:  func(ctx context.Context) error { return all.copyAll(ctx, !down) },
	}
	l := loop{
		pairs: b.cfg.Pairs, progress: b.cfg.Progress, ours: b.moves(k), raw: raw, again: raw,
		steps: []step{{false, 0}, {true, 1}},
	}
	t, err := l.run(ctx)
	if err != nil {
		return nil, err
	}
	rows = []Row{b.row(k.from, k.to, Memory, t[0])}
	if !k.back {
		return rows, nil
	}
	rows = append(rows, b.row(k.to, k.from, Memory, t[1]))
	if b.load.threads%2 == 0 {
		both, err := b.bothWays(ctx, k, all, down)
		if err != nil {
			return nil, err
		}
		rows = append(rows, both)
	}
	return rows, nil
}

// The figures of moves in both directions: all at once, and then each half alone.
const atOnce, firstAlone, secondAlone = 0, 1, 2

// bothWays has one half of the batches move there while the other moves back, and then one half
// after the other. A link that can do both at once is done in half the time.
func (b *bench) bothWays(ctx context.Context, k link, all lanes, down bool) (Row, error) {
	half := len(b.batches) / 2
	if err := b.moveSome(ctx, b.batches[half:], k.to); err != nil {
		return Row{}, err
	}
	b.begin(k)
	ours := exchange(
		func(ctx context.Context) error { return b.moveSome(ctx, b.batches[:half], k.to) },
		func(ctx context.Context) error { return b.moveSome(ctx, b.batches[half:], k.from) },
		func(ctx context.Context) error { return b.moveSome(ctx, b.batches[:half], k.from) },
		func(ctx context.Context) error { return b.moveSome(ctx, b.batches[half:], k.to) },
	)
	raw := func() side {
		return exchange(
			func(ctx context.Context) error { return all[:half].copyAll(ctx, down) },
			func(ctx context.Context) error { return all[half:].copyAll(ctx, !down) },
			func(ctx context.Context) error { return all[:half].copyAll(ctx, !down) },
			func(ctx context.Context) error { return all[half:].copyAll(ctx, down) },
		)
	}
	l := loop{
		pairs: b.cfg.Pairs, progress: b.cfg.Progress, ours: ours, raw: raw(), again: raw(),
		steps: []step{{false, atOnce}, {true, firstAlone}, {true, secondAlone}},
	}
	t, err := l.run(ctx)
	if err != nil {
		return Row{}, err
	}
	r := b.row(k.from, k.to, Memory, t[atOnce])
	r.BothWays = true
	r.Gain = gain(t[atOnce].ours, t[firstAlone].ours, t[secondAlone].ours)
	r.LimitGain = gain(
		slices.Concat(t[atOnce].raw, t[atOnce].again),
		slices.Concat(t[firstAlone].raw, t[firstAlone].again), slices.Concat(t[secondAlone].raw, t[secondAlone].again))
	return r, nil
}

// exchange is a side that does first and second at once there; back it undoes first, and when it is
// called again second.
func exchange(first, second, undoFirst, undoSecond transfer) side {
	undo := [...]transfer{undoFirst, undoSecond}
	calls := 0
	return side{
		there: func(ctx context.Context) error {
			calls = 0
			return together(2, func(i int) error { return [...]transfer{first, second}[i](ctx) })
		},
		back: func(ctx context.Context) error {
			f := undo[calls%len(undo)]
			calls++
			return f(ctx)
		},
	}
}

// gain is how many times as fast both ways at once are as one after the other, the median.
func gain(atOnce, first, second []float64) float64 {
	var all []float64
	for i, s := range atOnce {
		all = append(all, (first[i]+second[i])/s)
	}
	return median(all)
}

// moveSome moves batches, and leaves no copies, so that they can be moved back.
func (b *bench) moveSome(ctx context.Context, some []*batch.Batch, to *tier.Space) error {
	defer b.cfg.Engine.Mover().Inside().DropCopies()
	where := reservation.Specific(to.ID())
	return together(len(some), func(i int) error {
		return b.cfg.Engine.Mover().Move(ctx, some[i], where)
	})
}
