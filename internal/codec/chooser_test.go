package codec

import (
	"context"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/thread"
	"github.com/spillway-db/spillway/tier"
)

const perMiB = 1.0 / (1 << 20)

// known is a chooser that has seen S2 and Zstandard; the rates are in MiB a second.
func known(s2, zstd rates) *Chooser {
	c := new(Chooser)
	for k, r := range map[Codec]rates{S2: s2, Zstd: zstd} {
		c.of[k] = rates{ratio: r.ratio, encode: perMiB / r.encode, decode: perMiB / r.decode, pieces: 1}
	}
	return c
}

// written makes a gauge that has measured so many MiB a second.
func written(write, read float64) *gauges {
	g := new(gauges)
	set := func(m *[codecs]meter, rate float64) {
		if rate > 0 {
			m[None].windows[0] = perMiB / rate
		}
	}
	set(&g.write, write)
	set(&g.read, read)
	return g
}

// TestPromises: what promises most follows from what was measured. One processor is counted on.
func TestPromises(t *testing.T) {
	text := known(rates{ratio: 0.6, encode: 1000, decode: 2000}, rates{ratio: 0.4, encode: 400, decode: 1400})
	noise := known(rates{ratio: 1, encode: 3000, decode: 9000}, rates{ratio: 1, encode: 3000, decode: 9000})
	busy, idle := power{processors: 1, busy: 1}, power{processors: 1}
	for _, c := range []struct {
		name        string
		c           *Chooser
		write, read float64
		power       power
		want        Codec
	}{
		{"nothing is known of the disk", text, 0, 0, busy, None},
		{"nothing is known of the codecs", new(Chooser), 50, 50, busy, None},
		{"a fast disk", text, 4500, 2800, busy, None},
		{"a slow disk", text, 50, 50, busy, Zstd},
		{"one not as slow", text, 150, 150, busy, Zstd},
		{"only writing is slow", text, 50, 3000, busy, Zstd},
		{"S2 is quicker where the other saves less than it costs", text, 300, 300, busy, S2},
		{"neither saves what it costs", text, 900, 900, busy, None},
		{"reading is not known yet", text, 50, 0, busy, Zstd},
		{"noise on a slow disk", noise, 50, 50, busy, None},
		{"processors that nobody else has use for", text, 900, 900, idle, S2},
		{"processors that are slower than the disk all the same", text, 4500, 2800, idle, None},
	} {
		got := None
		if write, read := written(c.write, c.read).plain(); write > 0 {
			got, _ = c.c.promises(write, read, c.power)
		}
		if got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

// TestMeter: what is done at the same time counts its time once, and pauses count none.
func TestMeter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var m meter
		if m.perByte() != 0 {
			t.Error("it knows something")
		}
		work := func(n int, took time.Duration) { // 4 MiB in 4 times that
			for range n {
				var wg sync.WaitGroup
				for i := range 4 {
					wg.Go(func() {
						m.begin(time.Now())
						time.Sleep(time.Duration(i+1) * took)
						m.end(time.Now(), 1<<20)
					})
				}
				wg.Wait()
				time.Sleep(time.Second)
			}
		}
		near := func(want float64) {
			t.Helper()
			if rate := perMiB / m.perByte(); rate < 0.99*want || rate > 1.01*want {
				t.Errorf("%.1f MiB/s, want %.1f", rate, want)
			}
		}
		work(1, 10*time.Millisecond)
		near(100)
		work(7, 10*time.Millisecond)
		near(100)
		work(40, 40*time.Millisecond)
		near(25)
		if !m.full() {
			t.Error("it has measured nothing")
		}
		m.restart()
		if m.full() || m.perByte() != 0 {
			t.Error("it has not forgotten")
		}
		work(1, time.Millisecond)
		if m.perByte() != 0 {
			t.Error("a part of the first window was counted")
		}
		work(1, time.Millisecond)
		if m.full() {
			t.Error("the first window was counted")
		}
		work(2, 20*time.Millisecond)
		if !m.full() {
			t.Error("it has measured no window since")
		}
		near(50)
	})
}

// TestTrial: a codec that promises more is tried, and kept to only if it keeps what it
// promised; if not, it is tried again after more bytes each time.
func TestTrial(t *testing.T) {
	c := known(rates{ratio: 1, encode: 1000, decode: 2000}, rates{ratio: 0.4, encode: 400, decode: 1400})
	move := func(g *gauges, came float64, bytes int64) (compressed int64) {
		for ; bytes > 0; bytes -= 1 << 20 {
			if k := c.best(g, 1<<20, power{processors: 1, busy: 1}); k != None {
				compressed += 1 << 20
				m := &g.write[k]
				if m.bytes += 1 << 20; m.bytes >= meterWindow {
					m.windows[0], m.bytes = perMiB/came, 0
				}
				g.read[k].windows[0] = perMiB / came
			}
		}
		return compressed
	}
	if n := move(new(gauges), 1, 1<<30); n != 0 {
		t.Errorf("%d bytes were compressed for a disk that is not known", n)
	}
	if n := move(written(4000, 3000), 1, 1<<30); n != 0 {
		t.Errorf("%d bytes were compressed for a fast disk", n)
	}
	// It looks like 200 MiB/s, and to compress for it comes to no more.
	g := written(200, 200)
	if n := move(g, 190, 1<<30); n < meterWindow || n > 6*(2*meterWindow+2<<20) {
		t.Errorf("%d bytes of 1 GiB were compressed, though it was worse", n)
	}
	if n := move(g, 190, 4<<30); n > 5*(2*meterWindow+2<<20) {
		t.Errorf("%d bytes of the next 4 GiB were compressed, though it was worse", n)
	}
	// It keeps what it promised; some bytes are moved as they are, to see what that costs.
	g = written(50, 50)
	if n := move(g, 110, 8<<30); n < 8<<30*98/100 || n == 8<<30 {
		t.Errorf("%d bytes of 8 GiB were compressed, though it was better", n)
	}
	// The disk becomes fast.
	for i := range g.write[None].windows {
		g.write[None].windows[i], g.read[None].windows[i] = perMiB/4000, perMiB/4000
	}
	if n := move(g, 110, 1<<30); n > 64<<20 {
		t.Errorf("%d bytes of 1 GiB were compressed for a disk that became fast", n)
	}
}

// TestTrialMustPay: a trial is over unless compressing costs less, by the slack.
func TestTrialMustPay(t *testing.T) {
	idle := power{processors: 1}
	for came, keeps := range map[float64]bool{190: false, 205: false, 240: true} {
		c := known(rates{ratio: 1, encode: 1000, decode: 2000}, rates{ratio: 0.4, encode: 400, decode: 1400})
		g := written(200, 200)
		k := c.best(g, 1<<20, idle)
		if k == None {
			t.Fatal("nothing is tried")
		}
		g.write[k].windows[0], g.read[k].windows[0] = perMiB/came, perMiB/came
		if kept := c.best(g, 1<<20, idle) == k; kept != keeps {
			t.Errorf("%v MiB/s where 200 are there without: kept to: %v, want %v", came, kept, keeps)
		}
	}
}

// TestTrialForgetsReading: how slowly something was read once, when processors were busy perhaps,
// ends no trial of later, in which nothing was read yet.
func TestTrialForgetsReading(t *testing.T) {
	c := known(rates{ratio: 1, encode: 1000, decode: 2000}, rates{ratio: 0.4, encode: 400, decode: 1400})
	g := written(50, 50)
	for i := range g.read[Zstd].windows {
		g.read[Zstd].windows[i] = perMiB
	}
	compressed := 0
	for range 1 << 10 {
		if k := c.best(g, 1<<20, power{processors: 1, busy: 1}); k != None {
			compressed++
			g.write[k].begin(time.Now())
			g.write[k].end(time.Now(), 1<<20)
			g.write[k].windows[0] = perMiB / 110
		}
	}
	if compressed < 1000 {
		t.Errorf("%d of 1024 MiB were compressed, though it was better", compressed)
	}
	g.read[Zstd].begin(time.Now())
	g.read[Zstd].end(time.Now(), 1<<30)
	g.read[Zstd].windows[0] = perMiB // it is as slow as it was
	if k := c.best(g, 1<<20, power{processors: 1, busy: 1}); k != None {
		t.Errorf("%s is kept to, though it is read more slowly than what is not compressed", k)
	}
}

// TestSamplesAreFew: a sample is taken at the beginning, and then for a hundredth of the
// disks' time, one at a time.
func TestSamplesAreFew(t *testing.T) {
	var c Chooser
	var k Coders
	slow, fast := written(50, 50), written(1<<20, 1<<20)
	if c.Due(fast) || c.Due(new(gauges)) || !c.Due(slow) {
		t.Error("a first sample is due for a disk that is faster than any codec or not known, or is not for a slow one")
	}
	body := make([]byte, 8*payload.FrameSize)
	noise := rand.NewChaCha8([32]byte{})
	_, _ = noise.Read(body) // it never fails
	read := func(off, n int64) ([]byte, error) { return body[off : off+n], nil }
	sample := func() {
		t.Helper()
		if err := c.Sample(&k, slow, int64(len(body)), make([]byte, trialRoom), read); err != nil {
			t.Fatal(err)
		}
	}
	sample()
	if c.samples.Load() != firstPieces || c.of[S2].pieces != firstPieces || c.of[Zstd].pieces != firstPieces || c.of[Zstd].ratio < 1 {
		t.Errorf("%d pieces, %+v", c.samples.Load(), c.of)
	}
	sample()
	if c.samples.Load() != firstPieces || c.Due(slow) {
		t.Error("there was a sample for no time of the disk's")
	}
	c.busy.Store(sampleShare * (c.sampled.Load() + 1))
	c.sampling.Store(true)
	sample()
	c.sampling.Store(false)
	if c.samples.Load() != firstPieces {
		t.Error("there were two at a time")
	}
	sample()
	if c.samples.Load() != firstPieces+laterPieces {
		t.Errorf("%d pieces", c.samples.Load())
	}
}

// TestWorth: of a codec nothing need be known that cannot be quicker than the disk, or than one
// that is known.
func TestWorth(t *testing.T) {
	n := float64(runtime.GOMAXPROCS(0))
	idle := power{processors: n}
	var c Chooser
	for _, k := range []Codec{S2, Zstd, Bitpack} {
		if !c.worth(k, quick[k]/n, quick[k]/n, idle) {
			t.Errorf("%s is not worth it where a byte takes twice as long as at best with it", k)
		}
		if c.worth(k, quick[k]/n/4, quick[k]/n/4, idle) != (k == Bitpack) {
			t.Errorf("%s for a disk that is twice as quick as it can be", k)
		}
	}
	c.of[Bitpack] = rates{pieces: 1} // nothing is left of anything, at once
	slow := handling + quick[S2]
	if c.worth(S2, slow, slow, power{processors: n * 10}) {
		t.Error("S2 is worth it where another is quicker than it can be")
	}
}

// TestPromiseIsForgotten: a codec that did wonders with the bytes of another time is tried on those
// of now, and does not hide the others behind what it promised then.
func TestPromiseIsForgotten(t *testing.T) {
	var c Chooser
	var k Coders
	slow := written(50, 50)
	n := float64(runtime.GOMAXPROCS(0))
	for _, codec := range []Codec{Zstd, S2} {
		c.of[codec] = rates{ratio: 0.001, encode: 0.01e-9 * n, decode: 0.01e-9 * n, pieces: memoryPieces}
	}
	c.usage.next.Store(math.MaxInt64) // nobody else has use for the processors
	body := make([]byte, payload.FrameSize)
	noise := rand.NewChaCha8([32]byte{})
	_, _ = noise.Read(body) // it never fails
	read := func(off, n int64) ([]byte, error) { return body[off : off+n], nil }
	for range 8 * memoryPieces / laterPieces {
		c.sampled.Store(0)
		if err := c.Sample(&k, slow, int64(len(body)), make([]byte, trialRoom), read); err != nil {
			t.Fatal(err)
		}
	}
	write, back := slow.plain()
	if got, cost := c.promises(write, back, c.power()); cost < slack*(write+back) {
		t.Errorf("noise is compressed: %s promises %.2g of %.2g seconds a byte", got, cost, write+back)
	}
}

// TestUsage: what is spent on compressing is not what the program has at work.
func TestUsage(t *testing.T) {
	if _, ok := thread.ProcessTime(); !ok {
		t.Skip("needs a system that tells how long processors worked for a process")
	}
	var u usage
	if got := u.share(1); got != unknownUsage {
		t.Errorf("%v of a processor that nobody has looked at, want %v", got, unknownUsage)
	}
	work := func() {
		begin, _ := thread.ProcessTime()
		for now := begin; now-begin < firstUsage; now, _ = thread.ProcessTime() {
		}
	}
	again := func(own time.Duration) float64 {
		u.at, u.cpu, u.was = time.Time{}, 0, 0
		u.next.Store(0)
		u.share(1)
		u.own.Add(int64(own))
		work()
		u.next.Store(0)
		return u.share(1)
	}
	if got := again(0); got <= 0 || got > 1 {
		t.Errorf("%v of a processor is at work", got)
	}
	if got := again(time.Hour); got != 0 {
		t.Errorf("%v of a processor is at work beside compressing, want 0", got)
	}
}

// TestMeterOfWhatFails: what was cancelled or panicked tells nothing about a disk, and pauses
// after it count no time.
func TestMeterOfWhatFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c Chooser
		var m meter
		move := func(bytes int, took time.Duration, fails func() error) {
			func() {
				defer func() { _ = recover() }()
				_ = c.measured(&m, bytes, func() error {
					time.Sleep(took)
					return fails()
				})
			}()
			time.Sleep(time.Minute)
		}
		well := func() error { return nil }
		move(meterWindow, 80*time.Millisecond, well)
		want := m.perByte()
		move(1<<30, time.Millisecond, func() error { return context.Canceled })
		move(1<<30, time.Millisecond, func() error { panic("the driver is confused") })
		move(meterWindow, 80*time.Millisecond, well)
		if got := m.perByte(); got < 0.99*want || got > 1.01*want {
			t.Errorf("%.1f MiB/s, want %.1f", perMiB/got, perMiB/want)
		}
		if m.active != 0 {
			t.Errorf("%d are at work", m.active)
		}
	})
}

// TestFailuresAreNoWork: what failed, perhaps at once, is not taken for time that processors worked
// on its bytes: the program would look as if it had no use for them. Nor does memory count, only
// disks.
func TestFailuresAreNoWork(t *testing.T) {
	var c Chooser
	c.of[Zstd] = rates{ratio: 0.5, encode: 1e-9, decode: 1e-9, pieces: 1}
	disk := tier.ID{Kind: tier.Disk}
	well := func() error { return nil }
	for _, writes := range []bool{true, false} {
		if err := c.Timed(Auto, disk, Zstd, writes, 1<<30, func() error { return context.Canceled }); err == nil {
			t.Fatal("it went well")
		}
		_ = c.Timed(Auto, tier.ID{Kind: tier.Host}, Zstd, writes, 1<<30, well)
		if own := c.usage.own.Load(); own != 0 {
			t.Errorf("writing: %v; it counts as %v of work", writes, time.Duration(own))
		}
	}
	_ = c.Timed(Auto, disk, Zstd, true, 1<<20, well)
	if c.usage.own.Load() == 0 {
		t.Error("what went well counts as none")
	}
}

// Each time that another codec is chosen is told, with what it should cost; that nothing is compressed at
// first is not.
func TestChosenIsTold(t *testing.T) {
	for name, first := range map[string]Codec{"later": None, "at once": S2} {
		c := known(rates{ratio: 1, encode: 1000, decode: 2000}, rates{ratio: 0.4, encode: 400, decode: 1400})
		var told []Codec
		c.Chosen = func(_ tier.ID, k Codec, cost float64) {
			if told = append(told, k); (k == None) != (cost == 1) || cost <= 0 || cost > 1 {
				t.Errorf("%s: %s should cost %.2f", name, k, cost)
			}
		}
		g := written(50, 50)
		if first == None {
			g.trial.patience = 8 << 20
		}
		var want []Codec
		last := None
		for range 64 << 10 {
			k := c.best(g, 1<<20, power{processors: 1, busy: 1})
			if k != last {
				want, last = append(want, k), k
			}
			if m := &g.write[k]; k != None {
				if m.bytes += 1 << 20; m.bytes >= meterWindow {
					m.windows[0], m.bytes = perMiB/45, 0 // which is worse
				}
				g.read[k].windows[0] = perMiB / 45
			}
		}
		if len(want) < 3 || !slices.Equal(told, want) {
			t.Errorf("%s: %v was chosen, and %v told", name, want, told)
		}
	}
}
