package codec

import (
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/tier"
)

// Chooser decides what CodecAuto compresses with. What it knows:
//
//   - of each disk how many bytes a second it writes and reads while it is busy (gauge), from
//     what is moved as it is;
//   - of each codec how much shorter it makes recent writes, and how many bytes a second one
//     processor compresses and uncompresses. The source is samples of what is written. Codecs that
//     could be quick enough for the disk are tried on them, in at most a hundredth of the time that
//     the disks are at work (sampleShare);
//   - how much of the processors the program has at work beside that (usage).
//
// From that follows what a byte costs to the disk and back. It is the time of the disk for the
// bytes that are left, or of the processors, whichever is longer, because they work at the same
// time. The processor time that the program lacks meanwhile is added, as far as it has use for it.
// If compressing promises to cost less, by slack, it is tried (trial). The result is measured as
// well. If it is not less than the cost of moving bytes as they are shortly before, the trial is
// over. The next comes only after twice as many bytes. A program that keeps all processors busy
// makes a disk look slow: a goroutine that waits for the disk waits for a processor next, and
// compressing takes those. Where compressing is kept, some bytes are moved as they are now and
// then, to measure that cost again.
//
// Batches are written as they are, without any of this on the way, until compressing
// is tried or a sample is due. Within a batch the choice is made for each run, so
// that the first batch already profits from what its first run showed.
//
// The zero value knows nothing. It is safe for concurrent use.
type Chooser struct {
	// Chosen is called, with no lock held, when what goes to a disk is compressed with another codec
	// from now on. cost is what a byte is expected to cost there and back, as a share of what it
	// costs as it is. Set it before the first call; nil: nobody is told.
	Chosen func(disk tier.ID, k Codec, cost float64)

	mu    sync.Mutex // guards what follows; nothing is done while it is held
	disks map[tier.ID]*gauges
	of    [codecs]rates

	usage    usage
	busy     atomic.Int64 // nanoseconds during which disks were at work
	sampled  atomic.Int64 // nanoseconds that samples took
	sampling atomic.Bool  // one at a time
	samples  atomic.Int64 // pieces that were tried; the sampling goroutine counts
}

const (
	sampleShare = 100 // samples may take 1/100 of the disks' time
	lookShare   = 100 // and so much may it take to move bytes as they are where compressing is better
	slack       = 0.9 // what compressing costs must be less than this share of not compressing
	// enoughToTell is after how many bytes a disk's rate is believed: of one run.
	enoughToTell = payload.RunSize
	// meterWindow is how many bytes a window of a meter has: as many as are under way at a
	// time.
	meterWindow = 8 << 20
	// handling is how many seconds a byte takes to be copied and summed once more, there and
	// back, than one that is moved as it is.
	handling = 0.2e-9
	// A sample is of so many pieces, from all over a body, and what is known is the mean of
	// the last memoryPieces, as it were.
	samplePiece  = payload.SumChunk
	firstPieces  = 8
	laterPieces  = 4
	memoryPieces = 64
)

// quick is how many seconds a byte takes to be compressed and uncompressed by one processor, if
// all goes well. For a disk to which and back it takes less no more need be known of a codec.
var quick = [codecs]float64{S2: 0.7e-9, Zstd: 2.5e-9, Bitpack: 0.1e-9}

// rates is what is known of a codec: seconds a byte that goes in, and what is left of it.
type rates struct {
	ratio, encode, decode float64
	pieces                int64 // that this is known from; 0: it is not known
}

// gauges are what is known of a disk: what a byte costs to be written and read, with
// each codec, and what is tried now.
type gauges struct {
	disk tier.ID

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

// Disk returns the gauges of a space.
func (c *Chooser) Disk(id tier.ID) *gauges {
	c.mu.Lock()
	defer c.mu.Unlock()
	g := c.disks[id]
	if g == nil {
		if c.disks == nil {
			c.disks = make(map[tier.ID]*gauges)
		}
		g = &gauges{disk: id}
		c.disks[id] = g
	}
	return g
}

// power is what there is of processors: how many, and for which share of them the program has
// other use.
type power struct{ processors, busy float64 }

// power returns what there is now.
func (c *Chooser) power() power {
	n := float64(runtime.GOMAXPROCS(0))
	return power{processors: n, busy: c.usage.share(n)}
}

// spent returns what a byte costs that the processors work for so many seconds on: a
// program that keeps all of them at work has half of them for as long.
func (w power) spent(work float64) float64 { return w.busy * work / max(1, w.processors/2) }

// plain returns what a byte costs as it is, to the disk and back; 0 if that is not known.
func (g *gauges) plain() (write, read float64) {
	write, read = g.write[None].perByte(), g.read[None].perByte()
	if read == 0 {
		read = write
	}
	return write, read
}

// promises returns the codec that promises most for a disk, and what a byte costs with it.
func (c *Chooser) promises(write, read float64, w power) (Codec, float64) {
	choice, least := None, write+read
	c.mu.Lock()
	defer c.mu.Unlock()
	for k := S2; k < codecs; k++ {
		r := &c.of[k]
		if r.pieces == 0 {
			continue
		}
		there := max(r.ratio*write, (r.encode+handling/2)/w.processors)
		back := max(r.ratio*read, (r.decode+handling/2)/w.processors)
		if cost := there + back + w.spent(r.work()); cost < least {
			choice, least = k, cost
		}
	}
	return choice, least
}

// best returns the codec for the next bytes that are written to a disk.
func (c *Chooser) best(g *gauges, bytes int64, w power) Codec {
	write, read := g.plain()
	if write == 0 {
		return None
	}
	promised, cost := c.promises(write, read, w)
	was, now, cost := c.decide(g, bytes, w, promised, cost)
	if was != now && !(was == Auto && now == None) && c.Chosen != nil {
		c.Chosen(g.disk, now, cost/(write+read))
	}
	return now
}

// decide returns what a disk's bytes were compressed with, what the next ones are, and what a byte
// is expected to cost with that.
func (c *Chooser) decide(g *gauges, bytes int64, w power, promised Codec, cost float64) (was, now Codec, costs float64) {
	write, read := g.plain()
	g.mu.Lock()
	defer g.mu.Unlock()
	t := &g.trial
	was = t.codec
	t.moved += bytes
	switch {
	case t.codec == Auto || t.codec == None:
		t.codec = None
		if cost < slack*(write+read) && t.moved >= t.patience {
			*t = trial{codec: promised, next: max(t.next, leastPatience)}
			g.write[promised].restart()
			g.read[promised].restart()
		}
	case g.write[t.codec].full():
		came := c.outcome(g, t.codec, read, w)
		if came >= slack*(write+read) {
			*t = trial{codec: None, patience: t.next, next: min(2*t.next, mostPatience)}
		} else if float64(t.moved)*came >= lookShare*meterWindow*(write+read-came) { // it is better; to see if it still is
			*t = trial{codec: None, patience: meterWindow, next: leastPatience}
		}
	}
	if t.codec == None {
		cost = write + read
	}
	return was, t.codec, cost
}

// outcome returns what a byte came to with a codec, to the disk and, as far as that is known,
// back; and what it took of the processors, which the program did not have meanwhile.
func (c *Chooser) outcome(g *gauges, k Codec, read float64, w power) float64 {
	c.mu.Lock()
	r := c.of[k]
	c.mu.Unlock()
	back := g.read[k].perByte()
	if back == 0 {
		back = max(r.ratio*read, (r.decode+handling/2)/w.processors)
	}
	return g.write[k].perByte() + back + w.spent(r.work())
}

// work returns what a byte takes of the processors, there and back, in seconds.
func (r *rates) work() float64 { return r.encode + r.decode + handling }

// turn is one transfer's view.
type turn struct {
	c     *Chooser
	Fixed Codec // or CodecAuto
	G     *gauges
}

// Begin begins a transfer that packs into a space, or unpacks from one.
func (c *Chooser) Begin(configured Codec, space tier.ID) *turn {
	t := &turn{c: c, Fixed: configured}
	if space.Kind == tier.Disk {
		t.G = c.Disk(space)
	} else if configured == Auto || configured == None {
		t.Fixed = S2 // in memory only the length counts, and time
	}
	return t
}

// Blind says that nothing is known to choose by.
func (t *turn) Blind() bool {
	if t.Fixed != Auto {
		return false
	}
	write, _ := t.G.plain()
	return write == 0
}

// Codec is called for each run.
func (t *turn) Codec() Codec {
	if t.Fixed != Auto {
		return t.Fixed
	}
	return t.c.best(t.G, payload.RunSize, t.c.power())
}

// Packs reports whether a body is compressed when it comes to a space, or at least looked at
// run by run: while nothing is known of a disk. configured is what the program asks for.
func (c *Chooser) Packs(configured Codec, body int64, to tier.ID) bool {
	switch {
	case to.Kind != tier.Disk || body == 0 || configured == None:
		return false
	case configured != Auto:
		return true
	}
	g := c.Disk(to)
	if body < payload.FrameSize { // not worth a thought
		return false
	}
	write, _ := g.plain()
	if write == 0 || c.best(g, 0, c.power()) != None {
		return true // each run is counted at its call of Codec
	}
	g.mu.Lock()
	g.trial.moved += body
	g.mu.Unlock()
	return false
}

// PacksOnce is packs for a body that is laid out, so that a sample can be taken only as it comes
// by.
func (c *Chooser) PacksOnce(configured Codec, body int64, to tier.ID) bool {
	return c.Packs(configured, body, to) ||
		configured == Auto && to.Kind == tier.Disk && body >= payload.FrameSize && c.Due(c.Disk(to))
}
