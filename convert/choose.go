package convert

import (
	"context"
	"math"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/tier"
)

// chooser decides what CodecAuto compresses with. What it knows:
//
//   - of each disk how many bytes a second it writes and reads while it is asked to
//     (meter), from all transfers;
//   - of each codec how much shorter it makes what is written these days, and how many
//     bytes a second one processor compresses and uncompresses: from samples of what is
//     written, on which all of them are tried, and which may take a hundredth of the time
//     that the disks are at work (sampleShare). What is compressed in earnest tells nothing
//     of the other codecs, and one column is not like the next: it cannot be compared with.
//
// From that follows how long a byte takes to the disk and back: the disk's part, for as many
// bytes as are left of it, or the processors', whichever is longer, for they work at the same
// time. Half of the processors are counted on, for the program has work of its own. The
// least of that wins, and if not compressing is not worse by more than slack it wins.
//
// Batches are written as they are, without any of this on the way, until compressing
// promises to be better or a sample is due. Within a batch the choice is made for each run, so
// that the first batch already profits from what its first run showed.
//
// The zero value knows nothing. It is safe for concurrent use.
type chooser struct {
	mu    sync.Mutex // guards what follows; nothing is done while it is held
	disks map[tier.ID]*gauges
	of    [codecs]rates

	busy     atomic.Int64 // nanoseconds during which disks were at work
	sampled  atomic.Int64 // nanoseconds that samples took
	sampling atomic.Bool  // one at a time
	samples  int          // frames that were tried; whoever is sampling has it
}

const (
	sampleShare = 100 // samples may take 1/100 of the disks' time
	slack       = 0.97
	// enoughToTell is after how many bytes a disk's rate is believed: of one run.
	enoughToTell = batch.RunSize
	// gaugeMemory is when a gauge forgets half of what it counted: when the disk was at work
	// for so long.
	gaugeMemory = 250 * time.Millisecond
	// A sample is of so many pieces, from all over a body, and what is known is the mean of
	// the last memoryPieces, as it were.
	samplePiece  = batch.SumChunk
	firstPieces  = 16
	laterPieces  = 4
	memoryPieces = 64
)

// rates is what is known of a codec: seconds a byte that goes in, and what is left of it.
type rates struct {
	ratio, encode, decode float64
	known                 bool
}

// gauges are a disk's meters.
type gauges struct{ write, read meter }

// meter measures a rate while something is at work.
type meter struct {
	mu     sync.Mutex
	active int
	last   time.Time
	time   time.Duration
	bytes  float64
}

func (m *meter) begin(now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.active > 0 {
		m.time += now.Sub(m.last)
	}
	m.active++
	m.last = now
}

// end returns for how long nobody else was at work.
func (m *meter) end(now time.Time, bytes int) (took time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	took = now.Sub(m.last)
	m.time += took
	m.active--
	m.last = now
	m.bytes += float64(bytes)
	if m.time > gaugeMemory && m.bytes >= 4*enoughToTell {
		m.time /= 2
		m.bytes /= 2
	}
	return took
}

// perByte returns seconds a byte; 0 if that is not known.
func (m *meter) perByte() float64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.bytes < enoughToTell {
		return 0
	}
	return m.time.Seconds() / m.bytes
}

// disk returns the gauges of a space.
func (c *chooser) disk(id tier.ID) *gauges {
	c.mu.Lock()
	defer c.mu.Unlock()
	g := c.disks[id]
	if g == nil {
		if c.disks == nil {
			c.disks = make(map[tier.ID]*gauges)
		}
		g = new(gauges)
		c.disks[id] = g
	}
	return g
}

// half is how many processors are counted on.
func half() int { return max(1, runtime.GOMAXPROCS(0)/2) }

// best returns the codec for what is written to a disk now.
func (c *chooser) best(g *gauges, processors int) Codec {
	write, read := g.write.perByte(), g.read.perByte()
	if write == 0 {
		return CodecNone
	}
	if read == 0 {
		read = write
	}
	choice, least := CodecNone, slack*(write+read)
	c.mu.Lock()
	defer c.mu.Unlock()
	for k := CodecS2; k < codecs; k++ {
		r := &c.of[k]
		if !r.known {
			continue
		}
		cost := max(r.ratio*write, r.encode/float64(processors)) + max(r.ratio*read, r.decode/float64(processors))
		if cost < least {
			choice, least = k, cost
		}
	}
	return choice
}

// due says whether a sample may be taken.
func (c *chooser) due() bool {
	return !c.sampling.Load() && c.sampled.Load() <= c.busy.Load()/sampleShare
}

// sample tries all codecs on pieces of a body, if that is due, which read reads.
func (c *chooser) sample(k *coders, body int64, read func(off, n int64) ([]byte, error)) error {
	if body < batch.FrameSize || !c.due() || !c.sampling.CompareAndSwap(false, true) {
		return nil
	}
	defer c.sampling.Store(false)
	begin := time.Now()
	defer func() { c.sampled.Add(int64(time.Since(begin))) }()
	n := laterPieces
	if c.samples == 0 {
		n = firstPieces
	}
	for range n {
		c.samples++
		at := math.Mod(float64(c.samples)*(math.Sqrt(5)-1)/2, 1) // evenly, however many there are
		off := min(int64(at*float64(body)), body-samplePiece) / batch.SumChunk * batch.SumChunk
		raw, err := read(off, samplePiece)
		if err != nil {
			return err
		}
		if err := c.try(k, raw); err != nil {
			return err
		}
	}
	return nil
}

// try compresses a piece with each codec, and uncompresses it.
func (c *chooser) try(k *coders, raw []byte) error {
	out, back := make([]byte, 0, 2*len(raw)), make([]byte, len(raw))
	part := len(raw) / 8
	for codec := CodecS2; codec < codecs; codec++ {
		// The first time is not like the others: tables are made, memory is touched.
		stored, err := k.encode(codec, out, raw[:part])
		if err == nil {
			err = k.decode(codec, back[:part], stored)
		}
		if err != nil {
			return err
		}
		watch := start()
		stored, err = k.encode(codec, out, raw)
		encode := watch.stop()
		if err != nil {
			return err
		}
		watch = start()
		err = k.decode(codec, back, stored)
		decode := watch.stop()
		if err != nil {
			return err
		}
		c.learn(codec, rates{
			ratio:  float64(len(stored)) / float64(len(raw)),
			encode: encode.Seconds() / float64(len(raw)),
			decode: decode.Seconds() / float64(len(raw)),
		})
	}
	return nil
}

// learn mixes what a piece showed into what is known.
func (c *chooser) learn(k Codec, piece rates) {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := &c.of[k]
	weight := 1 / float64(min(c.samples, memoryPieces))
	r.ratio += weight * (piece.ratio - r.ratio)
	r.encode += weight * (piece.encode - r.encode)
	r.decode += weight * (piece.decode - r.decode)
	r.known = true
}

// turn is one transfer's view.
type turn struct {
	c     *chooser
	fixed Codec // or CodecAuto
	g     *gauges
}

// begin begins a transfer that packs into a space, or unpacks from one.
func (c *chooser) begin(configured Codec, space *tier.Space) *turn {
	t := &turn{c: c, fixed: configured}
	if space.Kind() == tier.Disk {
		t.g = c.disk(space.ID())
	} else if configured == CodecAuto || configured == CodecNone {
		t.fixed = CodecS2 // in memory only the length counts, and time
	}
	return t
}

// blind says that nothing is known to choose by.
func (t *turn) blind() bool {
	return t.fixed == CodecAuto && t.g.write.perByte() == 0
}

// codec is asked for each run.
func (t *turn) codec() Codec {
	if t.fixed != CodecAuto {
		return t.fixed
	}
	return t.c.best(t.g, half())
}

// form returns what a payload becomes in a space.
func (b *Builtin) form(g *Registry, src batch.Payload, to *tier.Space) batch.PayloadType {
	plain := batch.ImageType(to.Kind())
	from, ok := src.(imaged)
	if !ok || to.Kind() != tier.Disk {
		return plain
	}
	packed := false
	switch {
	case src.Type() == batch.HostPacked || src.Type() == batch.DiskPacked:
		packed = true // it is shorter so, and nothing is left to do
	case src.Type() == batch.DiskImage:
	case b.Codec == CodecAuto:
		// What is shorter than a frame is not worth a thought.
		packed = from.Descriptor().Body >= batch.FrameSize && (b.choose.due() || b.choose.best(b.choose.disk(to.ID()), half()) != CodecNone)
	default:
		packed = b.Codec != CodecNone && from.Descriptor().Body > 0
	}
	if _, err := g.lookup(src.Type(), batch.DiskPacked); !packed || err != nil {
		return plain
	}
	return batch.DiskPacked
}

// metered returns the memory of a disk's space so that what is done with it is timed, if
// anybody wants to know, and as checked returns it.
func (b *Builtin) metered(space *tier.Space, m tier.FileMemory) tier.FileMemory {
	m = checked(m)
	if b.Codec != CodecAuto {
		return m
	}
	return timedFile{FileMemory: m, c: &b.choose, g: b.choose.disk(space.ID())}
}

type timedFile struct {
	tier.FileMemory
	c *chooser
	g *gauges
}

func (f timedFile) WriteAt(ctx context.Context, p []byte, off int64) error {
	f.g.write.begin(time.Now())
	err := f.FileMemory.WriteAt(ctx, p, off)
	f.c.busy.Add(int64(f.g.write.end(time.Now(), len(p))))
	return err
}

func (f timedFile) ReadAt(ctx context.Context, p []byte, off int64) error {
	f.g.read.begin(time.Now())
	err := f.FileMemory.ReadAt(ctx, p, off)
	f.c.busy.Add(int64(f.g.read.end(time.Now(), len(p))))
	return err
}
