package codec

import (
	"context"
	"errors"
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

const (
	mib    = 1 << 20
	perMiB = 1.0 / mib
)

var diskID = tier.ID{Kind: tier.Disk}

// sampled returns rates of MiB a second on one processor of all.
func sampled(ratio, encode, decode float64) rates {
	n := float64(runtime.GOMAXPROCS(0))
	return rates{ratio, n * perMiB / encode, n * perMiB / decode}
}

// ofText returns what samples of text show.
func ofText() [codecs]rates {
	return [codecs]rates{
		S2: sampled(0.6, 2000, 4000), Zstd: sampled(0.4, 500, 1400), Bitpack: sampled(1, 9000, 9000),
	}
}

// due reports whether samples are to be taken.
func due(c *Chooser, disk tier.ID) bool {
	_, due := c.Disk(disk)
	return due
}

// measure makes a disk's meters those of so many MiB a second.
func measure(d *Disk, write, read float64) {
	set := func(m *meter, rate float64) {
		m.reset()
		if rate > 0 {
			m.bytes = 8 * mib
			m.time = time.Duration(8 / rate * float64(time.Second))
		}
	}
	set(&d.write, write)
	set(&d.read, read)
}

// TestDecide: the choice follows from what was measured. The bubble's clock stands still, so the
// share of busy processors is not known, and counts as half.
func TestDecide(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		text := [codecs]rates{
			S2:      sampled(0.6, 2000, 4000),
			Zstd:    sampled(0.4, 500, 1400),
			Bitpack: sampled(0.9, 9000, 9000),
		}
		noise := [codecs]rates{
			S2:      sampled(1, 3000, 9000),
			Zstd:    sampled(1, 3000, 9000),
			Bitpack: sampled(1, 9000, 9000),
		}
		alike := [codecs]rates{
			S2:      sampled(0.42, 2000, 4000),
			Zstd:    sampled(0.4, 500, 1400),
			Bitpack: sampled(1, 9000, 9000),
		}
		for _, c := range []struct {
			name        string
			rates       [codecs]rates
			write, read float64
			want        Codec
		}{
			{"a fast disk", text, 9500, 9500, None},
			{"a slow disk", text, 50, 50, Zstd},
			{"only writing is slow", text, 50, 3000, Zstd},
			{"reading is not known yet", text, 50, 0, Zstd},
			{"a quick codec for a quick disk", text, 600, 600, S2},
			{"noise on a slow disk", noise, 50, 50, None},
			{"of two that cost the same, the one that needs the processors less", alike, 50, 50, S2},
		} {
			var ch Chooser
			d, _ := ch.Disk(diskID)
			d.rates, d.sampled = c.rates, true
			measure(d, c.write, c.read)
			ch.Next(d, 0)
			if d.choice != c.want {
				t.Errorf("%s: %s, want %s", c.name, d.choice, c.want)
			}
		}
	})
}

// TestIntervals: the disk is measured without compression before each decision. The first one comes
// after 1 MiB and, while batches are compressed, the next after 256 MiB and then each GiB. Chosen is
// called for changes.
func TestIntervals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c Chooser
		type choice struct {
			at int
			k  Codec
		}
		var chosen, want []choice
		at := 0
		c.Chosen = func(id tier.ID, k Codec, cost float64) {
			if chosen = append(chosen, choice{at, k}); id != diskID || cost <= 0 || (k == None) != (cost == 1) {
				t.Errorf("%s for %s should cost %.2f", k, id, cost)
			}
		}
		d, _ := c.Disk(diskID)
		plain := 0
		for ; at < 4096; at++ {
			speed := 50.
			if at >= 2000 { // the disk has become fast
				speed = 9500
			}
			if k := c.Next(d, mib); k == None {
				if plain++; !d.sampled && d.probing() {
					d.rates = ofText()
					d.sampled = true
				}
				bytes := d.write.bytes + mib
				measure(d, speed, speed)
				d.write.bytes, d.write.time = bytes, time.Duration(float64(bytes)*perMiB/speed*float64(time.Second))
			}
		}
		want = []choice{{1, Zstd}, {1 + 256 + 2*1024, None}}
		if !slices.Equal(chosen, want) {
			t.Errorf("the choices were %v, want %v", chosen, want)
		}
		if before := 1 + 4 + 2*8; plain != before+4096-want[1].at-1 && plain != before+4096-want[1].at {
			t.Errorf("%d MiB were not compressed", plain)
		}
	})
}

// TestFirstRunIsAnException: if the first run took much longer or much less time than those that follow,
// the choice changes soon.
func TestFirstRunIsAnException(t *testing.T) {
	for _, c := range []struct {
		first, later float64
		before, want Codec
	}{{5, 9500, Zstd, None}, {9500, 50, None, Zstd}} {
		var ch Chooser
		d, _ := ch.Disk(diskID)
		d.rates = ofText()
		d.sampled = true
		measure(d, c.first, 0)
		if ch.Next(d, 0); d.choice != c.before {
			t.Errorf("after a run of %v MiB/s %s was chosen, want %s", c.first, d.choice, c.before)
		}
		for range 4 * firstInterval / mib {
			ch.Next(d, mib)
			measure(d, c.later, 0)
			d.sampled = d.probing()
		}
		if d.choice != c.want {
			t.Errorf("with %v MiB/s, %s is chosen after 256 MiB, want %s", c.later, d.choice, c.want)
		}
	}
}

// TestSlower: where compressed runs take longer than uncompressed ones, compressing ends after 8 MiB,
// which is reported, and is tried again after ever longer intervals.
func TestSlower(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c Chooser
		var chosen []Codec
		c.Chosen = func(_ tier.ID, k Codec, _ float64) { chosen = append(chosen, k) }
		d, _ := c.Disk(diskID)
		packed := 0
		for range 4096 {
			k := c.Next(d, mib)
			took := 20 * time.Millisecond
			if k != None {
				packed++
				took *= 3
			}
			_ = c.Timed(Auto, diskID, k, true, mib, func() error { time.Sleep(took); return nil })
			if d.probing() {
				d.rates = ofText()
				d.sampled = true
			}
		}
		if tries := 5; packed != 8*tries || len(chosen) != 2*tries {
			t.Errorf("%d MiB were compressed, and the choices were %v", packed, chosen)
		}
		for i, k := range chosen {
			if k != []Codec{Zstd, None}[i%2] {
				t.Errorf("choice %d was %s", i, k)
			}
		}
	})
}

// TestIntervalsUncompressed: while nothing is compressed, decisions come after 64 MiB, 256 MiB and
// each GiB.
func TestIntervalsUncompressed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c Chooser
		d, _ := c.Disk(diskID)
		var got []int64
		for range 4 {
			d.sampled = true // no codec saves anything
			for k := range d.rates {
				d.rates[k] = sampled(1, 3000, 9000)
			}
			measure(d, 9500, 9500)
			if c.Next(d, d.interval); d.sampled || d.choice != None {
				t.Fatalf("no decision after %d bytes, or %s", d.interval, d.choice)
			}
			got = append(got, d.interval/mib)
		}
		if want := []int64{64, 256, 1024, 1024}; !slices.Equal(got, want) {
			t.Errorf("decisions come after %v MiB, want %v", got, want)
		}
	})
}

// TestSampleDuringTransfers: samples may be taken while other transfers are timed. The race detector
// checks that.
func TestSampleDuringTransfers(t *testing.T) {
	var c Chooser
	d, _ := c.Disk(diskID)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for _, writes := range []bool{true, false} {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := c.Timed(Auto, diskID, S2, writes, mib, func() error { return nil }); err != nil {
					t.Error(err)
				}
			}
		})
	}
	body := make([]byte, payload.FrameSize)
	read := func(off, n int64) ([]byte, error) { return body[off:][:n], nil }
	for range 20 {
		c.mu.Lock()
		d.sampled = false
		c.mu.Unlock()
		room := make([]byte, SampleRoom)
		if err := c.Sample(new(Coders), d, payload.FrameSize, payload.FrameSize, room, read); err != nil {
			t.Error(err)
		}
	}
	close(stop)
	wg.Wait()
}

// TestFirstDecision: nothing is compressed before the disk is measured and samples are taken.
func TestFirstDecision(t *testing.T) {
	for name, set := range map[string]func(*Disk){
		"nothing is known":    func(*Disk) {},
		"nothing was sampled": func(d *Disk) { measure(d, 50, 50) },
		"too little was written": func(d *Disk) {
			d.sampled, d.rates = true, [codecs]rates{S2: sampled(0.1, 9000, 9000)}
			d.write.time, d.write.bytes = time.Second, mib-1
		},
	} {
		var c Chooser
		d, _ := c.Disk(diskID)
		set(d)
		if k := c.Next(d, mib); k != None || d.choice != Auto {
			t.Errorf("%s: %s was chosen", name, k)
		}
		if c.Packs(Auto, mib, diskID, false) != (d.write.bytes < mib) || c.Packs(Auto, payload.FrameSize-1, diskID, true) || c.Packs(None, mib, diskID, true) ||
			!c.Packs(S2, 1, diskID, false) ||
			c.Packs(S2, mib, tier.ID{Kind: tier.Host}, true) {
			t.Errorf("%s: the wrong bodies are looked at run by run", name)
		}
	}
}

// TestMeter: what is done at the same time counts its time once, and pauses count none.
func TestMeter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c Chooser
		d, _ := c.Disk(diskID)
		work := func(took time.Duration) { // 4 MiB in 4 times that
			var wg sync.WaitGroup
			for i := range 4 {
				wg.Go(func() {
					err := c.Timed(Auto, diskID, None, true, mib, func() error {
						time.Sleep(time.Duration(i+1) * took)
						return nil
					})
					if err != nil {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			time.Sleep(time.Second)
		}
		near := func(want float64) {
			t.Helper()
			if rate := perMiB / d.write.perByte(); rate < 0.99*want || rate > 1.01*want {
				t.Errorf("%.1f MiB/s, want %.1f", rate, want)
			}
		}
		work(10 * time.Millisecond)
		near(100)
		work(40 * time.Millisecond)
		near(40)
		d.write.reset()
		work(40 * time.Millisecond)
		near(25)
		if d.read.bytes != 0 {
			t.Error("writes were counted as reads")
		}
	})
}

// TestFailedProbes: if the writes that are not compressed before a decision fail, more are left
// uncompressed until the disk is measured.
func TestFailedProbes(t *testing.T) {
	var c Chooser
	d, _ := c.Disk(diskID)
	measure(d, 50, 50)
	d.rates = ofText()
	d.sampled = true
	failure := errors.New("the disk is full")
	for range 2 * maxInterval / mib {
		k := c.Next(d, mib)
		d.sampled = d.sampled || d.probing()
		_ = c.Timed(Auto, diskID, k, true, mib, func() error { return failure })
	}
	if d.choice != Zstd {
		t.Fatalf("%s was chosen, want zstd", d.choice)
	}
	failure = nil
	for range 2 {
		_ = c.Timed(Auto, diskID, c.Next(d, mib), true, mib, func() error { return nil })
	}
	if d.choice == Zstd {
		t.Error("the disk is fast, and no other codec was chosen")
	}
}

// TestMeterOfFailures: a transfer that was cancelled or panicked shows nothing about a disk.
func TestMeterOfFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c Chooser
		d, _ := c.Disk(diskID)
		move := func(bytes int64, took time.Duration, fails func() error) {
			func() {
				defer func() { _ = recover() }()
				_ = c.Timed(Auto, diskID, None, false, bytes, func() error {
					time.Sleep(took)
					return fails()
				})
			}()
			time.Sleep(time.Minute)
		}
		move(1<<30, time.Millisecond, func() error { return context.Canceled })
		move(1<<30, time.Millisecond, func() error { panic("the driver is confused") })
		move(8*mib, 80*time.Millisecond, func() error { return nil })
		if rate := perMiB / d.read.perByte(); rate < 99 || rate > 101 || d.read.active != 0 {
			t.Errorf("%.1f MiB/s, want 100; %d are active", rate, d.read.active)
		}
	})
}

// TestSamples: samples are taken once before each decision, from all over a body. After an error they
// are still due.
func TestSamples(t *testing.T) {
	var c Chooser
	var k Coders
	body := make([]byte, 8*payload.FrameSize)
	noise := rand.NewChaCha8([32]byte{})
	_, _ = noise.Read(body) // it never fails
	clear(body[:len(body)/2])
	var at []int64
	failure := errors.New("a broken disk")
	read := func(off, n int64) ([]byte, error) {
		at = append(at, off)
		return body[off : off+n], failure
	}
	sample := func() error {
		d, _ := c.Disk(diskID)
		return c.Sample(&k, d, int64(len(body)), int64(len(body)), make([]byte, SampleRoom), read)
	}
	if err := sample(); err != failure || !due(&c, diskID) {
		t.Errorf("%v; still due: %t", err, due(&c, diskID))
	}
	failure, at = nil, nil
	for range 2 {
		if err := sample(); err != nil || due(&c, diskID) {
			t.Errorf("%v; still due: %t", err, due(&c, diskID))
		}
	}
	d, _ := c.Disk(diskID)
	for codec := S2; codec < codecs; codec++ {
		if r := d.rates[codec]; r.ratio < 0.45 || r.ratio > 0.6 || r.encode <= 0 || r.decode <= 0 {
			t.Errorf("%s: %+v", codec, r)
		}
	}
	if len(at) != samplePieces || at[0] != 0 || at[7] != 7*payload.FrameSize {
		t.Errorf("the pieces were at %d", at)
	}
	small, _ := c.Disk(tier.ID{Kind: tier.Disk, Ordinal: 1})
	const short = payload.FrameSize - 1
	if err := c.Sample(&k, small, short, short, make([]byte, SampleRoom), read); err != nil || small.sampled {
		t.Errorf("a small body was sampled: %v", err)
	}
}

// TestSamplesOfParts: parts of a body, as its runs are, give samples together. Those of a large body need
// not be all of it, because nothing is compressed until then.
func TestSamplesOfParts(t *testing.T) {
	for body, want := range map[int64]int{5 * mib: 5, 5*mib + 4096: 5, 100 * mib: samplePieces} {
		var c Chooser
		var k Coders
		part := make([]byte, mib)
		d, _ := c.Disk(diskID)
		parts, pieces := 0, 0
		for ; due(&c, d.id) && parts < 200; parts++ {
			if parts == 2 { // the other parts are noise
				_, _ = rand.NewChaCha8([32]byte{}).Read(part) // it never fails
			}
			err := c.Sample(&k, d, body, mib, make([]byte, SampleRoom), func(off, n int64) ([]byte, error) {
				pieces++
				return part[off:][:n], nil
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		left := float64(want-2) / float64(want)
		if r := d.rates[S2].ratio; parts != want || pieces != want || r < left-0.1 || r > left+0.1 {
			t.Errorf("%d bytes: %d parts gave %d pieces, of which %.2f are left", body, parts, pieces, r)
		}
	}
}

// TestDecisionDuringSample: no decision is made from a sample that is not complete, and a sample whose
// source panics is still due.
func TestDecisionDuringSample(t *testing.T) {
	var c Chooser
	var k Coders
	d, _ := c.Disk(diskID)
	measure(d, 50, 50)
	body := make([]byte, mib)
	sample := func(read func()) {
		defer func() { _ = recover() }()
		_ = c.Sample(&k, d, mib, mib, make([]byte, SampleRoom), func(off, n int64) ([]byte, error) {
			read()
			return body[off:][:n], nil
		})
	}
	sample(func() {
		if got := c.Next(d, mib); got != None || d.choice != Auto || due(&c, d.id) {
			t.Fatalf("%s was chosen for %s; another sample is due: %t", d.choice, got, due(&c, d.id))
		}
	})
	d.sampled = false
	sample(func() { panic("the source is confused") })
	if !due(&c, d.id) {
		t.Error("after a panic no sample is due")
	}
	sample(func() {})
	if c.Next(d, mib); d.choice == Auto {
		t.Error("nothing was chosen after a sample")
	}
}

// TestBusy: processor time of compressing is not the program's own work.
func TestBusy(t *testing.T) {
	if thread.ProcessTime() == 0 {
		t.Skip("needs a system that tells how long processors worked for a process")
	}
	var c Chooser
	d, _ := c.Disk(diskID)
	again := func(own time.Duration) float64 {
		c.busyLocked(d)
		begin := thread.ProcessTime()
		for now := begin; now-begin < 10*time.Millisecond; now = thread.ProcessTime() {
		}
		c.own += own
		return c.busyLocked(d)
	}
	if got := again(0); got <= 0 || got > 1 {
		t.Errorf("%v of the processors is busy", got)
	}
	if got := again(time.Hour); got != 0 {
		t.Errorf("%v of the processors is busy beside compressing, want 0", got)
	}
}

// TestOwnTime: compressing for a disk counts as processor time of its own, by the samples.
func TestOwnTime(t *testing.T) {
	var c Chooser
	d, _ := c.Disk(diskID)
	d.rates[Zstd] = rates{0.5, 1e-9, 2e-9}
	well := func() error { return nil }
	_ = c.Timed(Auto, tier.ID{Kind: tier.Host}, Zstd, true, 1<<30, well)
	_ = c.Timed(S2, diskID, Zstd, true, 1<<30, well)
	if c.own != 0 {
		t.Errorf("%v before anything was compressed for a disk", c.own)
	}
	_ = c.Timed(Auto, diskID, Zstd, true, 1e9, well)
	_ = c.Timed(Auto, diskID, Zstd, false, 1e9, well)
	if want := 3200 * time.Millisecond; c.own < want-time.Millisecond || c.own > want+time.Millisecond {
		t.Errorf("%v, want %v", c.own, want)
	}
}

// TestTimedDuringSamples: samples are taken while transfers go on. The race detector checks it.
func TestTimedDuringSamples(t *testing.T) {
	var c Chooser
	d, _ := c.Disk(diskID)
	var wg sync.WaitGroup
	wg.Go(func() {
		for range 10_000 {
			_ = c.Timed(Auto, diskID, S2, true, mib, func() error { return nil })
		}
	})
	for range 10_000 {
		c.mu.Lock()
		d.rates[S2].encode++
		c.mu.Unlock()
	}
	wg.Wait()
}
