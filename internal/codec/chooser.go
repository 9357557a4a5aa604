package codec

import (
	"runtime"
	"sync"
	"time"

	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/thread"
	"github.com/spillway-db/spillway/tier"
)

// Chooser decides for each disk what Auto compresses with. It decides when it has measured how long
// the first run takes that is not compressed, then after 64 MiB if nothing is compressed, and after
// 256 MiB, because the first run may be an exception, and from then on after each GiB. It compresses
// samples of what is written with each codec before a decision, and leaves up to 8 MiB uncompressed
// to measure the disk. If the first runs that are compressed take more than twice as long as uncompressed
// ones, it compresses nothing until the next decision.
//
// The cost of a codec is the time of a byte to the disk and back: the longer of the disk's time for
// the compressed bytes and the processors' time, because both work at the same time. The processor
// time that the program lacks meanwhile is added: compressing slows a program that keeps all
// processors busy, and costs nothing in one that waits for the disk. Among the codecs that cost at
// most a tenth more than the best, the Chooser takes the one with the least processor time; None
// has the least of all. So small differences, as on a busy machine, do not change the choice.
//
// The zero value has no measurements. It is safe for concurrent use.
type Chooser struct {
	// Chosen is called, with no lock held, when what goes to a disk is compressed with another codec
	// from now on. cost is what a byte is expected to cost there and back, as a share of what it
	// costs as it is. Set it before the first call; nil: nothing is called.
	Chosen func(disk tier.ID, k Codec, cost float64)

	mu    sync.Mutex // guards all below; nothing is done while it is held
	disks map[tier.ID]*Disk
	own   time.Duration // processor time of compressing and uncompressing so far
}

// Disk is what is known of a disk, and the present choice for it.
type Disk struct {
	id          tier.ID
	write, read meter         // of what is not compressed
	packed      meter         // of writes with the choice
	plain       float64       // seconds a byte when it was written last without compression
	rates       [codecs]rates // by the last samples
	sums        [codecs]rates // of the pieces of the next ones
	pieces      int64         // in sums
	parts       int64         // bytes of the parts that they are of
	choice      Codec         // Auto before the first decision
	moved       int64         // bytes since the last decision
	interval    int64         // bytes until the next one
	probed      int64         // bytes that were not compressed because the next one is near
	sampled     bool          // since the last decision
	sampling    bool          // a sample is being taken

	// The time, the process's time on processors and Chooser.own at the last decision.
	since        time.Time
	process, own time.Duration
}

// rates are what samples showed of a codec: what is left of a byte, and the processor's seconds for
// one that goes in.
type rates struct{ ratio, encode, decode float64 }

const (
	firstInterval = 64 << 20
	maxInterval   = 1 << 30
	// maxProbe is how many bytes are not compressed before a decision, if the interval is long: see
	// Disk.probe. From minProbe bytes on a disk's rate is believed.
	maxProbe = 8 << 20
	minProbe = payload.RunSize
	// alike is how much more a codec may cost that needs the processors less.
	alike = 1.1
	// slower is how many times as long as uncompressed bytes compressed ones must take until they are
	// given up. The first MiB, which a disk may write into its own memory, often took less than two
	// thirds of those that followed.
	slower = 2
	// handling is how many seconds a compressed byte takes to be copied and summed once more, there
	// and back, than one that is moved as it is.
	handling = 0.2e-9

	samplePiece  = payload.SumChunk
	samplePieces = 8
	// SampleRoom is what a sample takes: a piece, compressed and as it comes back.
	SampleRoom = 3 * samplePiece
)

// Disk returns what is known of a space, and whether samples are to be taken of what is written there next.
func (c *Chooser) Disk(id tier.ID) (d *Disk, due bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if d = c.disks[id]; d == nil {
		if c.disks == nil {
			c.disks = make(map[tier.ID]*Disk)
		}
		d = &Disk{id: id}
		c.disks[id] = d
		c.busyLocked(d)
	}
	return d, d.probing() && !d.sampled && !d.sampling
}

// probing reports whether the next decision is near.
func (d *Disk) probing() bool { return d.choice == Auto || d.moved >= d.interval-d.probe() }

// probe returns how many bytes are not compressed before the next decision: a 64th of a short
// interval.
func (d *Disk) probe() int64 { return min(maxProbe, d.interval/64) }

// Next returns the codec for the next bytes that are written to a disk, and decides when it is time.
func (c *Chooser) Next(d *Disk, bytes int64) Codec {
	c.mu.Lock()
	d.moved += bytes
	var chosen func(tier.ID, Codec, float64)
	cost := 1.0
	was := d.choice
	if due := d.choice == Auto || d.moved >= d.interval; due && d.sampled && d.write.bytes >= minProbe {
		cost = c.decideLocked(d)
		if d.choice != was && !(was == Auto && d.choice == None) {
			chosen = c.Chosen
		}
	}
	k, choice := d.choice, d.choice
	if d.probing() && (d.choice == Auto || d.probed < d.probe() || d.write.bytes < minProbe) {
		k = None
		d.probed += bytes
	}
	c.mu.Unlock()
	if chosen != nil {
		chosen(d.id, choice, cost)
	}
	return k
}

// decideLocked sets a disk's choice, and returns what a byte costs with it as a share of what one
// costs that is not compressed.
func (c *Chooser) decideLocked(d *Disk) float64 {
	busy := c.busyLocked(d)
	processors := float64(runtime.GOMAXPROCS(0))
	write := d.write.perByte()
	read := d.read.perByte()
	if read == 0 {
		read = write
	}
	var cost, work [codecs]float64
	cost[None] = write + read
	least := cost[None]
	for k := S2; k < codecs; k++ {
		r := d.rates[k]
		work[k] = r.encode + r.decode + handling
		cost[k] = max(r.ratio*write, (r.encode+handling/2)/processors)
		cost[k] += max(r.ratio*read, (r.decode+handling/2)/processors)
		cost[k] += busy * work[k] / max(1, processors/2) // which the program lacks
		least = min(least, cost[k])
	}
	d.choice = None
	for k := S2; k < codecs; k++ {
		if best := d.choice; cost[k] <= alike*least && (cost[best] > alike*least || work[k] < work[best]) {
			d.choice = k
		}
	}
	d.interval = min(maxInterval, max(firstInterval, 4*d.interval))
	if d.choice != None { // measuring takes longer than compressing
		d.interval = max(d.interval, 4*firstInterval)
	}
	d.moved, d.probed, d.sampled, d.plain = 0, 0, false, write
	for _, m := range []*meter{&d.write, &d.read, &d.packed} {
		m.reset()
	}
	return cost[d.choice] / cost[None]
}

// busyLocked returns the share of the processors that the program used since the last decision,
// without compressing; half of them if that is not known.
func (c *Chooser) busyLocked(d *Disk) float64 {
	now := time.Now()
	process := thread.ProcessTime()
	took := now.Sub(d.since).Seconds() * float64(runtime.GOMAXPROCS(0))
	used := (process - d.process - (c.own - d.own)).Seconds()
	ok := process > 0 && !d.since.IsZero() && took > 0
	d.since, d.process, d.own = now, process, c.own
	if !ok {
		return 0.5
	}
	return min(1, max(0, used/took))
}

// Packs reports whether a body is compressed when it comes to a space, or at least looked at run by
// run: before a disk's speed is known, or to take samples of a body that is laid out, and only comes
// by. configured is what the program asks for.
func (c *Chooser) Packs(configured Codec, body int64, to tier.ID, laid bool) bool {
	switch {
	case !to.Kind.IsStorage() || body == 0 || configured == None:
		return false
	case configured != Auto:
		return true
	case body < payload.FrameSize: // too short to gain anything
		return false
	}
	d, _ := c.Disk(to)
	c.mu.Lock()
	unknown := d.choice == Auto && d.write.bytes < minProbe
	runs := unknown || d.choice > None
	c.mu.Unlock()
	// Each run is counted at its call of Next, and a body that is not compressed here.
	if packs := runs || c.Next(d, body) != None; packs || !laid {
		return packs
	}
	_, due := c.Disk(to)
	return due
}

// Sample compresses pieces from all over a part of a body with each codec, if that is due: a share of
// samplePieces as large as the part is of the body. A part may be a column that is like no other, so the
// samples are complete when the parts make up a body, or give samplePieces. read reads pieces; room is what
// it works in, of SampleRoom bytes.
func (c *Chooser) Sample(
	k *Coders, d *Disk, body, part int64, room []byte, read func(off, n int64) ([]byte, error),
) error {
	c.mu.Lock()
	due := d.probing() && !d.sampled && !d.sampling && part >= payload.FrameSize
	d.sampling = d.sampling || due
	n := max(1, min(samplePieces, body/samplePiece)*part/max(1, body))
	c.mu.Unlock()
	if !due {
		return nil
	}
	var found [codecs]rates
	whole := false
	defer func() { // also after a panic of read
		c.mu.Lock()
		defer c.mu.Unlock()
		if d.sampling = false; !whole {
			return
		}
		for i, r := range found {
			sum := &d.sums[i]
			*sum = rates{sum.ratio + r.ratio, sum.encode + r.encode, sum.decode + r.decode}
		}
		d.pieces += n
		d.parts += part
		if d.pieces < samplePieces && d.parts <= body-payload.FrameSize { // the last part may be too short
			return
		}
		bytes := float64(d.pieces * samplePiece)
		for i, r := range d.sums {
			d.rates[i] = rates{r.ratio / bytes, r.encode / bytes, r.decode / bytes}
		}
		d.sampled, d.pieces, d.parts, d.sums = true, 0, 0, [codecs]rates{}
	}()
	for i := range n {
		raw, err := read(part/n*i/samplePiece*samplePiece, samplePiece)
		for codec := S2; codec < codecs && err == nil; codec++ {
			if i == 0 { // the first time is slower: tables are made, memory is touched
				err = try(k, codec, raw, room, new(rates))
			}
			if err == nil {
				err = try(k, codec, raw, room, &found[codec])
			}
		}
		if err != nil {
			return err
		}
	}
	whole = true
	return nil
}

// try compresses a piece, uncompresses it, and adds the bytes that are left and the seconds to sum.
func try(k *Coders, codec Codec, raw, room []byte, sum *rates) error {
	out, back := room[:0:2*len(raw)], room[2*len(raw) : SampleRoom][:len(raw)]
	watch := thread.Start()
	stored, err := k.Encode(codec, out, raw)
	sum.encode += watch.Stop().Seconds()
	if err != nil {
		return err
	}
	watch = thread.Start()
	err = k.Decode(codec, back, stored)
	sum.decode += watch.Stop().Seconds()
	sum.ratio += float64(len(stored))
	return err
}

// Timed runs f, which moves so many bytes of a body from or to a disk. If codecs are chosen by
// measuring, Timed measures the speed of uncompressed bytes and the processor time of compressed
// ones. Calls that overlap count their common time once, and pauses count none. After an error or
// a panic of f the time does not count, because it is not known how many bytes it belongs to. When
// enough compressed bytes were written and took much longer than without compression, nothing is
// compressed until the next decision.
func (c *Chooser) Timed(
	configured Codec, space tier.ID, k Codec, writes bool, bytes int64, f func() error,
) (err error) {
	if configured != Auto || !space.Kind.IsStorage() || k >= codecs {
		return f()
	}
	d, _ := c.Disk(space)
	m := new(meter) // how long uncompressing takes is known from samples
	switch {
	case k == None && writes:
		m = &d.write
	case k == None:
		m = &d.read
	case writes:
		m = &d.packed
	}
	whole := false
	c.mu.Lock()
	if m.active == 0 {
		m.last = time.Now()
	}
	m.active++
	c.mu.Unlock()
	defer func() {
		givenUp := false
		c.mu.Lock()
		now := time.Now()
		m.time += now.Sub(m.last)
		m.last = now
		m.active--
		if m.bytes += bytes; !whole {
			m.reset()
		} else if k != None {
			perByte := d.rates[k].decode
			if writes {
				perByte = d.rates[k].encode
			}
			c.own += time.Duration((perByte + handling/2) * float64(bytes) * 1e9)
			givenUp = k == d.choice && d.packed.bytes >= maxProbe && d.packed.perByte() > slower*d.plain
		}
		if givenUp {
			d.choice, d.moved = None, 0
		}
		c.mu.Unlock()
		if givenUp && c.Chosen != nil {
			c.Chosen(d.id, None, 1)
		}
	}()
	err = f()
	whole = err == nil
	return err
}

// meter measures a rate while something is in progress.
type meter struct {
	active int
	last   time.Time // time counts up to here, while there are active ones
	time   time.Duration
	bytes  int64
}

func (m *meter) reset() { m.time, m.bytes = 0, 0 }

// perByte returns seconds a byte; 0 if that is not known.
func (m *meter) perByte() float64 { return m.time.Seconds() / max(1, float64(m.bytes)) }
