package bandwidth

import (
	"context"
	"errors"

	"github.com/spillway-db/spillway/tier"
)

// lane is what one thread of raw copies between if that is memory of the link's two spaces, beside
// the batches' own. Each lane has streams of its own.
type lane struct {
	from, to end
	via      end // host memory for copies between GPUs that cannot reach each other; else empty
}

// end is memory of one space, which the end owns.
type end struct {
	buffer *tier.Buffer
	device tier.Device // nil: the memory is the host's
	stream tier.Stream // of the device
}

type lanes []*lane

// newLanes reserves as much memory in both spaces as the load has, and fills it. The caller must
// close the lanes.
func (b *bench) newLanes(ctx context.Context, k link) (all lanes, err error) {
	defer func() {
		if err != nil {
			err = errors.Join(err, all.close())
		}
	}()
	for range b.load.threads {
		l := new(lane)
		all = append(all, l)
		if err := errors.Join(b.open(ctx, &l.from, k.from), b.open(ctx, &l.to, k.to)); err != nil {
			return all, err
		}
		err := l.transfer(ctx, back)
		if errors.Is(err, tier.ErrNotSupported) && k.via != nil {
			if err = b.open(ctx, &l.via, k.via); err == nil {
				err = l.transfer(ctx, back)
			}
		}
		if err := errors.Join(err, l.transfer(ctx, there)); err != nil {
			return all, err
		}
	}
	return all, nil
}

// open reserves memory for one end. Faults are for moves alone, so the device is the innermost one.
func (b *bench) open(ctx context.Context, e *end, s *tier.Space) (err error) {
	if e.buffer, err = b.reserve(ctx, s, b.load.bytes); err != nil {
		return err
	}
	if dev := deviceOf(s); dev != nil {
		e.device = dev
		e.stream, err = dev.NewStream()
	}
	return err
}

// deviceOf returns the device of a space without what wraps it, or nil if the space has none.
func deviceOf(s *tier.Space) tier.Device {
	p, ok := s.Pool().(interface{ Device() tier.Device })
	if !ok {
		return nil
	}
	dev := p.Device()
	for {
		w, ok := dev.(interface{ Unwrap() tier.Device })
		if !ok {
			return dev
		}
		dev = w.Unwrap()
	}
}

func (all lanes) close() error {
	var errs []error
	for _, l := range all {
		for _, e := range []*end{&l.from, &l.to, &l.via} {
			if e.stream != nil {
				errs = append(errs, e.stream.Close()) // waits for copies that use the memory
			}
		}
		errs = append(errs, l.from.buffer.Release(), l.to.buffer.Release(), l.via.buffer.Release())
	}
	return errors.Join(errs...)
}

// transfer copies all bytes and waits for that. After an error some copies may be under way until
// the lane is closed.
func (l *lane) transfer(ctx context.Context, d direction) error {
	from, to := &l.from, &l.to
	if d == back {
		from, to = to, from
	}
	if l.via.buffer == nil {
		return from.copyTo(ctx, to)
	}
	if err := from.copyTo(ctx, &l.via); err != nil {
		return err
	}
	return l.via.copyTo(ctx, to)
}

// copyTo copies all bytes to the other end, and waits for that.
func (e *end) copyTo(ctx context.Context, to *end) (err error) {
	on := e // the end whose stream has the copy
	switch {
	case e.device == nil && to.device == nil:
		copy(to.bytes(), e.bytes())
		return nil
	case e.device == nil:
		on = to
		err = to.device.CopyToDevice(to.stream, to.addr(), e.bytes())
	case to.device == nil:
		err = e.device.CopyToHost(e.stream, to.bytes(), e.addr())
	default:
		err = e.device.CopyPeer(e.stream, to.addr(), to.device, e.addr(), e.buffer.Size())
	}
	if err != nil {
		return err
	}
	done, err := on.device.Record(on.stream)
	if err != nil {
		return err
	}
	return tier.Wait(ctx, done)
}

// bytes returns host memory. It is in one piece, as memory is that was allocated without cuts.
func (e *end) bytes() []byte { return e.buffer.Memory().(tier.HostMemory).Extents()[0] }

func (e *end) addr() tier.Addr { return e.buffer.Memory().(tier.DeviceMemory).Addr() }
