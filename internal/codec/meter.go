package codec

import (
	"context"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway/internal/thread"
	"github.com/spillway-db/spillway/tier"
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
	cold    bool // the next window is not counted
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

// end returns for how long no other goroutine was at work.
func (m *meter) end(now time.Time, bytes int) (took time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	took = now.Sub(m.last)
	m.time += took
	m.active--
	m.last = now
	if m.bytes += int64(bytes); m.bytes >= meterWindow {
		if !m.cold {
			m.windows[m.next%len(m.windows)] = m.time.Seconds() / float64(m.bytes)
			m.next++
		}
		m.time, m.bytes, m.cold = 0, 0, false
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
	if n == 0 && !m.cold && m.bytes >= enoughToTell {
		return m.time.Seconds() / float64(m.bytes)
	}
	return sum / max(n, 1)
}

// restart forgets all but what is under way, and will not count its first window: memory is
// touched for the first time then.
func (m *meter) restart() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.time, m.bytes, m.next, m.cold = 0, 0, 0, true
	clear(m.windows[:])
}

// full reports whether it has measured a whole window.
func (m *meter) full() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.windows[0] > 0
}

// usage measures which share of the processors the program has at work, without what is spent on
// compressing. The zero value has measured nothing yet.
type usage struct {
	own      atomic.Int64  // nanoseconds of compressing and the way back
	busy     atomic.Uint64 // the share, as the bits of a float64
	next     atomic.Int64  // when it is measured again, by the clock, in nanoseconds
	measures atomic.Bool   // by one goroutine at a time, which alone uses what follows

	at       time.Time
	cpu, was time.Duration // of the process, and of own, at that time
}

// It is measured for this long at first, and then.
const (
	firstUsage = 10 * time.Millisecond
	laterUsage = 100 * time.Millisecond
)

// unknownUsage is the share while nothing is known: half of them.
const unknownUsage = 0.5

// share returns the share of so many processors.
func (u *usage) share(processors float64) float64 {
	now := time.Now()
	if now.UnixNano() >= u.next.Load() && u.measures.CompareAndSwap(false, true) {
		u.measure(now, processors)
		u.measures.Store(false)
	}
	return math.Float64frombits(u.busy.Load())
}

func (u *usage) measure(now time.Time, processors float64) {
	cpu, ok := thread.ProcessTime()
	own := time.Duration(u.own.Load())
	busy, wait := unknownUsage, firstUsage
	if took := now.Sub(u.at); ok && !u.at.IsZero() && took > 0 {
		busy = (cpu - u.cpu - (own - u.was)).Seconds() / (took.Seconds() * processors)
		busy, wait = min(1, max(0, busy)), laterUsage
	}
	u.busy.Store(math.Float64bits(busy))
	u.at, u.cpu, u.was = now, cpu, own
	u.next.Store(now.Add(wait).UnixNano())
}

// Metered returns the memory of a disk's space so that what is done with it is timed.
func (c *Chooser) Metered(space tier.ID, m tier.FileMemory) tier.FileMemory {
	return timedFile{FileMemory: m, c: c, g: c.Disk(space)}
}

type timedFile struct {
	tier.FileMemory
	c *Chooser
	g *gauges
}

func (f timedFile) WriteAt(ctx context.Context, p []byte, off int64) error {
	return f.c.measured(&f.g.write[None], len(p), func() error { return f.FileMemory.WriteAt(ctx, p, off) })
}

func (f timedFile) ReadAt(ctx context.Context, p []byte, off int64) error {
	return f.c.measured(&f.g.read[None], len(p), func() error { return f.FileMemory.ReadAt(ctx, p, off) })
}

// Timed runs f, which moves so many bytes of a body from or to a disk with a codec, and measures
// it if codecs are chosen by that.
func (c *Chooser) Timed(configured Codec, space tier.ID, k Codec, writes bool, bytes int64, f func() error) error {
	if configured != Auto || space.Kind != tier.Disk || k >= codecs {
		return f()
	}
	g := c.Disk(space)
	m := &g.read[k]
	if writes {
		m = &g.write[k]
	}
	err := c.measured(m, int(bytes), f)
	if err == nil { // else the time of the work is not known
		c.worked(k, writes, bytes)
	}
	return err
}

// worked counts the time that processors worked on so many bytes.
func (c *Chooser) worked(k Codec, writes bool, bytes int64) {
	c.mu.Lock()
	r := c.of[k]
	c.mu.Unlock()
	each := r.decode
	if writes {
		each = r.encode
	}
	if r.pieces > 0 {
		c.usage.own.Add(int64((each + handling/2) * float64(bytes) * 1e9))
	}
}

// measured runs f, which moves so many bytes unless it fails or panics. A cancelled move of
// much memory must not make a slow disk look fast.
func (c *Chooser) measured(m *meter, bytes int, f func() error) (err error) {
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
