package test

import (
	"bytes"
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// spyFS is a file system that has so much room, and that sees what is written to it.
type spyFS struct {
	disk.FS
	free int64
	mu   sync.Mutex
	seen bytes.Buffer
}

type spyFile struct {
	disk.File
	fs *spyFS
}

func (s *spyFS) Usage(dir string) (disk.Usage, error) {
	u, err := s.FS.Usage(dir)
	u.Free = s.free
	return u, err
}

func (s *spyFS) OpenAnonymous(dir string, direct bool) (disk.File, error) {
	f, err := s.FS.OpenAnonymous(dir, direct)
	if err != nil {
		return nil, err
	}
	return spyFile{f, s}, nil
}

func (f spyFile) WriteAt(p []byte, off int64) (int, error) {
	f.fs.mu.Lock()
	f.fs.seen.Write(p)
	f.fs.mu.Unlock()
	return f.File.WriteAt(p, off)
}

// saw returns whether text was written.
func (s *spyFS) saw(text string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return bytes.Contains(s.seen.Bytes(), []byte(text))
}

func spied(_ *testing.T, c *spillway.Config) { c.Disks[0].FS = &spyFS{FS: disk.OS(), free: 64 << 20} }

// overDevice is a decorator that knows whether it was closed.
type overDevice struct {
	tier.Device
	closed bool
}

func (d *overDevice) Close() error { d.closed = true; return d.Device.Close() }

// withDriver has two GPUs of 64 MiB.
func withDriver(t *testing.T, c *spillway.Config) {
	c.CUDALibrary = emulated(t, cudatest.Config{Devices: 2}).Path
	c.GPUs[0].Backend = spillway.Auto
}

// lookingPolicy counts the looks at what may be moved.
type lookingPolicy struct {
	monitor.Policy
	looks *atomic.Int64
}

func (p lookingPolicy) Order(now int64, list []monitor.Victim) {
	p.looks.Add(1)
	p.Policy.Order(now, list)
}

func watched(_ *testing.T, c *spillway.Config) {
	c.Policy = lookingPolicy{monitor.PlanOrder(), new(atomic.Int64)}
}

// pressed keeps the GPU above its trigger for so long, while there is nowhere to go.
func pressed(t *testing.T, eng *spillway.Engine, took time.Duration) {
	t.Helper()
	for _, s := range eng.Spaces()[1:] {
		defer full(t, s, eng)()
	}
	b := putOn(t, eng, tier.GPU, 2000)
	defer full(t, spaceAt(eng, tier.GPU, 0), eng)()
	time.Sleep(took)
	synctest.Wait()
	if b.Info().Space.Kind != tier.GPU {
		t.Error("it was moved: the test shows nothing")
	}
}

// movesAtOnce returns how many moves the monitor has under way at once from the GPU.
func movesAtOnce(t *testing.T, eng *spillway.Engine) int32 {
	var now, most atomic.Int32
	if err := eng.Registry().Wrap(convert.ImageIn(tier.GPU), convert.ImageIn(tier.Host), func(inner convert.Func) convert.Func {
		return func(ctx context.Context, src batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
			defer now.Add(-1)
			if n := now.Add(1); n > most.Load() {
				most.Store(n)
			}
			time.Sleep(10 * time.Millisecond)
			return inner(ctx, src, r)
		}
	}); err != nil {
		t.Fatal(err)
	}
	b := putOn(t, eng, tier.GPU, 2000)
	for range 4 {
		c, err := eng.Mover().Clone(t.Context(), b, eng.Observer())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Drop()
	}
	if err := spaceAt(eng, tier.GPU, 0).SetMarks(tier.Marks{Limit: 0.9, Trigger: 0.02, Stop: 0.01}); err != nil {
		t.Fatal(err)
	}
	time.Sleep(time.Second)
	return most.Load()
}

// guessing is an estimator of the test's.
type guessing struct{ admission.Estimator }
