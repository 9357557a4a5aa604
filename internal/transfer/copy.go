package transfer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/zeebo/xxh3"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/codec"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/tier"
)

const (
	// MaxPiece is the most that one copy to or from a device, or within host memory, carries: a
	// cancelled move ends within one piece of each lane.
	MaxPiece = 8 << 20
	// deviceLanes is how many pieces between host memory and a device are in progress. Measured
	// with the simulated GPU and 64 MiB: two are a tenth slower than four, eight are a hundredth
	// faster.
	deviceLanes = 4
	// StagedUnderWay is how many staged chunks, or runs, a transfer has in progress: the number of
	// requests at which the disks that were measured reach their speed.
	StagedUnderWay = 8
	// hostRead is a request from disk to host memory: as volumes have them by default.
	hostRead = 2 << 20
)

// bytesFrom is a body to read.
type bytesFrom struct {
	Source                     // of the bytes as they are stored
	space  *tier.Space         // nil for a layout
	desc   *batch.Descriptor   // nil where no checksums are compared
	size   int64               // of the body
	runs   []payload.Run       // of a compressed body
	sums   []uint64            // gets the checksums of a body that has none yet
	adjust image.Parts         // parts that are not as in a plain image
	see    func([]byte, int64) // sees all bytes; pieces come in any order, on several goroutines
	verify bool                // compare the bytes with the checksums
}

// bytesTo is where a body is written to. The zero value has no sink: the bytes are only looked at.
type bytesTo struct {
	Sink
	space  *tier.Space
	buf    *tier.Buffer  // of the sink; copy gives back what a compressed body does not need
	runs   []payload.Run // to fill, if the body is to be compressed
	frame  int64         // bytes of a frame; see payload.Descriptor.Frame
	stored atomic.Int64  // bytes of runs so far; each lane takes room from here
}

// locate returns where the byte at off of the body is stored; the volume is empty where that is not
// a file.
func (s *bytesFrom) locate(off int64) (volume, file string, at int64) {
	m, ok := s.Source.(fileMemory)
	if !ok {
		return "", "", off
	}
	if s.runs != nil {
		run := &s.runs[off/payload.RunSize]
		at := run.Offset
		for _, n := range run.Frames[:off%payload.RunSize/s.desc.Frame()] {
			at += int64(n)
		}
		return m.Locate(at)
	}
	return m.Locate(off)
}

// checker returns what all bytes of a piece pass through, in order, before they go to the sink. A
// piece begins with a checksum's chunk. It returns nil if there is nothing to do.
func (s *bytesFrom) checker() func(p []byte, off int64) error {
	var sum *image.Summer
	switch {
	case s.verify:
		sum = image.NewVerifier(s.desc, s.locate)
	case s.sums != nil:
		sum = &image.Summer{Body: s.size, Block: payload.SumChunk, Each: func(chunk int64, sum uint64) error {
			s.sums[chunk] = sum
			return nil
		}}
	case s.see == nil && len(s.adjust) == 0:
		return nil
	}
	return func(p []byte, off int64) error {
		s.adjust.Apply(p, off)
		if sum != nil {
			if err := sum.Add(p, off); err != nil {
				return err
			}
		}
		if s.see != nil {
			s.see(p, off)
		}
		return nil
	}
}

// copying is a body on its way.
//
//	source ──fetch──▶ (uncompress) ──▶ check ──▶ (compress) ──store──▶ sink
//
// It goes in pieces, of which several lanes move one each. A piece is fetched straight to its
// place, or stored straight from it, where one of the two is host memory. Otherwise it passes
// through the lane's pinned chunk, or through its block where runs are compressed or uncompressed.
type copying struct {
	b      *Builtin
	src    *bytesFrom
	dst    *bytesTo
	piece  int64 // bytes; a multiple of payload.SumChunk if anything is checked
	coded  bool  // the source or the sink is compressed: a piece is a run
	device bool  // the source or the sink is a device
	layout bool  // the source is
	sample bool  // the first piece is sampled for the choice of a codec

	with codec.Codec // what runs are compressed with; Auto: what Builtin.Choose returns for disk
	disk *codec.Disk // nil unless bytes go to a disk
}

// copy copies the bytes of src to dst. Every copy of a body goes through it.
func (b *Builtin) copy(ctx context.Context, dst *bytesTo, src *bytesFrom) error {
	if src.size == 0 {
		return nil
	}
	from, fromDevice := src.Source.(*deviceMemory)
	to, toDevice := dst.Sink.(*deviceMemory)
	_, fromHost := src.Source.(hostMemory)
	host, toHost := dst.Sink.(hostMemory)
	_, fromFile := src.Source.(fileMemory)
	_, toFile := dst.Sink.(fileMemory)
	layout, fromLayout := src.Source.(layoutSource)
	c := &copying{
		b: b, src: src, dst: dst, coded: src.runs != nil || dst.runs != nil, with: codec.None,
		device: fromDevice || toDevice, layout: fromLayout,
	}
	most, staged := StagedUnderWay, false
	switch {
	case c.coded:
		c.piece = payload.RunSize
	case fromLayout && toHost:
		return layout.WriteTo(host)
	case fromHost && toFile: // the volume has several requests in progress
		c.piece, most = src.size, 1
	case fromFile && toHost:
		c.piece = hostRead
	case fromHost && !toDevice:
		c.piece, most = MaxPiece, 1
	case fromHost || toHost:
		c.piece, most = MaxPiece, deviceLanes
	default:
		staged = true
	}
	w := lanes{b: b, node: -1, blocks: c.coded}
	for _, s := range []*tier.Space{src.space, dst.space} { // the node of the device, or of the first space
		if s != nil && (w.node < 0 || s.Kind() == tier.GPU) {
			w.node = s.Node()
		}
	}
	if staged || c.coded && c.device { // a block is not pinned
		chunks, err := b.Staging(w.node)
		if err != nil {
			return err
		}
		if w.chunks = chunks; staged {
			c.piece = chunks.Chunk()
			if !fromLayout {
				c.piece = max(payload.SumChunk, c.piece-c.piece%payload.SumChunk)
			}
		}
	}
	var begin func(l *lane, i int) error
	if fromLayout { // its bytes come in order
		begin = func(l *lane, i int) error {
			off := int64(i) * c.piece
			return layout.Fetch(ctx, l.room(min(c.piece, src.size-off)), off)
		}
	}
	if toFile {
		c.disk = b.Choose.Disk(dst.space.ID())
	}
	if dst.runs != nil && src.runs == nil {
		if c.with = b.Codec; !toFile && (c.with == codec.Auto || c.with == codec.None) {
			c.with = codec.S2 // in memory only the length counts, and time
		}
	}
	c.sample = b.Codec == codec.Auto && toFile && src.runs == nil && !fromLayout && src.size >= payload.FrameSize &&
		b.Choose.Due(c.disk)
	var devices []*deviceMemory
	for _, m := range []*deviceMemory{from, to} {
		if m != nil {
			devices = append(devices, m)
		}
	}
	return b.onStreams(ctx, devices, func() error {
		if fromDevice && toDevice && src.checker() == nil {
			if err := copyOnDevices(ctx, to, from); !errors.Is(err, tier.ErrNotSupported) {
				return err
			}
		}
		first, pieces := 0, int((src.size+c.piece-1)/c.piece)
		if c.sample || c.with == codec.Auto && b.Choose.Blind(c.disk) {
			// The first piece goes alone: the sample should not compete with others, and if nothing
			// is known to choose the codec by, that piece shows what the disk is like.
			if err := w.each(ctx, 0, 1, 1, begin, c.move); err != nil {
				return err
			}
			first = 1
		}
		err := w.each(ctx, first, pieces, most, begin, c.move)
		if err == nil && dst.runs != nil && dst.buf != nil {
			dst.buf.Shrink(dst.stored.Load())
		}
		return err
	})
}

// move moves a piece, and measures the speed of a disk.
func (c *copying) move(ctx context.Context, l *lane, i int) error {
	if i == 0 && c.sample {
		room := make([]byte, codec.SampleRoom+payload.SumChunk)
		read := func(off, n int64) ([]byte, error) {
			p := room[codec.SampleRoom:][:n]
			return p, c.read(ctx, l, p, off)
		}
		if err := c.b.Choose.Sample(&c.b.coders, c.disk, c.src.size, room[:codec.SampleRoom], read); err != nil {
			return err
		}
	}
	off := int64(i) * c.piece
	end := min(off+c.piece, c.src.size)
	with, least := c.with, int64(1) // the least bytes that are moved together
	switch {
	case c.src.runs != nil && c.dst.runs != nil:
		from, to := &c.src.runs[i], &c.dst.runs[i] // it is copied as it is stored
		stored, err := stored(ctx, c.src, from, l.stored)
		if err != nil {
			return err
		}
		to.Codec, to.Frames = from.Codec, from.Frames
		return c.storeRun(ctx, to, l.stored[:copy(l.stored, stored)])
	case c.src.runs != nil:
		with, least = codec.Codec(c.src.runs[i].Codec), end-off
	case c.dst.runs != nil:
		if least = end - off; with == codec.Auto {
			with = c.b.Choose.Next(c.disk, payload.RunSize)
		}
	}
	move := func() error {
		check := c.src.checker()
		for off < end {
			var p []byte
			if c.src.runs == nil {
				p = c.src.View(off, end-off)
			}
			viewed, placed := int64(len(p)) >= least, false
			if !viewed && c.dst.Sink != nil && c.dst.runs == nil {
				p = c.dst.View(off, end-off)
				placed = int64(len(p)) >= least
			}
			if !viewed && !placed {
				p = l.room(end - off)
			}
			var err error
			switch {
			case viewed || c.layout: // the bytes of a layout are there: see copy
			case c.src.runs != nil:
				err = c.b.uncompress(ctx, c.src, l, i, p)
			case c.coded:
				err = c.read(ctx, l, p, off)
			default:
				err = c.src.Fetch(ctx, p, off)
			}
			if err == nil && check != nil {
				err = check(p, off)
			}
			switch {
			case err != nil || placed || c.dst.Sink == nil:
			case c.dst.runs != nil:
				err = c.compress(ctx, l, &c.dst.runs[i], p, with)
			case c.coded && c.device: // a block is not pinned
				at := off
				for part := range slices.Chunk(p, len(l.chunk)) {
					if err = c.dst.Store(ctx, l.chunk[:copy(l.chunk, part)], at); err != nil {
						break
					}
					at += int64(len(part))
				}
			default:
				err = c.dst.Store(ctx, p, off)
			}
			if err != nil {
				return err
			}
			off += int64(len(p))
		}
		return nil
	}
	if c.layout && !c.coded { // the disk also waits for the layout
		return move()
	}
	space, writes := c.dst.space, true
	if space == nil || space.Kind() != tier.Disk {
		space, writes = cmp.Or(c.src.space, space), false
	}
	return c.b.Choose.Timed(c.b.Codec, space.ID(), with, writes, end-off, move)
}

// read brings bytes to p, which need not be pinned.
func (c *copying) read(ctx context.Context, l *lane, p []byte, off int64) error {
	if !c.device {
		return c.src.Fetch(ctx, p, off)
	}
	for part := range slices.Chunk(p, len(l.chunk)) {
		if err := c.src.Fetch(ctx, l.chunk[:len(part)], off); err != nil {
			return err
		}
		off += int64(copy(part, l.chunk))
	}
	return nil
}

// compress makes a run of p, whose length is a multiple of a page, and stores it.
func (c *copying) compress(ctx context.Context, l *lane, run *payload.Run, p []byte, with codec.Codec) (err error) {
	run.Codec, run.Frames = uint8(with), nil
	stored := l.stored[:0]
	for frame := range slices.Chunk(p, int(c.dst.frame)) {
		before := len(stored)
		if with == codec.None {
			stored = p[:before+len(frame)]
		} else if stored, err = c.b.coders.Encode(with, stored, frame); err != nil {
			return err
		}
		run.Frames = append(run.Frames, uint32(len(stored)-before))
	}
	if err := c.storeRun(ctx, run, stored); err != nil || !c.layout || c.with != codec.Auto {
		return err
	}
	return c.b.Choose.Sample(&c.b.coders, c.disk, int64(len(p)), l.stored, func(off, n int64) ([]byte, error) {
		return p[off:][:n], nil
	})
}

// storeRun stores a run's bytes, which have room for the last page behind them.
func (c *copying) storeRun(ctx context.Context, run *payload.Run, stored []byte) error {
	n := int64(len(stored))
	run.Sum = xxh3.Hash(stored)
	stored = stored[:image.RoundUp(n, tier.Page)]
	clear(stored[n:])
	run.Offset = c.dst.stored.Add(int64(len(stored))) - int64(len(stored))
	return c.dst.Store(ctx, stored, run.Offset)
}

// stored returns a run's bytes, verified: where they are, or in room.
func stored(ctx context.Context, src *bytesFrom, run *payload.Run, room []byte) ([]byte, error) {
	n := run.Stored()
	p := src.View(run.Offset, n)
	if int64(len(p)) < n {
		p = room[:image.RoundUp(n, tier.Page)]
		if err := src.Fetch(ctx, p, run.Offset); err != nil {
			return nil, err
		}
		p = p[:n]
	}
	if got := xxh3.Hash(p); got != run.Sum {
		c := &image.CorruptError{Want: run.Sum, Got: got}
		return nil, src.corrupt(c, run, 0)
	}
	return p, nil
}

// uncompress brings run i to p. A run that nothing was gained by compressing is read straight to p,
// and compared with the checksums of the body alone.
func (b *Builtin) uncompress(ctx context.Context, src *bytesFrom, l *lane, i int, p []byte) error {
	run := &src.runs[i]
	if run.Stored() == int64(len(p)) {
		return src.Fetch(ctx, p, run.Offset)
	}
	stored, err := stored(ctx, src, run, l.stored)
	if err != nil {
		return err
	}
	at, f := int64(0), 0
	for frame := range slices.Chunk(p, int(src.desc.Frame())) {
		n := int64(run.Frames[f])
		if err := b.coders.Decode(codec.Codec(run.Codec), frame, stored[at:at+n]); err != nil {
			return src.corrupt(&image.CorruptError{Cause: err}, run, at)
		}
		at += n
		f++
	}
	return nil
}

// corrupt adds where the corrupt bytes are, at off of a run.
func (s *bytesFrom) corrupt(c *image.CorruptError, run *payload.Run, off int64) *image.CorruptError {
	c.Offset = run.Offset + off
	if m, ok := s.Source.(fileMemory); ok {
		volume, file, at := m.Locate(c.Offset)
		c.Volume, c.Offset = volume+" "+file, at
	}
	return c
}

// safely makes a panic of a device or a layout an error, so that what is in progress is waited for
// and what was taken is given back. The error concerns the batch alone. A panic of a file system,
// which is an error already, may concern others. A broken lock order stays a panic, because an
// invariants build must not hide it.
func safely(f func() error) (err error) {
	defer func() {
		p := recover()
		if v, ok := p.(lockrank.Violation); ok {
			panic(v)
		}
		if p != nil {
			err = &batch.UnmovableError{Err: fmt.Errorf("convert: a transfer panicked: %v", p)}
		}
	}()
	return f()
}
