package bandwidth

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/tier"
)

// emulated opens an engine on an emulated GPU, with 2 MiB of each memory and these disks. When the
// test ends it holds what it held, and nothing is left in the driver.
func emulated(t *testing.T, disks ...spillway.DiskConfig) *spillway.Engine {
	t.Helper()
	return emulatedBy(t, cudatest.New(t, cudatest.Config{Memory: 4 << 20}), disks...)
}

func emulatedBy(t *testing.T, emulator *cudatest.Emulator, disks ...spillway.DiskConfig) *spillway.Engine {
	t.Helper()
	eng, err := spillway.Open(t.Context(), spillway.Config{
		GPUs: []spillway.GPUConfig{{Backend: spillway.CUDA, Memory: spillway.Bytes(2 << 20)}}, CUDALibrary: emulator.Path, HostMemory: spillway.Bytes(2 << 20),
		Disks: append([]spillway.DiskConfig{}, disks...), Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	held := used(eng)
	t.Cleanup(func() {
		givenBack(t, eng, held)
		if err := eng.Close(); err != nil {
			t.Errorf("closing the engine: %v", err)
		}
		for _, leak := range emulator.Leaks() {
			t.Error(leak)
		}
	})
	return eng
}

// givenBack waits until the spaces hold what they held: what was freed comes back when the device
// is done with it.
func givenBack(t *testing.T, eng *spillway.Engine, held []int64) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !slices.Equal(used(eng), held) && time.Now().Before(deadline); {
		runtime.Gosched()
	}
	if now := used(eng); !slices.Equal(now, held) {
		t.Errorf("the spaces hold %d bytes; before it was %d", now, held)
	}
}

// TestByDriver: with a GPU that a driver serves the limit is the driver's copy, and an even number
// of moves is measured in both directions at once, too.
func TestByDriver(t *testing.T) {
	cfg := small(emulated(t))
	cfg.Threads = []int{1, 2, 4}
	var s steps
	cfg.Progress = &s
	rows, skipped, err := Run(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if len(skipped) != 1 || skipped[0].Threads != 4 || skipped[0].Bytes != 256<<10 { // 1 MiB, and as much beside
		t.Errorf("left out %v", skipped)
	}
	var got, want []string
	for _, r := range rows {
		got = append(got, fmt.Sprintf("%d %d %s %s %s %v", r.Bytes>>10, r.Threads, r.From, r.To, r.LimitOf, r.BothWays))
		figures := []float64{r.GiBPerS, r.Limit, r.Efficiency}
		if r.BothWays {
			figures = append(figures, r.Gain, r.LimitGain)
		}
		for i, v := range figures {
			if !(v > 0) || math.IsInf(v, 0) {
				t.Errorf("figure %d is %v: %+v", i, v, r)
			}
		}
	}
	for _, load := range []string{"64 1", "64 2", "64 4", "256 1", "256 2"} {
		want = append(want, load+" gpu:0 host:0 driver's copy false", load+" host:0 gpu:0 driver's copy false")
		if load[len(load)-1] != '1' {
			want = append(want, load+" gpu:0 host:0 driver's copy true")
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("rows are %q\nwant     %q", got, want)
	}
	if s.done != s.promised {
		t.Errorf("%d steps of %d", s.done, s.promised)
	}
}

// TestByDriverCancelled: wherever it is, it ends with the cause, and all is given back.
func TestByDriverCancelled(t *testing.T) {
	eng := emulated(t)
	cause := errors.New("enough")
	for _, at := range []int64{1, 4, 5} { // each way, and both ways
		ctx, cancel := context.WithCancelCause(t.Context())
		cfg := small(eng)
		cfg.Threads = []int{2}
		cfg.Progress = &steps{at: at, then: func() { cancel(cause) }}
		if rows, _, err := Run(ctx, cfg); !errors.Is(err, cause) || rows != nil {
			t.Errorf("cancelled at step %d it ends with %v and %d rows", at, err, len(rows))
		}
		cancel(nil)
	}
}

// TestFitByDriver: what the driver copies takes as much of the memories as the batches do, and
// nothing of the disk.
func TestFitByDriver(t *testing.T) {
	cfg := small(emulated(t, spillway.DiskConfig{Dir: t.TempDir(), Capacity: spillway.Bytes(768 << 10)}))
	cfg.Sizes, cfg.Threads = []int64{512 << 10, 1 << 20}, []int{1}
	skipped, err := Fit(cfg)
	var full *tier.NoSpaceError
	if err != nil || len(skipped) != 1 || skipped[0].Bytes != 1<<20 || !errors.As(skipped[0], &full) || full.Space.Kind != tier.GPU || full.Requested != 2<<20 {
		t.Errorf("left out %v, %v", skipped, err)
	}
}

// TestLanes: what the driver copies arrives, all of it.
func TestLanes(t *testing.T) {
	eng := emulated(t)
	b := bench{cfg: small(eng), load: load{256 << 10, 2}}
	gpu, host := eng.Spaces()[0], eng.Spaces()[1]
	all, err := b.newLanes(t.Context(), gpu, host)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := all.close(); err != nil {
			t.Error(err)
		}
		for _, l := range all {
			if err := l.stream.Close(); !errors.Is(err, tier.ErrClosed) {
				t.Errorf("a stream was left open: %v", err)
			}
		}
	}()
	memory := func(l *lane) (whole []byte) {
		for _, piece := range l.host.Memory().(tier.HostMemory).Extents() {
			whole = append(whole, piece...)
		}
		return whole
	}
	for i, l := range all {
		for _, piece := range l.host.Memory().(tier.HostMemory).Extents() {
			for j := range piece {
				piece[j] = byte(j*7 + i)
			}
		}
	}
	want := [][]byte{memory(all[0]), memory(all[1])}
	if err := all.copyAll(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	for _, l := range all {
		for _, piece := range l.host.Memory().(tier.HostMemory).Extents() {
			clear(piece)
		}
	}
	if err := all.copyAll(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	for i, l := range all {
		if got := memory(l); !bytes.Equal(got, want[i]) || int64(len(got)) != b.load.bytes {
			t.Errorf("lane %d: other bytes come back, %d of them", i, len(got))
		}
	}
}

// TestLanesRefused: where the driver refuses what lanes are made of, what they had is given back.
func TestLanesRefused(t *testing.T) {
	emulator := cudatest.New(t, cudatest.Config{Memory: 4 << 20})
	eng := emulatedBy(t, emulator)
	b := bench{cfg: small(eng), load: load{64 << 10, 2}}
	held, streams := used(eng), emulator.Live("streams")
	for _, call := range []string{"cuMemAllocFromPoolAsync", "cuStreamCreate", "cuMemcpyHtoDAsync_v2"} {
		for lane := range int64(b.load.threads) {
			emulator.Fail(call, lane, cuda.ErrInvalidValue, 1)
			if _, err := b.newLanes(t.Context(), eng.Spaces()[0], eng.Spaces()[1]); !errors.Is(err, cuda.ErrInvalidValue) {
				t.Fatalf("%s refused to lane %d: %v", call, lane, err)
			}
			givenBack(t, eng, held)
			if now := emulator.Live("streams"); now != streams || t.Failed() {
				t.Fatalf("%s refused to lane %d: %d streams are open; before it was %d", call, lane, now, streams)
			}
		}
	}
}

// TestExchange: both go at once, and come back one after the other, in each turn.
func TestExchange(t *testing.T) {
	var mu sync.Mutex
	var did []string
	meet := make(chan struct{})
	note := func(what string) {
		mu.Lock()
		defer mu.Unlock()
		did = append(did, what)
	}
	s := exchange(
		func(context.Context) error { note("at once"); meet <- struct{}{}; return nil },
		func(context.Context) error { note("at once"); <-meet; return nil }, // so neither can end before the other has begun
		func(context.Context) error { note("first"); return nil },
		func(context.Context) error { note("second"); return nil },
	)
	for range 2 {
		for _, f := range []transfer{s.there, s.back, s.back} {
			if err := f(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	one := []string{"at once", "at once", "first", "second"}
	if want := slices.Concat(one, one); !slices.Equal(did, want) {
		t.Errorf("it did %q", did)
	}
	if g := gain([]float64{1, 2, 1}, []float64{1, 1, 1}, []float64{1, 1, 0.5}); g != 1.5 { // of 2, 1, 1.5
		t.Errorf("the gain is %v", g)
	}
}

// TestBetween: only edges between kinds that are asked for are measured.
func TestBetween(t *testing.T) {
	cfg := small(engine(t))
	cfg.Sizes, cfg.Threads, cfg.Between = cfg.Sizes[:1], []int{1}, []tier.Kind{tier.Host, tier.GPU}
	rows, _, err := Run(t.Context(), cfg)
	if err != nil || len(rows) != 2 {
		t.Fatalf("%d rows, %v", len(rows), err)
	}
	for _, r := range rows {
		if r.From.Kind == tier.Disk || r.To.Kind == tier.Disk || r.LimitOf != Memmove {
			t.Errorf("%+v", r)
		}
	}

	// Where there are none nothing is made ready.
	cfg.Between, cfg.Progress = cfg.Between[:1], beginning{f: func(phase string) { t.Errorf("it begins with %s", phase) }}
	if rows, _, err := Run(t.Context(), cfg); err != nil || len(rows) != 0 {
		t.Errorf("between one kind: %d rows, %v", len(rows), err)
	}
}

// beginning calls f at the beginning of each phase.
type beginning struct {
	silent
	f func(phase string)
}

func (b beginning) Begin(phase string, _ int64) { b.f(phase) }
