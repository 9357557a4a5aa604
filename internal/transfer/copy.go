package transfer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/codec"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/pump"
	"github.com/spillway-db/spillway/tier"
)

const (
	// MaxPiece is the most that one asynchronous copy carries: a cancelled move
	// ends within one piece.
	MaxPiece = 8 << 20
	// copiesUnderWay is how many device copies a move keeps queued at most. Measured from the
	// simulated GPU to host memory, 64 MiB: two are a tenth slower than four, eight are a hundredth
	// faster. More than two are worth it while a copy takes at most quickCopy: one that is fast would
	// be held up by waking the goroutine that feeds it.
	copiesUnderWay = 8
	quickCopy      = 5 * time.Millisecond
	// StagedUnderWay is how many staged chunks, or runs, a transfer keeps under way: the number of
	// requests at which the disks that were measured reach their speed.
	StagedUnderWay = 8
	// ReadsAhead is how many pieces of MaxPiece a transfer from disk to host memory has under
	// way, in requests of hostRead, as volumes have them by default.
	ReadsAhead = 2
	hostRead   = 2 << 20
)

// Staging is a pool of equal pinned chunks.
type Staging interface {
	Borrow(ctx context.Context) ([]byte, error)
	TryBorrow() ([]byte, bool) // neither waits nor passes waiters
	Return([]byte)
	Chunk() int64
}

// bytesFrom is a body to read.
type bytesFrom struct {
	Source                     // of the bytes as they are stored
	space  *tier.Space         // nil for a layout
	desc   *batch.Descriptor   // nil for buffers of a scattered image that stay as they are
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
	runs   []payload.Run // to fill, if the body is to be compressed
	frame  int64         // bytes of a frame; see payload.Descriptor.Frame
	stored atomic.Int64  // bytes of runs so far; each lane takes room from here
}

// locate returns where the byte at off of the body is stored; the volume is empty where that is not a
// file.
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
// It goes in pieces, of which several lanes move one each. A piece is fetched straight to its place,
// or stored straight from it, where one of the two is host memory. Otherwise it passes through the
// lane's pinned chunk, or through its block where runs are compressed or uncompressed.
type copying struct {
	b      *Builtin
	src    *bytesFrom
	dst    *bytesTo
	piece  int64       // bytes; a multiple of payload.SumChunk if anything is checked
	coded  bool        // the source or the sink is compressed: a piece is a run
	device bool        // the source or the sink is a device
	layout bool        // the source is
	turn   *codec.Turn // chooses how runs are compressed; nil if none are
	lanes  *lanes      // nil if pieces need no memory of a lane
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
		b: b, src: src, dst: dst, coded: src.runs != nil || dst.runs != nil,
		device: fromDevice || toDevice, layout: fromLayout,
	}
	var devices []*deviceMemory
	for _, d := range []*deviceMemory{from, to} {
		if d != nil {
			devices = append(devices, d)
		}
	}
	job := pump.Job[*lane]{Lanes: StagedUnderWay}
	staged := false
	switch {
	case c.coded:
		c.piece = payload.RunSize
		if src.runs == nil {
			c.turn = b.Choose.Begin(b.Codec, dst.space.ID())
		}
	case fromLayout && toHost:
		return layout.WriteTo(host)
	case fromHost && toFile: // the volume has several requests under way
		c.piece, job.Lanes = src.size, 1
	case fromFile && toHost:
		c.piece, job.Lanes = hostRead, ReadsAhead*MaxPiece/hostRead
	case fromHost && !toDevice:
		c.piece, job.Lanes = MaxPiece, 1
	case fromHost || toHost:
		c.piece, job.Lanes, job.Quick = MaxPiece, copiesUnderWay, quickCopy
	default:
		staged = true
	}
	node := nodeOf(src.space, dst.space)
	if c.coded || staged {
		chunks, err := b.Staging(node)
		if err != nil {
			return err
		}
		c.lanes = &lanes{b: b, chunks: chunks, node: node, blocks: c.coded}
		job.Pool = c.lanes
		if staged {
			c.piece = chunks.Chunk()
			if !fromLayout {
				c.piece = max(payload.SumChunk, c.piece-c.piece%payload.SumChunk)
			}
		}
	}
	move := func(first, pieces int) error {
		job := job
		job.Pieces = pieces
		job.Do = func(ctx context.Context, l *lane, i int) error { return c.move(ctx, l, first+i) }
		if fromLayout { // its bytes come in order
			job.Begin = func(l *lane, i int) error {
				off := int64(first+i) * c.piece
				p, err := c.room(ctx, l, min(c.piece, src.size-off))
				if err == nil {
					_, err = layout.Fetch(ctx, p, off)
				}
				return err
			}
		}
		return run(ctx, job)
	}
	return b.onStreams(ctx, devices, func() error {
		if fromDevice && toDevice && src.checker() == nil {
			if err := copyOnDevices(ctx, to, from); !errors.Is(err, tier.ErrNotSupported) {
				return err
			}
		}
		if toFile && src.runs == nil && !fromLayout {
			if err := c.sample(ctx, node); err != nil {
				return err
			}
		}
		first, pieces := 0, int((src.size+c.piece-1)/c.piece)
		if c.turn != nil && c.turn.Blind() {
			// Nothing is known to choose the codec by: one run goes first, to show what the disk is like.
			if err := move(0, 1); err != nil {
				return err
			}
			first = 1
		}
		return move(first, pieces-first)
	})
}

// nodeOf returns the NUMA node whose memory a transfer passes through: that of the device, or of the
// first space that has one.
func nodeOf(spaces ...*tier.Space) int {
	node := -1
	for _, s := range spaces {
		if s != nil && (node < 0 || s.Kind() == tier.GPU) {
			node = s.Node()
		}
	}
	return node
}

// sample takes a sample of a body that comes to a disk, if one is due.
func (c *copying) sample(ctx context.Context, node int) error {
	b, disk := c.b, c.b.Choose.Disk(c.dst.space.ID())
	if b.Codec != codec.Auto || c.src.size < payload.FrameSize || !b.Choose.Due(disk) {
		return nil
	}
	chunks, err := b.Staging(node)
	if err != nil {
		return err
	}
	pool := &lanes{b: b, chunks: chunks, node: node, blocks: true}
	s := &copying{b: b, src: c.src, dst: new(bytesTo), coded: true, device: c.device, lanes: pool}
	return run(ctx, pump.Job[*lane]{Pieces: 1, Lanes: 1, Pool: pool, Do: func(ctx context.Context, l *lane, _ int) error {
		return b.Choose.Sample(&b.coders, disk, c.src.size, l.block.stored, func(off, n int64) ([]byte, error) {
			p, _, err := s.fetch(ctx, l, 0, off, n)
			return p, err
		})
	}})
}

// move moves a piece, and measures the speed of a disk.
func (c *copying) move(ctx context.Context, l *lane, i int) error {
	off := int64(i) * c.piece
	n := min(c.piece, c.src.size-off)
	move := func(with codec.Codec) error {
		check := c.src.checker()
		for n > 0 {
			p, placed, err := c.fetch(ctx, l, i, off, n)
			if err == nil && check != nil {
				err = check(p, off)
			}
			if err == nil && !placed && c.dst.Sink != nil {
				err = c.store(ctx, l, i, p, off, with)
			}
			if err != nil {
				return err
			}
			off, n = off+int64(len(p)), n-int64(len(p))
		}
		return nil
	}
	with := codec.None
	switch {
	case c.src.runs != nil && c.dst.runs != nil:
		return c.copyRun(ctx, l, &c.src.runs[i], &c.dst.runs[i])
	case c.layout && !c.coded: // the disk also waits for the layout
		return move(with)
	case c.turn != nil:
		with = c.turn.Codec()
	case c.src.runs != nil:
		with = codec.Codec(c.src.runs[i].Codec)
	}
	space, writes := c.dst.space, true
	if space == nil || space.Kind() != tier.Disk {
		space, writes = cmp.Or(c.src.space, space), false
	}
	return c.b.Choose.Timed(c.b.Codec, space.ID(), with, writes, n, func() error { return move(with) })
}

// room returns memory of a lane for n bytes, or for fewer.
func (c *copying) room(ctx context.Context, l *lane, n int64) ([]byte, error) {
	if c.coded {
		return l.block.raw[:n], nil
	}
	chunk, err := c.lanes.pinned(ctx, l)
	return chunk[:min(n, int64(len(chunk)))], err
}

// fetch returns the n bytes at off, or fewer, in host memory; those of a run together. placed is
// whether they are where the sink wants them.
func (c *copying) fetch(ctx context.Context, l *lane, i int, off, n int64) (p []byte, placed bool, err error) {
	fits := func(p []byte) bool { return int64(len(p)) == n || len(p) > 0 && !c.coded }
	if c.src.runs == nil {
		if p = c.src.View(off, n); fits(p) {
			return p, false, nil
		}
	}
	if c.dst.Sink != nil && c.dst.runs == nil {
		p = c.dst.View(off, n)
		placed = fits(p)
	}
	if !placed {
		if p, err = c.room(ctx, l, n); err != nil {
			return nil, false, err
		}
	}
	switch {
	case c.layout: // it is there: see copy
	case c.src.runs != nil:
		err = c.b.uncompress(ctx, c.src, l.block, i, p)
	case c.coded && c.device: // a block is not pinned
		for done := 0; done < len(p) && err == nil; {
			var chunk []byte
			if chunk, err = c.lanes.pinned(ctx, l); err == nil {
				chunk = chunk[:min(len(chunk), len(p)-done)]
				err = fetch(ctx, c.src, chunk, off+int64(done))
				done += copy(p[done:], chunk)
			}
		}
	default:
		err = fetch(ctx, c.src, p, off)
	}
	return p, placed, err
}

// fetch brings bytes to p, and returns when they are there.
func fetch(ctx context.Context, src Source, p []byte, off int64) error {
	wait, err := src.Fetch(ctx, p, off)
	if err != nil || wait == nil {
		return err
	}
	return wait()
}

// store brings bytes in host memory to the sink.
func (c *copying) store(ctx context.Context, l *lane, i int, p []byte, off int64, with codec.Codec) error {
	switch {
	case c.dst.runs != nil:
		return c.compress(ctx, l.block, &c.dst.runs[i], p, with)
	case c.coded && c.device: // a block is not pinned
		chunk, err := c.lanes.pinned(ctx, l)
		if err != nil {
			return err
		}
		for part := range slices.Chunk(p, len(chunk)) {
			if err := c.dst.Store(ctx, chunk[:copy(chunk, part)], off); err != nil {
				return err
			}
			off += int64(len(part))
		}
		return nil
	}
	return c.dst.Store(ctx, p, off)
}

// compress makes a run of p, whose length is a multiple of a page, and stores it.
func (c *copying) compress(
	ctx context.Context, block *block, run *payload.Run, p []byte, with codec.Codec,
) (err error) {
	run.Codec, run.Frames = uint8(with), nil
	stored := block.stored[:0]
	for frame := range slices.Chunk(p, int(c.dst.frame)) {
		before := len(stored)
		if with == codec.None {
			stored = p[:before+len(frame)]
		} else if stored, err = c.b.coders.Encode(with, stored, frame); err != nil {
			return err
		}
		run.Frames = append(run.Frames, uint32(len(stored)-before))
	}
	if err := c.storeRun(ctx, run, stored); err != nil || !c.layout || c.turn.Fixed != codec.Auto {
		return err
	}
	return c.b.Choose.Sample(&c.b.coders, c.turn.Disk, int64(len(p)), block.stored, func(off, n int64) ([]byte, error) {
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

// copyRun copies a run as it is stored.
func (c *copying) copyRun(ctx context.Context, l *lane, from, to *payload.Run) error {
	stored, err := stored(ctx, c.src, from, l.block.stored)
	if err != nil {
		return err
	}
	to.Codec, to.Frames = from.Codec, from.Frames
	return c.storeRun(ctx, to, l.block.stored[:copy(l.block.stored, stored)])
}

// stored returns a run's bytes, verified: where they are, or in room.
func stored(ctx context.Context, src *bytesFrom, run *payload.Run, room []byte) ([]byte, error) {
	n := run.Stored()
	p := src.View(run.Offset, n)
	if int64(len(p)) < n {
		p = room[:image.RoundUp(n, tier.Page)]
		if err := fetch(ctx, src, p, run.Offset); err != nil {
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

// uncompress brings run i to p. A run that nothing was gained by compressing is read straight to p, and
// compared with the checksums of the body alone.
func (b *Builtin) uncompress(ctx context.Context, src *bytesFrom, block *block, i int, p []byte) error {
	run := &src.runs[i]
	if run.Stored() == int64(len(p)) {
		return fetch(ctx, src, p, run.Offset)
	}
	stored, err := stored(ctx, src, run, block.stored)
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

// corrupt adds where the corrupt bytes lie, at off of a run.
func (s *bytesFrom) corrupt(c *image.CorruptError, run *payload.Run, off int64) *image.CorruptError {
	c.Offset = run.Offset + off
	if m, ok := s.Source.(fileMemory); ok {
		volume, file, at := m.Locate(c.Offset)
		c.Volume, c.Offset = volume+" "+file, at
	}
	return c
}

// run runs a job. A panic of its functions is an error that concerns the batch alone, as in safely.
// A panic of a file system, which is an error already, may concern others.
func run[R any](ctx context.Context, j pump.Job[R]) error {
	err := j.Run(ctx)
	if p, ok := err.(*guard.PanicError); ok && p.What == pump.Panicked {
		return panicked(p.Value)
	}
	return err
}

// safely makes a panic of a device or a layout an error, so that what is under way
// is waited for and what was taken is given back.
func safely(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = panicked(p)
		}
	}()
	return f()
}

// panicked makes a panic an error, except for a broken lock order, which an
// invariants build must not hide.
func panicked(p any) error {
	if v, ok := p.(lockrank.Violation); ok {
		panic(v)
	}
	return &batch.UnmovableError{Err: fmt.Errorf("convert: a transfer panicked: %v", p)}
}
