package volumes_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// throttled opens a volume that writes so many MiB a second, on the clock of a bubble.
// The returned function changes that.
func throttled(t *testing.T, cfg volumes.Config, rate int64) (*volumes.Volume, func(rate int64)) {
	f := faultfs.New(disk.OS(), 1)
	var end func()
	set := func(rate int64) {
		if end != nil {
			end()
		}
		end = f.Add(faultfs.Rule{Ops: []string{"write"}, Effect: faultfs.Throttle(rate * mib)})
	}
	cfg.FS = f
	if cfg.Capacity == 0 {
		cfg.Capacity = 256 * mib
	}
	v := open(t, cfg) // at full speed, for it writes a page
	set(rate)
	return v, set
}

// near fails unless got is want but for a hundredth.
func near(t *testing.T, what string, got, want float64) {
	t.Helper()
	if got < want*0.99 || got > want*1.01 {
		t.Errorf("%s is %v; want %v", what, got, want)
	}
}

// The bandwidth is measured while writes are under way, however many, and not in
// between.
func TestBandwidthIsMeasured(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, _ := throttled(t, volumes.Config{}, 10)
		if s := v.Stats(); s.Bandwidth != 0 || s.Writing != 0 || s.Backlog != 0 || s.Ailing {
			t.Errorf("before anything was written: %+v", s)
		}
		e := alloc(t, v, 20*mib)
		data := random(5*mib, 1)
		write(t, e, data, 0)
		near(t, "the bandwidth", float64(v.Stats().Bandwidth), 10*mib)
		time.Sleep(time.Hour)
		var wg sync.WaitGroup
		for i := range int64(3) {
			wg.Go(func() { write(t, e, data, (i+1)*5*mib) })
		}
		wg.Wait()
		s := v.Stats()
		near(t, "the bandwidth for three writers", float64(s.Bandwidth), 10*mib)
		near(t, "the time of writing", s.Writing.Seconds(), 2)
		read(t, e, 20*mib, 0)
		if after := v.Stats(); after.Bandwidth != s.Bandwidth || after.Writing != s.Writing {
			t.Errorf("a read changed it: %+v", after)
		}
		free(v, e)
	})
}

// A volume that becomes faster is found out as soon as one that becomes slower, though
// its writes take less time.
func TestBandwidthIsFollowed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, set := throttled(t, volumes.Config{}, 8)
		e := alloc(t, v, 4*mib)
		data := random(4*mib, 1)
		seconds := func(n, rate int64) { // writes as many bytes as that takes so long
			for left := n * rate * mib; left > 0; left -= int64(len(data)) {
				write(t, e, data[:min(left, int64(len(data)))], 0)
			}
		}
		seconds(6, 8)
		near(t, "the bandwidth", float64(v.Stats().Bandwidth), 8*mib)
		set(1)
		seconds(6, 1)
		if got := float64(v.Stats().Bandwidth); got < mib*0.99 || got > 1.05*mib {
			t.Errorf("the bandwidth when slower is %v; want some 1 MiB/s", got)
		}
		set(16)
		seconds(6, 1) // what took six seconds, and takes less than half of one
		if got := float64(v.Stats().Bandwidth); got < 8*mib {
			t.Errorf("the bandwidth when faster is %v; want some 16 MiB/s", got)
		}
		free(v, e)
	})
}

// The backlog is what was handed out and not written, and nothing stays in it.
func TestBacklog(t *testing.T) {
	f := faultfs.New(disk.OS(), 1)
	v := open(t, volumes.Config{Capacity: 64 * mib, FS: f})
	want := func(when string, n int64) {
		t.Helper()
		if got := v.Stats().Backlog; got != n {
			t.Errorf("%s the backlog is %d bytes; want %d", when, got, n)
		}
	}
	a, b := alloc(t, v, 3*page), alloc(t, v, 10)
	want("with two memories", 3*page+10)
	write(t, a, random(page, 1), 0)
	want("when a page is written", 2*page+10)
	for range 5 {
		write(t, a, random(page, 1), page)
	}
	want("when more was written than there is", 10)
	write(t, b, random(10, 1), 0)
	want("when all is written", 0)
	c := alloc(t, v, 2*page)
	end := f.Add(faultfs.Rule{Ops: []string{"write"}, Effect: faultfs.Fail(syscall.EIO)})
	if err := c.WriteAt(context.Background(), random(page, 1), 0); !errors.Is(err, syscall.EIO) {
		t.Errorf("a write that fails: %v", err)
	}
	want("when a write has failed", 2*page)
	end()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := c.WriteAt(ctx, random(page, 1), 0); !errors.Is(err, context.Canceled) {
		t.Errorf("a write that is cancelled: %v", err)
	}
	want("when a write was cancelled", 2*page)
	free(v, a, b, c)
	want("when all is free", 0)
}

func TestBacklogUnderRaces(t *testing.T) {
	seed := testseed.One(t)
	f := faultfs.New(disk.OS(), 1, faultfs.Rule{Ops: []string{"write"}, Skip: 1, Probability: 0.2, Effect: faultfs.Fail(syscall.EIO)})
	v := open(t, volumes.Config{Capacity: 64 * mib, FS: f})
	data := random(4*page, 1)
	var wg sync.WaitGroup
	for w := range uint64(8) {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(seed, w))
			for range 50 {
				m, err := v.Alloc(1+rng.Int64N(8*page), nil)
				if err != nil {
					t.Error(err)
					return
				}
				e := m.(tier.FileMemory)
				for range rng.IntN(4) {
					off := rng.Int64N(e.Size())
					_ = e.WriteAt(context.Background(), data[:rng.Int64N(min(4*page, e.Size()-off)+1)], off)
					if p := v.Pace(); p.Lead < 0 || p.Bandwidth <= 0 {
						t.Errorf("%+v", p)
					}
				}
				v.Free(e, func() {})
			}
		})
	}
	wg.Wait()
	if s := v.Stats(); s.Backlog != 0 {
		t.Errorf("in the end the backlog is %d bytes", s.Backlog)
	}
}

// The lead is the time of writing and of what is still to be written; a write that
// hangs counts as it goes on.
func TestLead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		files := faultfs.New(disk.OS(), 1)
		v := open(t, volumes.Config{Capacity: 256 * mib, FS: files})
		slow := func(e faultfs.Effect) (end func()) {
			return files.Add(faultfs.Rule{Ops: []string{"write"}, Effect: e})
		}
		lead := func(when string, seconds float64) {
			t.Helper()
			near(t, "the lead "+when, v.Pace().Lead.Seconds(), seconds)
		}
		e := alloc(t, v, 16*mib)
		end := slow(faultfs.Throttle(2 * mib))
		write(t, e, random(2*mib, 1), 0)
		lead("with 14 MiB to be written", 1+7)
		end()
		defer slow(faultfs.Slow(time.Second))()
		done := make(chan struct{})
		go func() {
			defer close(done)
			write(t, e, random(page, 1), 2*mib)
		}()
		time.Sleep(time.Second / 2)
		lead("in the middle of a write", 1+7+0.5)
		<-done
		near(t, "the time of writing at its end", v.Stats().Writing.Seconds(), 2)
		at := v.Pace().Lead
		time.Sleep(time.Hour)
		lead("an hour later", at.Seconds())
		free(v, e)
		lead("when the rest will not be written", 2)
	})
}

// A volume that was full does not make up for all that others were given meanwhile;
// one that is by itself has nothing to make up for.
func TestCatchUpIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stripe := new(volumes.Stripe)
		a, _ := throttled(t, volumes.Config{Stripe: stripe}, 1)
		b, _ := throttled(t, volumes.Config{Stripe: stripe}, 1)
		alone, _ := throttled(t, volumes.Config{}, 1)
		for range 10 {
			e := alloc(t, a, 3*mib)
			write(t, e, random(3*mib, 1), 0)
			free(a, e)
		}
		for _, v := range []*volumes.Volume{b, alone} {
			e := alloc(t, v, page)
			free(v, e)
		}
		near(t, "the lead of the busy volume", a.Pace().Lead.Seconds(), 30)
		near(t, "that of the one that was passed by", b.Pace().Lead.Seconds(), 26) // the last batch began at 27
		if p := alone.Pace(); p.Lead != 0 {
			t.Errorf("a volume by itself is ahead by %v", p.Lead)
		}
		for _, v := range []*volumes.Volume{a, b, alone} { // each opened files after the next one was opened
			if err := v.Close(); err != nil {
				t.Error(err)
			}
		}
	})
}

// After a failure a volume is ailing for a second, and then longer and longer, until a
// write succeeds.
func TestAiling(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := faultfs.New(disk.OS(), 1)
		v := open(t, volumes.Config{Capacity: 256 * mib, Request: page, FS: f})
		heal := f.Add(faultfs.Rule{Ops: []string{"write"}, Effect: faultfs.Fail(syscall.EIO)})
		ailsFor := func(d time.Duration) {
			t.Helper()
			if time.Sleep(d - 1); !v.Pace().Ailing || !v.Stats().Ailing {
				t.Errorf("it is well again before %v", d)
			}
			if time.Sleep(time.Nanosecond); v.Pace().Ailing || v.Stats().Ailing {
				t.Errorf("it is not well again after %v", d)
			}
		}
		fail := func() {
			t.Helper()
			e := alloc(t, v, 16*page)
			// Several requests fail, and later another transfer does: they are one failure.
			for range 2 {
				if err := e.WriteAt(context.Background(), random(16*page, 1), 0); !errors.Is(err, syscall.EIO) {
					t.Errorf("a write that fails: %v", err)
				}
			}
			free(v, e)
		}
		if v.Pace().Ailing {
			t.Error("it begins ailing")
		}
		for _, d := range []time.Duration{1, 2, 4, 8, 16, 32, 64, 64} {
			fail()
			ailsFor(d * time.Second)
		}
		// One tries whether it works again; until that is known the others go elsewhere.
		e := alloc(t, v, 16*page)
		if !v.Pace().Ailing {
			t.Error("while one tries, others do too")
		}
		heal()
		write(t, e, random(page, 1), 0)
		if v.Pace().Ailing {
			t.Error("it is ailing though a write has succeeded")
		}
		free(v, e)
		f.Add(faultfs.Rule{Ops: []string{"allocate"}, Effect: faultfs.Fail(syscall.ENOSPC)})
		if _, err := v.Alloc(100*mib, nil); !errors.Is(err, tier.ErrNoSpace) || !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("a full file system: %v", err)
		}
		if v.Pace().Ailing {
			ailsFor(time.Second)
		} else {
			t.Error("it is well though its file system is full")
		}
	})
}

// What a volume cannot hold by its own capacity is no failure of its.
func TestFullIsNotAiling(t *testing.T) {
	v := open(t, volumes.Config{Capacity: 4 * page})
	e := alloc(t, v, 4*page)
	if _, err := v.Alloc(1, nil); !errors.Is(err, tier.ErrNoSpace) {
		t.Errorf("more than there is: %v", err)
	}
	if v.Pace().Ailing {
		t.Error("a volume that is full is ailing")
	}
	free(v, e)
}

// A write that fails after half a minute, as disks do, takes nothing from the bandwidth.
func TestFailureIsNoBandwidth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broken := faultfs.New(disk.OS(), 1)
		slow := faultfs.New(broken, 1)
		v := open(t, volumes.Config{Capacity: 64 * mib, FS: slow})
		end := slow.Add(faultfs.Rule{Ops: []string{"write"}, Effect: faultfs.Throttle(10 * mib)})
		e := alloc(t, v, 20*mib)
		write(t, e, random(10*mib, 1), 0)
		end()
		slow.Add(faultfs.Rule{Ops: []string{"write"}, Effect: faultfs.Slow(40 * time.Second)})
		broken.Add(faultfs.Rule{Ops: []string{"write"}, Effect: faultfs.Fail(syscall.EIO)})
		if err := e.WriteAt(t.Context(), random(page, 1), 10*mib); !errors.Is(err, syscall.EIO) {
			t.Errorf("a write that fails: %v", err)
		}
		near(t, "the bandwidth", float64(v.Stats().Bandwidth), 10*mib)
		near(t, "the lead", v.Pace().Lead.Seconds(), 1+40+1)
		free(v, e)
	})
}

func TestPaceDoesNotAllocate(t *testing.T) {
	if invariants.Enabled {
		t.Skip("needs a build without -tags invariants, whose checks of ranks allocate")
	}
	v := open(t, volumes.Config{Capacity: mib})
	if n := testing.AllocsPerRun(100, func() { v.Pace() }); n != 0 {
		t.Errorf("it allocates %v times", n)
	}
}
