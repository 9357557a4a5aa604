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
//     (gauge), from what is moved as it is;
//   - of each codec how much shorter it makes what is written these days, and how many
//     bytes a second one processor compresses and uncompresses: from samples of what is
//     written, on which all of them are tried, and which may take a hundredth of the time
//     that the disks are at work (sampleShare).
//
// From that follows what a byte costs to the disk and back: the disk's time, for as many bytes
// as are left of it, and the processors', of which half are counted on. If compressing promises to
// cost less, by slack, it is tried (trial). What comes of it is measured as well, and if that is
// not less than what moving bytes as they are cost shortly before, it is over, and is tried again only after
// twice as many bytes: a program that keeps all processors busy makes a disk look slow,
// because whoever waits for it waits for a processor next, and compressing takes them
// from it. Where it is kept to, some bytes are moved as they are now and then, to see
// what that costs by now.
//
// Batches are written as they are, without any of this on the way, until compressing
// is tried or a sample is due. Within a batch the choice is made for each run, so
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
	lookShare   = 100 // and so much may it take to move bytes as they are where compressing is better
	slack       = 0.9 // what compressing costs must be less than this share of not compressing
	// enoughToTell is after how many bytes a disk's rate is believed: of one run.
	enoughToTell = batch.RunSize
	// meterWindow is how many bytes a window of a meter has: as many as are under way at a
	// time.
	meterWindow = 8 << 20
	// handling is how many seconds a byte takes to be copied and summed once more, there and
	// back, than one that is moved as it is.
	handling = 0.2e-9
	// A sample is of so many pieces, from all over a body, and what is known is the mean of
	// the last memoryPieces, as it were.
	samplePiece  = batch.SumChunk
	firstPieces  = 8
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

// gauges are what is known of a disk: what a byte costs to be written and read, with
// each codec, and what is tried now.
type gauges struct {
	write, read [codecs]meter

	mu    sync.Mutex
	trial trial
}

// trial is what a disk's bytes are compressed with at present.
type trial struct {
	codec    Codec // CodecAuto, the zero value: nothing was tried yet
	moved    int64 // bytes since that was decided
	patience int64 // bytes as they are before something is tried
	next     int64 // what patience becomes if that fails
}

const (
	leastPatience = 32 << 20
	mostPatience  = 1 << 30
)

// meter measures a rate while something is at work, as the mean of the last windows.
type meter struct {
	mu      sync.Mutex
	active  int
	last    time.Time
	time    time.Duration // of the window that is not full yet
	bytes   int64
	windows [4]float64 // seconds a byte; 0: none yet
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

// failed drops the window that is not full yet: how many bytes of something that failed were
// moved is not known.
func (m *meter) failed() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.time, m.bytes = 0, 0
}

// perByte returns seconds a byte; 0 if that is not known.
func (m *meter) perByte() float64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	sum, n := 0.0, 0.0
	for _, w := range m.windows {
		if w > 0 {
			sum, n = sum+w, n+1
		}
	}
	if n == 0 && m.bytes >= enoughToTell {
		return m.time.Seconds() / float64(m.bytes)
	}
	return sum / max(n, 1)
}

// forget forgets all but what is under way.
func (m *meter) forget() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.time, m.bytes, m.next = 0, 0, 0
	clear(m.windows[:])
}

// full says whether it has measured a whole window.
func (m *meter) full() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.windows[0] > 0
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

// plain returns what a byte costs as it is, to the disk and back; 0 if that is not known.
func (g *gauges) plain() (write, read float64) {
	write, read = g.write[CodecNone].perByte(), g.read[CodecNone].perByte()
	if read == 0 {
		read = write
	}
	return write, read
}

// promises returns the codec that promises most for a disk, and what a byte costs with it.
func (c *chooser) promises(write, read float64, processors int) (Codec, float64) {
	choice, least := CodecNone, write+read
	c.mu.Lock()
	defer c.mu.Unlock()
	for k := CodecS2; k < codecs; k++ {
		r := &c.of[k]
		if !r.known {
			continue
		}
		if cost := r.ratio*(write+read) + r.work(processors); cost < least {
			choice, least = k, cost
		}
	}
	return choice, least
}

// best returns the codec for the next bytes that are written to a disk.
func (c *chooser) best(g *gauges, bytes int64, processors int) Codec {
	write, read := g.plain()
	if write == 0 {
		return CodecNone
	}
	promised, cost := c.promises(write, read, processors)
	g.mu.Lock()
	defer g.mu.Unlock()
	t := &g.trial
	t.moved += bytes
	switch {
	case t.codec == CodecAuto || t.codec == CodecNone:
		t.codec = CodecNone
		if cost < slack*(write+read) && t.moved >= t.patience {
			*t = trial{codec: promised, next: max(t.next, leastPatience)}
			g.write[promised].forget()
		}
	case g.write[t.codec].full():
		came := c.outcome(g, t.codec, read, processors)
		if came >= slack*(write+read) {
			*t = trial{codec: CodecNone, patience: t.next, next: min(2*t.next, mostPatience)}
		} else if float64(t.moved)*came >= lookShare*meterWindow*(write+read-came) { // it is better; to see if it still is
			*t = trial{codec: CodecNone, patience: meterWindow, next: leastPatience}
		}
	}
	return t.codec
}

// outcome returns what a byte came to with a codec, to the disk and, as far as that is known,
// back; and what it took of the processors, which the program did not have meanwhile.
func (c *chooser) outcome(g *gauges, k Codec, read float64, processors int) float64 {
	c.mu.Lock()
	r := c.of[k]
	c.mu.Unlock()
	back := g.read[k].perByte()
	if back == 0 {
		back = r.ratio * read
	}
	return g.write[k].perByte() + back + r.work(processors)
}

// work returns what a byte takes of the processors, there and back.
func (r *rates) work(processors int) float64 {
	return (r.encode + r.decode + handling) / float64(processors)
}

// due says whether a sample may be taken: at once where a disk is so slow that compressing
// may well be better; on another only when it is nothing beside what was moved.
func (c *chooser) due(g *gauges) bool {
	write, read := g.plain()
	if c.sampling.Load() || write == 0 {
		return false
	}
	taken, allowed := c.sampled.Load(), c.busy.Load()/sampleShare
	if c.samples.Load() >= firstPieces {
		return taken <= allowed
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
	if t.fixed != CodecAuto {
		return false
	}
	write, _ := t.g.plain()
	return write == 0
}

// codec is asked for each run.
func (t *turn) codec() Codec {
	if t.fixed != CodecAuto {
		return t.fixed
	}
	return t.c.best(t.g, batch.RunSize, half())
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
	if body < batch.FrameSize { // not worth a thought
		return false
	}
	write, _ := g.plain()
	return write == 0 || b.choose.due(g) || b.choose.best(g, body, half()) != CodecNone
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
	return f.c.measured(&f.g.write[CodecNone], len(p), func() error { return f.FileMemory.WriteAt(ctx, p, off) })
}

func (f timedFile) ReadAt(ctx context.Context, p []byte, off int64) error {
	return f.c.measured(&f.g.read[CodecNone], len(p), func() error { return f.FileMemory.ReadAt(ctx, p, off) })
}

// timed runs f, which moves so many bytes of a body from or to a disk with a codec.
func (b *Builtin) timed(space *tier.Space, k Codec, writes bool, bytes int64, f func() error) error {
	if b.Codec != CodecAuto || space.Kind() != tier.Disk || k >= codecs {
		return f()
	}
	g := b.choose.disk(space.ID())
	m := &g.read[k]
	if writes {
		m = &g.write[k]
	}
	return b.choose.measured(m, int(bytes), f)
}

// measured runs f, which moves so many bytes unless it fails or panics. A cancelled move of
// much memory must not make a slow disk look fast.
func (c *chooser) measured(m *meter, bytes int, f func() error) (err error) {
	whole := false
	m.begin(time.Now())
	defer func() {
		if !whole {
			bytes = 0
		}
		c.busy.Add(int64(m.end(time.Now(), bytes)))
		if !whole {
			m.failed()
		}
	}()
	err = f()
	whole = err == nil
	return err
}
