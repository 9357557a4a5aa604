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
	"github.com/spillway-db/spillway/internal/extent"
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
	// StagedUnderWay is how many staged chunks, or runs, a transfer has in progress. It is the
	// number of requests at which the disks that were measured reach their speed.
	StagedUnderWay = 8
	// hostRead is the length of a request from disk to host memory. It is the default of volumes,
	// so each request of a lane is one of the disk.
	hostRead = 2 << 20
)

// bytesFrom is a body to read: where it is, in which form, and what has to look at its bytes on the
// way. It belongs to one copy, whose lanes read it at the same time.
type bytesFrom struct {
	Source                     // of the bytes as they are stored; nil if a record is laid out while it is read
	layout *image.Layout       // of that record; it is read once, from the beginning to the end
	space  *tier.Space         // nil for a layout
	desc   *batch.Descriptor   // nil where no checksums are compared
	size   int64               // of the body
	runs   []payload.Run       // of a compressed body
	sums   []uint64            // gets the checksums of a body that has none yet
	adjust image.Parts         // parts that are not as in a plain image
	see    func([]byte, int64) // sees all bytes; pieces come in any order, on several goroutines
	verify bool                // compare the bytes with the checksums
}

// bytesTo is where a body is written to. The zero value has no sink: the bytes are only looked at,
// for a checksum, a digest or a Peek.
type bytesTo struct {
	Sink
	space  *tier.Space
	buf    *tier.Buffer  // of the sink; copy gives back what a compressed body does not need
	runs   []payload.Run // to fill, if the body is to be compressed
	frame  int64         // bytes of a frame; see payload.Descriptor.Frame
	stored atomic.Int64  // bytes of runs so far; each lane takes room from here
}

// locate returns where the byte at off of the body is stored, for the message of a CorruptError.
// volume is empty if that is not a file. In a compressed body it is the beginning of the frame.
func (s *bytesFrom) locate(off int64) (volume, file string, at int64) {
	m, ok := s.Source.(tier.FileMemory)
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

// unchecked reports whether no byte has to pass through Go code, so that devices may copy by
// themselves.
func (s *bytesFrom) unchecked() bool {
	return !s.verify && s.sums == nil && s.see == nil && len(s.adjust) == 0
}

// checker returns the function that all bytes of a piece pass through, in order, before they go to
// the sink. It adjusts them, then verifies or sums them, then shows them to see. Each piece needs a
// checker of its own, which has the state of a checksum, and must begin where a block of the
// checksums does.
func (s *bytesFrom) checker() func(p []byte, off int64) error {
	sum := image.Summer{Desc: s.desc, Made: s.sums, Locate: s.locate}
	return func(p []byte, off int64) error {
		if len(s.adjust) > 0 {
			s.adjust.Apply(p, off)
		}
		if s.verify || s.sums != nil {
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
// Several lanes move one piece each at a time. The memories and types of the source and the sink
// decide how large a piece is and which memory a lane copies it through:
//
//	source → sink                  a piece is            lanes  it passes through
//	layout → host                  the body              1      nothing (Layout.WriteTo)
//	host → file                    the body              1      nothing; the volume makes the requests
//	file → host                    2 MiB                 8      nothing
//	host → host, or to be seen     8 MiB                 1      nothing
//	host ↔ device                  8 MiB                 4      nothing
//	device → device, unchecked     8 MiB                 4      nothing (copyOnDevices)
//	any other                      a chunk               8      the lane's pinned chunk
//	one is compressed, or both     a run of 1 MiB        8      the lane's block (and its chunk, for a device)
//
// movePiece picks the loop for a piece: plain, storeRun or uncompress. All fields are set before the
// lanes begin, and are only read by them. The sums and runs that lanes write have one element for
// each block or run, so they need no lock.
type copying struct {
	b      *Builtin
	src    *bytesFrom
	dst    *bytesTo
	from   hostMemory // of the source, where Go code can reach it; else nil
	to     hostMemory // of the sink
	piece  int64      // bytes; a multiple of payload.SumChunk if anything is checked
	device bool       // the source or the sink is a device, which blocks cannot be copied to or from
	sample bool       // the first piece is sampled for the choice of a codec

	with codec.Codec // what runs are compressed with; Auto: what Builtin.Choose returns for disk
	disk *codec.Disk // nil unless bytes go to a disk
}

// copy copies the bytes of src to dst. Every copy of a body goes through it. It returns when
// nothing is in progress any more, also on an error or when ctx ends; what dst then has is not
// defined, and the caller releases it.
func (b *Builtin) copy(ctx context.Context, dst *bytesTo, src *bytesFrom) error {
	if src.size == 0 {
		return nil
	}
	from, fromDevice := src.Source.(*deviceMemory)
	to, toDevice := dst.Sink.(*deviceMemory)
	sourceHost, fromHost := src.Source.(hostMemory)
	sinkHost, toHost := dst.Sink.(hostMemory)
	_, fromFile := src.Source.(tier.FileMemory)
	_, toFile := dst.Sink.(tier.FileMemory)
	layout := src.layout
	c := &copying{
		b: b, src: src, dst: dst, from: sourceHost, to: sinkHost, device: fromDevice || toDevice, with: codec.None,
	}
	// First choose the pieces: how long they are, how many are in progress, and whether they pass
	// through pinned chunks. The table at copying has the result of this switch.
	coded, staged, most := src.runs != nil || dst.runs != nil, false, StagedUnderWay
	switch {
	case coded:
		c.piece = payload.RunSize
	case layout != nil && toHost:
		return layout.WriteTo(sinkHost)
	case fromHost && toFile:
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
	// Then the memory of the lanes: near to the device, because the copies to it are the fast ones.
	w := &lanes{b: b, node: -1, blocks: coded}
	for _, s := range [...]*tier.Space{src.space, dst.space} {
		if s != nil && (w.node < 0 || s.Kind().IsDevice()) {
			w.node = s.Node
		}
	}
	// A device copies at full speed only to and from pinned memory, which blocks need not be.
	if staged || coded && c.device {
		chunks, err := b.Staging(w.node)
		if err != nil {
			return err
		}
		if w.chunks = chunks; staged {
			c.piece = chunks.Chunk()
			if layout == nil {
				c.piece = max(payload.SumChunk, c.piece-c.piece%payload.SumChunk)
			}
		}
	}
	// A layout is written in order, from one goroutine at a time. Lanes take turns at it: begin
	// fills a lane's memory under the lock of the lanes, and then the lane stores the piece in
	// parallel to the others.
	var begin func(l *lane, i int) error
	if layout != nil { // its bytes come in order: each piece is in the lane's memory when its move begins
		begin = func(l *lane, i int) error {
			room := l.chunk
			if coded {
				room = l.raw
			}
			off := int64(i) * c.piece
			return layout.Write(room[:min(c.piece, src.size-off)], off)
		}
	}
	// A codec is chosen by measuring how fast each is on a sample. If that is due, the first piece
	// goes alone, so that no other one competes with its sample.
	alone := false
	if toFile {
		var due bool
		c.disk, due = b.Choose.Disk(dst.space.ID())
		alone = due && b.Codec == codec.Auto && src.runs == nil && src.size >= payload.FrameSize
		c.sample = alone && layout == nil // that of a layout is sampled when it is compressed
	}
	if dst.runs != nil && src.runs == nil {
		if c.with = b.Codec; !toFile && (c.with == codec.Auto || c.with == codec.None) {
			c.with = codec.S2 // in memory only the length counts, and time
		}
	}
	var devices []*deviceMemory
	for _, m := range [...]*deviceMemory{from, to} {
		if m != nil {
			devices = append(devices, m)
		}
	}
	// Last, borrow the streams and run the lanes.
	return b.onStreams(ctx, devices, func() error {
		// Two devices that cannot reach each other are copied through pinned chunks.
		if fromDevice && toDevice && src.unchecked() {
			if err := b.copyOnDevices(ctx, to, from); !errors.Is(err, tier.ErrNotSupported) {
				return err
			}
		}
		first, pieces := 0, int((src.size+c.piece-1)/c.piece)
		if alone {
			if err := w.each(ctx, 0, 1, 1, begin, c.movePiece); err != nil {
				return err
			}
			first = 1
		}
		err := w.each(ctx, first, pieces, most, begin, c.movePiece)
		// All runs are stored, so the length of the body is known: give the rest of the buffer
		// back.
		if err == nil && dst.runs != nil && dst.buf != nil {
			dst.buf.Shrink(dst.stored.Load())
		}
		return err
	})
}

// movePiece moves piece i in a lane. Of bytes to or from a disk it measures the speed, for the choice of
// a codec. It returns when the piece is in the sink.
func (c *copying) movePiece(ctx context.Context, l *lane, i int) error {
	if i == 0 && c.sample {
		room := make([]byte, codec.SampleRoom+payload.SumChunk)
		read := func(off, n int64) ([]byte, error) {
			p := room[codec.SampleRoom:][:n]
			return p, c.fetchPiece(ctx, l, p, off)
		}
		size := c.src.size
		if err := c.b.Choose.Sample(&c.b.coders, c.disk, size, size, room[:codec.SampleRoom], read); err != nil {
			return err
		}
	}
	off := int64(i) * c.piece
	n, with := min(c.piece, c.src.size-off), c.with
	var loop func() error
	switch compressed, compresses := c.src.runs != nil, c.dst.runs != nil; {
	case compressed && compresses:
		return c.storeRun(ctx, l, i, off, n, with)
	case compressed:
		with = codec.Codec(c.src.runs[i].Codec)
		loop = func() error { return c.uncompress(ctx, l, &c.src.runs[i], off, n) }
	case compresses:
		if with == codec.Auto {
			with = c.b.Choose.Next(c.disk, payload.RunSize)
		}
		loop = func() error { return c.storeRun(ctx, l, i, off, n, with) }
	case c.src.layout != nil: // the disk also waits for the layout
		return c.plain(ctx, l, off, n)
	default:
		loop = func() error { return c.plain(ctx, l, off, n) }
	}
	// The disk is the target if that is one, or else the source.
	space, writes := c.dst.space, true
	if space == nil || !space.Kind().IsStorage() {
		space, writes = cmp.Or(c.src.space, space), false
	}
	return c.b.Choose.Timed(c.b.Codec, space.ID(), with, writes, n, loop)
}

// plain moves n bytes at off as they are. It copies them as rarely as possible: it works where Go
// code can reach the bytes in the source, or else where they belong in the sink, or else in the
// lane's chunk.
func (c *copying) plain(ctx context.Context, l *lane, off, n int64) error {
	check := c.src.checker()
	for end := off + n; off < end; {
		// View ends with an extent, so a turn of the loop may move less than a chunk.
		p := image.View(c.from, off, end-off)
		fetched, stored := p != nil || c.src.layout != nil, c.dst.Sink == nil
		if p == nil && !stored {
			p = image.View(c.to, off, end-off)
			stored = p != nil
		}
		if p == nil {
			p = l.chunk[:min(end-off, int64(len(l.chunk)))]
		}
		if !fetched {
			if err := c.src.ReadAt(ctx, p, off); err != nil {
				return err
			}
		}
		if err := check(p, off); err != nil {
			return err
		}
		if !stored {
			if err := c.dst.WriteAt(ctx, p, off); err != nil {
				return err
			}
		}
		off += int64(len(p))
	}
	return nil
}

// storeRun compresses the n bytes of run i, a multiple of a page, and stores them in the sink. If
// the source is compressed too, it copies the run as it is stored there: compressing it again with
// another codec would cost more than it gains. It sets the fields of the sink's run.
func (c *copying) storeRun(ctx context.Context, l *lane, i int, off, n int64, with codec.Codec) (err error) {
	run, stored := &c.dst.runs[i], l.stored[:0]
	var p []byte
	if c.src.runs != nil {
		from := &c.src.runs[i]
		same, err := c.src.stored(ctx, from, l.stored)
		if err != nil {
			return err
		}
		run.Codec, run.Frames = from.Codec, from.Frames
		stored = l.stored[:copy(l.stored, same)]
	} else {
		if p = image.View(c.from, off, n); int64(len(p)) < n {
			if p = l.raw[:n]; c.src.layout == nil {
				if err := c.fetchPiece(ctx, l, p, off); err != nil {
					return err
				}
			}
		}
		if err := c.src.checker()(p, off); err != nil {
			return err
		}
		run.Codec, run.Frames = uint8(with), nil
		// Encode appends the frame as it is if it would hardly shrink, so a run never becomes
		// longer. Without a codec nothing is copied: stored is p, which may be the source's own
		// memory.
		for frame := range slices.Chunk(p, int(c.dst.frame)) {
			before := len(stored)
			if with == codec.None {
				stored = p[:before+len(frame)]
			} else if stored, err = c.b.coders.Encode(with, stored, frame); err != nil {
				return err
			}
			run.Frames = append(run.Frames, uint32(len(stored)-before))
		}
	}
	// The checksum is of the stored bytes without the padding. The padding must be zero all the
	// same: the block has old bytes, which would get into the file. If stored is p there is none,
	// because n is whole pages.
	run.Sum = xxh3.Hash(stored)
	length := int64(len(stored))
	stored = stored[:extent.RoundUp(length, tier.Page)]
	clear(stored[length:])
	// The counter gives each lane a place of its own in the buffer, so runs are stored in the order
	// in which lanes are ready.
	run.Offset = c.dst.stored.Add(int64(len(stored))) - int64(len(stored))
	if err := c.dst.WriteAt(ctx, stored, run.Offset); err != nil || c.src.layout == nil || c.with != codec.Auto {
		return err
	}
	return c.b.Choose.Sample(&c.b.coders, c.disk, c.src.size, n, l.stored, func(off, n int64) ([]byte, error) {
		return p[off:][:n], nil
	})
}

// uncompress brings the n bytes of a run, which are at off of the body, to the sink: straight, if
// they are in one piece there, or else through the lane's block. A run that did not shrink is read
// as it is, and compared with the checksums of the body alone, which is as safe and one pass less.
func (c *copying) uncompress(ctx context.Context, l *lane, run *payload.Run, off, n int64) error {
	p := image.View(c.to, off, n)
	placed := int64(len(p)) == n
	if !placed {
		p = l.raw[:n]
	}
	if run.Stored() == n {
		if err := c.src.ReadAt(ctx, p, run.Offset); err != nil {
			return err
		}
	} else {
		stored, err := c.src.stored(ctx, run, l.stored)
		if err != nil {
			return err
		}
		at, f := int64(0), 0
		for frame := range slices.Chunk(p, int(c.src.desc.Frame())) {
			length := int64(run.Frames[f])
			if err := c.b.coders.Decode(codec.Codec(run.Codec), frame, stored[at:at+length]); err != nil {
				return c.src.corrupt(&image.CorruptError{Cause: err}, run, at)
			}
			at += length
			f++
		}
	}
	if err := c.src.checker()(p, off); err != nil || placed || c.dst.Sink == nil {
		return err
	}
	// A device needs pinned memory, so the run goes on through the chunk, part by part.
	if !c.device {
		return c.dst.WriteAt(ctx, p, off)
	}
	for part := range slices.Chunk(p, len(l.chunk)) {
		if err := c.dst.WriteAt(ctx, l.chunk[:copy(l.chunk, part)], off); err != nil {
			return err
		}
		off += int64(len(part))
	}
	return nil
}

// fetchPiece reads len(p) bytes at off of an uncompressed source into p, which need not be pinned: bytes
// of a device go through the lane's chunk.
func (c *copying) fetchPiece(ctx context.Context, l *lane, p []byte, off int64) error {
	if !c.device {
		return c.src.ReadAt(ctx, p, off)
	}
	for part := range slices.Chunk(p, len(l.chunk)) {
		if err := c.src.ReadAt(ctx, l.chunk[:len(part)], off); err != nil {
			return err
		}
		off += int64(copy(part, l.chunk))
	}
	return nil
}

// stored returns the stored bytes of a run, verified. They are where the source has them, or in
// room if Go code cannot reach them there in one piece; they must not be changed.
func (s *bytesFrom) stored(ctx context.Context, run *payload.Run, room []byte) ([]byte, error) {
	n := run.Stored()
	host, _ := s.Source.(hostMemory)
	p := image.View(host, run.Offset, n)
	if int64(len(p)) < n {
		// Whole pages, because a file may be read with direct I/O.
		p = room[:extent.RoundUp(n, tier.Page)]
		if err := s.ReadAt(ctx, p, run.Offset); err != nil {
			return nil, err
		}
		p = p[:n]
	}
	if got := xxh3.Hash(p); got != run.Sum {
		return nil, s.corrupt(&image.CorruptError{Want: run.Sum, Got: got}, run, 0)
	}
	return p, nil
}

// corrupt completes c with where the corrupt bytes are, at off of the run as it is stored.
func (s *bytesFrom) corrupt(c *image.CorruptError, run *payload.Run, off int64) *image.CorruptError {
	c.Offset = run.Offset + off
	if m, ok := s.Source.(tier.FileMemory); ok {
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
