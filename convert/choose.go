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
// From that follows what a byte costs to the disk and back: the disk's time, for as many bytes
// as are left of it, and the processors', of which half are counted on. The two are added,
// although they work at the same time: the program has work for the processors, too. The
// least cost wins, and not compressing wins if it is not worse by more than slack.
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
	samples  atomic.Int64 // pieces that were tried; whoever is sampling counts
}

const (
	sampleShare = 100 // samples may take 1/100 of the disks' time
	slack       = 0.97
	// enoughToTell is after how many bytes a disk's rate is believed: of one run.
	enoughToTell = batch.RunSize
	// meterWindow is how many bytes a window of a meter has: as many as are under way at a
	// time.
	meterWindow = 8 << 20
	// A sample is of so many pieces, from all over a body, and what is known is the mean of
	// the last memoryPieces, as it were.
	samplePiece  = batch.SumChunk
	firstPieces  = 16
	laterPieces  = 4
	memoryPieces = 64
	// firstSample is about how long the first sample takes, and quickCoding how many seconds
	// a byte takes to be compressed and uncompressed by one processor, if that goes well: by S2 at 2 GB/s and
	// 4 GB/s, say, or a little worse.
	firstSample = 10 * time.Millisecond
	quickCoding = 1e-9
)

// rates is what is known of a codec: seconds a byte that goes in, and what is left of it.
type rates struct {
	ratio, encode, decode float64
	known                 bool
}

// gauges are a disk's meters.
type gauges struct{ write, read meter }

// meter measures a rate while something is at work: window by window, of which the best of the
// last counts. A program that keeps all processors busy makes a disk look slow, because whoever waits for
// it waits for a processor next; but not all the time. Were that taken for the disk,
// compressing would look better the more it is in the way.
type meter struct {
	mu      sync.Mutex
	active  int
	last    time.Time
	time    time.Duration // of the window that is not full yet
	bytes   int64
	windows [16]float64 // seconds a byte; 0: none yet
	next    int
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
	if m.bytes += int64(bytes); m.bytes >= meterWindow {
		m.windows[m.next%len(m.windows)] = m.time.Seconds() / float64(m.bytes)
		m.next++
		m.time, m.bytes = 0, 0
	}
	return took
}

// perByte returns seconds a byte; 0 if that is not known.
func (m *meter) perByte() (best float64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, w := range m.windows {
		if w > 0 && (best == 0 || w < best) {
			best = w
		}
	}
	if best == 0 && m.bytes >= enoughToTell {
		best = m.time.Seconds() / float64(m.bytes)
	}
	return best
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

// half says how many processors are counted on.
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
		cost := r.ratio*(write+read) + (r.encode+r.decode)/float64(processors)
		if cost < least {
			choice, least = k, cost
		}
	}
	return choice
}

// due says whether a sample may be taken: at once where a disk is so slow that compressing
// may well be better; on another only when it is nothing beside what was moved.
func (c *chooser) due(g *gauges) bool {
	write, read := g.write.perByte(), g.read.perByte()
	if c.sampling.Load() || write == 0 {
		return false
	}
	taken, allowed := c.sampled.Load(), c.busy.Load()/sampleShare
	if c.samples.Load() >= firstPieces {
		return taken <= allowed
	}
	if read == 0 {
		read = write
	}
	return write+read > quickCoding/float64(half()) || int64(firstSample) <= allowed
}

// sample tries all codecs on pieces of a body, if that is due, which read reads.
func (c *chooser) sample(k *coders, g *gauges, body int64, read func(off, n int64) ([]byte, error)) error {
	if body < batch.FrameSize || !c.due(g) || !c.sampling.CompareAndSwap(false, true) {
		return nil
	}
	defer c.sampling.Store(false)
	begin := time.Now()
	defer func() { c.sampled.Add(int64(time.Since(begin))) }()
	for range max(laterPieces, firstPieces-c.samples.Load()) {
		raw, err := read(c.place(body), samplePiece)
		if err != nil {
			return err
		}
		if err := c.try(k, raw); err != nil {
			return err
		}
	}
	return nil
}

// place says where the next piece of a body is taken from: evenly from everywhere, however
// many pieces there are.
func (c *chooser) place(body int64) int64 {
	at := math.Mod(float64(c.samples.Add(1))*(math.Sqrt(5)-1)/2, 1)
	return min(int64(at*float64(body)), body-samplePiece) / batch.SumChunk * batch.SumChunk
}

// sampleRun is sample for a body that comes by once, of which there is one run: it takes one
// piece of it.
func (c *chooser) sampleRun(k *coders, g *gauges, raw []byte) error {
	if len(raw) < samplePiece || !c.due(g) || !c.sampling.CompareAndSwap(false, true) {
		return nil
	}
	defer c.sampling.Store(false)
	begin := time.Now()
	defer func() { c.sampled.Add(int64(time.Since(begin))) }()
	at := c.place(int64(len(raw)))
	return c.try(k, raw[at:at+samplePiece])
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
	weight := 1 / float64(min(c.samples.Load(), memoryPieces))
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
	default:
		packed = b.packs(from.Descriptor().Body, to)
	}
	if _, err := g.lookup(src.Type(), batch.DiskPacked); !packed || err != nil {
		return plain
	}
	return batch.DiskPacked
}

// packs says whether a body is compressed when it comes to a space, or at least looked at.
func (b *Builtin) packs(body int64, to *tier.Space) bool {
	switch {
	case to.Kind() != tier.Disk || body == 0 || b.Codec == CodecNone:
		return false
	case b.Codec != CodecAuto:
		return true
	}
	g := b.choose.disk(to.ID())
	return body >= batch.FrameSize && // what is shorter is not worth a thought
		(g.write.perByte() == 0 || b.choose.due(g) || b.choose.best(g, half()) != CodecNone)
}

// metered returns the memory of a disk's space so that what is done with it is timed, if
// anybody wants to know.
func (b *Builtin) metered(space *tier.Space, m tier.FileMemory) tier.FileMemory {
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
