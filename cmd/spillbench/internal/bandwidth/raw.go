package bandwidth

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"syscall"

	"golang.org/x/sync/errgroup"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/system"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// A program that knows its disk would make such requests: with these most disks reach their speed.
const (
	rawRequest = 1 << 20
	rawDepth   = 8
)

// raw returns a transfer that does without the engine what a move along the link does, and a function
// that frees its memory and files.
func (b *bench) raw(ctx context.Context, k link) (transfer, func() error, error) {
	switch {
	case k.limit == diskIO:
		return b.onFile(k)
	case k.inSpaces:
		all, err := b.newLanes(ctx, k)
		return func(ctx context.Context, i int, d direction) error { return all[i].transfer(ctx, d) }, all.close, err
	}
	return func(_ context.Context, i int, d direction) error {
		from, to := b.room.part(0, b.load, i), b.room.part(1, b.load, i)
		if d == back {
			from, to = to, from
		}
		copy(to, from)
		return nil
	}, func() error { return nil }, nil
}

// lane is the memory that one thread of raw copies between, beside the batches' own: of a link's two
// spaces, and between them of the host for GPUs that cannot reach each other.
type lane []*end

type lanes []lane

// end is memory of one space.
type end struct {
	buffer *tier.Buffer
	device tier.Device // nil: the memory is the host's
	stream tier.Stream // of the device
}

// newLanes reserves as much memory in both spaces as the load has, and tries each lane once. The caller must
// close the lanes.
func (b *bench) newLanes(ctx context.Context, k link) (all lanes, err error) {
	defer func() {
		if err != nil {
			err = errors.Join(err, all.close())
		}
	}()
	for range b.load.threads {
		from, e := b.open(ctx, k.from)
		to, err := b.open(ctx, k.to)
		all = append(all, lane{from, to})
		if err := errors.Join(e, err); err != nil {
			return all, err
		}
		l := &all[len(all)-1]
		err = l.transfer(ctx, back)
		if errors.Is(err, tier.ErrNotSupported) && k.limit == peerCopy {
			var via *end
			via, err = b.open(ctx, b.cfg.host())
			if *l = (lane{from, via, to}); err == nil {
				err = l.transfer(ctx, back)
			}
		}
		if err != nil {
			return all, err
		}
	}
	return all, nil
}

// open reserves memory for one end, which the caller must close also after an error. Faults are for
// moves alone, so the device is the innermost one.
func (b *bench) open(ctx context.Context, s *tier.Space) (*end, error) {
	e := &end{device: deviceOf(s)}
	r, err := b.cfg.Engine.Reserve(ctx, reservation.Specific(s.ID()), s.Charge(b.load.bytes))
	if err != nil {
		return e, err
	}
	e.buffer, err = r.Alloc(b.load.bytes)
	if err = errors.Join(err, r.Release()); err == nil && e.device != nil {
		e.stream, err = e.device.NewStream()
	}
	return e, err
}

// deviceOf returns the device of a space without its wrappers, or nil if the space has none.
func deviceOf(s *tier.Space) tier.Device {
	p, ok := s.Pool.(interface{ Device() tier.Device })
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

func (all lanes) close() (err error) {
	for _, e := range slices.Concat(all...) {
		if e.stream != nil {
			err = errors.Join(err, e.stream.Close()) // waits for copies that use the memory
		}
	}
	for _, e := range slices.Concat(all...) {
		err = errors.Join(err, e.buffer.Release())
	}
	return err
}

// transfer copies all bytes and waits for that. After an error some copies may be under way until
// the lane is closed.
func (l lane) transfer(ctx context.Context, d direction) error {
	for i := range len(l) - 1 {
		from, to := l[i], l[i+1]
		if d == back {
			from, to = l[len(l)-1-i], l[len(l)-2-i]
		}
		if err := from.copyTo(ctx, to); err != nil {
			return err
		}
	}
	return nil
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
		err = to.device.CopyRegions(to.stream, []tier.Region{{Dst: to.addr(), HostSrc: e.bytes()}})
	case to.device == nil:
		err = e.device.CopyRegions(e.stream, []tier.Region{{HostDst: to.bytes(), Src: e.addr()}})
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

// onFile returns a transfer to and from a new file. The file is like the spill files of the volume:
// without a name, and opened in the same way.
func (b *bench) onFile(k link) (_ transfer, free func() error, err error) {
	fs, st := b.cfg.Files(), k.to.Pool.(*volumes.Volume).Stats()
	var file disk.File
	if st.Anonymous {
		file, err = fs.OpenAnonymous(st.Dir, st.Direct)
	} else {
		path := filepath.Join(st.Dir, fmt.Sprintf(".spillbench-%016x", rand.Uint64()))
		if file, err = fs.Create(path, st.Direct); err == nil {
			err = fs.Remove(path) // the file exists without a name for as long as it is open
		}
	}
	if err == nil {
		// Where the file system cannot allocate, the volume's files are sparse, too.
		if err = file.Allocate(0, b.load.total()); errors.Is(err, errors.ErrUnsupported) {
			err = nil
		}
	}
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		err = &tier.NoSpaceError{Space: k.to.ID(), Requested: b.load.total(), Cause: err}
	}
	if err != nil {
		if file != nil {
			err = errors.Join(err, file.Close())
		}
		return nil, nil, fmt.Errorf("bandwidth: making a file of %d bytes in %s: %w", b.load.total(), st.Dir, err)
	}
	return func(ctx context.Context, i int, d direction) error {
		do := file.WriteAt
		if d == back {
			do = file.ReadAt
		}
		return requests(ctx, b.room.part(0, b.load, i), int64(i)*b.load.bytes, do)
	}, file.Close, nil
}

// requests transfers p at off by rawDepth requests at the same time. It begins none after ctx has
// ended or one has failed.
func requests(ctx context.Context, p []byte, off int64, do func(p []byte, off int64) (int, error)) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(rawDepth)
	for part := range slices.Chunk(p, rawRequest) {
		at := off
		group.Go(func() error {
			if err := context.Cause(ctx); err != nil {
				return err
			}
			n, err := do(part, at)
			if n < len(part) {
				return fmt.Errorf("bandwidth: %d of %d bytes at %d without the engine: %w", n, len(part), at,
					cmp.Or(err, io.ErrNoProgress))
			}
			return nil
		})
		off += rawRequest
	}
	return group.Wait()
}

// regions are two halves of one mapping, which is like an arena's: in huge pages where the machine has
// some, and present. One mapping serves all sizes, because one of 1 MiB would get no huge page.
type regions []byte

// newRegions returns two halves of at least so many bytes each, filled with bytes that no disk can
// compress. The caller must close it.
func newRegions(ctx context.Context, bytes int64) (regions, error) {
	const huge = 2 << 20 // a huge page of the usual processors
	r, err := system.MapRegion(2 * ((bytes + huge - 1) &^ (huge - 1)))
	if err != nil {
		return nil, fmt.Errorf("bandwidth: %w", err)
	}
	random := rand.NewChaCha8([32]byte{})
	for p := range slices.Chunk(r, huge) {
		if err := context.Cause(ctx); err != nil {
			return nil, errors.Join(err, system.UnmapRegion(r))
		}
		_, _ = random.Read(p) // never fails
	}
	return r, nil
}

// part returns the bytes of thread i in one half.
func (r regions) part(half int, l load, i int) []byte {
	off := int64(half*len(r)/2) + int64(i)*l.bytes
	return r[off : off+l.bytes : off+l.bytes]
}

func (r regions) close() error { return system.UnmapRegion(r) }
