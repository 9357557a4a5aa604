package test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/topology"
)

// patience is how long a test waits for what comes soon, before it says that it never does.
const patience = 2 * time.Minute

// thisMachine is the topology of the machine, for engines that need not discover it.
var thisMachine = sync.OnceValue(func() *topology.Topology {
	top, err := topology.Discover(context.Background(), topology.Options{})
	if err != nil {
		panic(err)
	}
	return top
})

// openSmall opens an engine with little memory and a disk in a directory of the
// test's.
func openSmall(t *testing.T, gpu, host int64) (*spillway.Engine, string) {
	t.Helper()
	dir := t.TempDir()
	eng, err := spillway.Open(t.Context(), spillway.Config{
		GPUs:          []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(gpu)}},
		HostMemory:    spillway.Bytes(host),
		Disks:         []spillway.DiskConfig{{Dir: dir, Capacity: spillway.Bytes(64 << 20)}},
		MonitorPeriod: time.Millisecond,
		Topology:      thisMachine(),
		Logger:        slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	return eng, dir
}

// TestCloseUnderLoad closes the engine while many goroutines do everything with it. They get the
// error of a closed engine, nothing crashes or hangs, and when they have released what they held
// every byte is back.
func TestCloseUnderLoad(t *testing.T) {
	t.Parallel()
	for seed := range testseed.Each(t, testseed.Rounds(6, 2)) {
		eng, dir := openSmall(t, 1<<20, 1<<20)
		plan, err := eng.Plan("load")
		if err != nil {
			t.Fatal(err)
		}
		repo, err := plan.Repository("scan", 0)
		if err != nil {
			t.Fatal(err)
		}
		run := &randomRun{eng: eng, repo: repo, words: wordList(seed, 1500), sources: make(map[int64]*source)}
		rng := rand.New(rand.NewPCG(seed, 77))
		var begun, ended sync.WaitGroup
		for w := range randomWorkers {
			begun.Add(1)
			ended.Go(func() {
				rng := rand.New(rand.NewPCG(seed, uint64(w+1)))
				for op := 0; ; op++ {
					err := run.step(t.Context(), rng)
					if w == 0 && op%32 == 31 && err == nil {
						_, err = eng.Trim(t.Context())
					}
					if op == 10 || err != nil && op < 10 {
						begun.Done()
					}
					if errors.Is(err, tier.ErrClosed) || errors.Is(err, io.EOF) {
						return
					}
					if err != nil && !errors.Is(err, batch.ErrState) {
						t.Errorf("seed %d, worker %d, operation %d: %v", seed, w, op, err)
						return
					}
				}
			})
		}
		begun.Wait()
		for range rng.IntN(2000) { // somewhere in the middle
			_ = eng.Stats()
		}
		var leak *spillway.LeakError
		if err := eng.Close(); err != nil && !errors.As(err, &leak) { // handles may be open still
			t.Errorf("seed %d: closing: %v", seed, err)
		}
		ended.Wait()
		for _, s := range eng.Stats().Spaces {
			if s.Used() != 0 {
				t.Errorf("seed %d: %s ends with %+v", seed, s.ID, s.Usage)
			}
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
			t.Errorf("the spill directory holds %v, %v", left, err)
		}
		if err := eng.Close(); !errors.Is(err, tier.ErrClosed) {
			t.Errorf("a second close: %v", err)
		}
	}
}

// TestTrim: what was used and is free goes back to the system, what is in use stays, and
// the spaces can be used as before.
func TestTrim(t *testing.T) {
	t.Parallel()
	const n = 32 << 20
	eng, _ := openSmall(t, 1<<20, 2*n)
	defer eng.Close()
	taken := func(size int64, where tier.Kind) *tier.Buffer {
		r, err := eng.Reserve(t.Context(), reservation.AnyInTier(where), size)
		if err != nil {
			t.Fatal(err)
		}
		buf, err := r.Alloc(size)
		if err := errors.Join(err, r.Release()); err != nil {
			t.Fatal(err)
		}
		switch m := buf.Memory().(type) {
		case tier.HostMemory:
			for _, b := range m.Extents() {
				for i := range b {
					b[i] = byte(i + 1)
				}
			}
		case tier.FileMemory:
			if err := m.WriteAt(t.Context(), make([]byte, size), 0); err != nil {
				t.Fatal(err)
			}
		}
		return buf
	}
	holds := func() (host, disk int64) {
		for _, s := range eng.Stats().Spaces {
			switch {
			case s.Host != nil:
				host += s.Host.Committed
			case s.Disk != nil:
				disk += s.Disk.Backed
			}
		}
		return host, disk
	}
	kept := taken(1<<20, tier.Host)
	for range 2 {
		if err := errors.Join(taken(n, tier.Host).Release(), taken(n, tier.Disk).Release()); err != nil {
			t.Fatal(err)
		}
		host, disk := holds()
		if host < n || disk < n {
			t.Fatalf("%d bytes of memory and %d of disk after they were used", host, disk)
		}
		given, err := eng.Trim(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		left, leftOnDisk := holds()
		if given < n+n/2 || host-left < n/2 || leftOnDisk != 0 || given < host-left+disk {
			t.Errorf("%d bytes were given back; memory had %d and has %d, disk had %d and has %d", given, host, left, disk, leftOnDisk)
		}
	}
	for _, b := range kept.Memory().(tier.HostMemory).Extents() {
		for i := range b {
			if b[i] != byte(i+1) {
				t.Fatalf("byte %d of memory in use is %d", i, b[i])
			}
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if n, err := eng.Trim(ctx); n != 0 || !errors.Is(err, context.Canceled) {
		t.Errorf("a Trim that was ended: %d, %v", n, err)
	}
	if err := errors.Join(kept.Release(), eng.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := eng.Trim(t.Context()); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("of a closed engine: %v", err)
	}
}

func TestCloseReportsWhatIsHeld(t *testing.T) {
	eng, _ := openSmall(t, 1<<20, 1<<20)
	gpu, err := eng.Reserve(t.Context(), reservation.AnyInTier(tier.GPU), 1000)
	if err != nil {
		t.Fatal(err)
	}
	host, err := eng.Reserve(t.Context(), reservation.AnyInTier(tier.Host), 5000)
	if err != nil {
		t.Fatal(err)
	}
	buf, err := host.Alloc(5000)
	if err := errors.Join(err, host.Release()); err != nil {
		t.Fatal(err)
	}
	var leak *spillway.LeakError
	if err := eng.Close(); !errors.As(err, &leak) || len(leak.Leaks) != 2 {
		t.Fatalf("closing with a reservation and a buffer: %v", err)
	}
	for _, want := range []string{"in gpu:0 1024 bytes of reservations", "in host:0 5120 bytes of buffers"} {
		if !strings.Contains(leak.Error(), want) {
			t.Errorf("%q does not say %q", leak.Error(), want)
		}
	}
	if err := errors.Join(gpu.Release(), buf.Release()); err != nil {
		t.Error(err)
	}
	for _, s := range eng.Stats().Spaces {
		if s.Used() != 0 {
			t.Errorf("%s ends with %+v", s.ID, s.Usage)
		}
	}
}

func TestOpenRefuses(t *testing.T) {
	sim := func(memory ...int64) (gpus []spillway.GPUConfig) {
		for _, n := range memory {
			gpus = append(gpus, spillway.GPUConfig{Backend: spillway.Sim, Memory: spillway.Bytes(n)})
		}
		return gpus
	}
	small := []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(1 << 20)}}
	for name, c := range map[string]struct {
		cfg  spillway.Config
		want error
		says string
	}{
		"more host memory than there is": {spillway.Config{HostMemory: spillway.Bytes(1 << 50), Disks: small}, tier.ErrNoSpace, "HostMemory: "},
		"more GPU memory than there is":  {spillway.Config{GPUs: sim(1 << 50), Disks: small}, tier.ErrNoSpace, "simulated GPU"},
		"sizes that overflow together":   {spillway.Config{GPUs: sim(1<<63-1, 1<<63-1), Disks: small}, tier.ErrNoSpace, "simulated GPU"},
		"more in spaces than there is":   {spillway.Config{Hosts: []spillway.HostConfig{{Memory: spillway.Bytes(1 << 49)}, {Memory: spillway.Bytes(1 << 49)}}, Disks: small}, tier.ErrNoSpace, "host memory"},
		"no CUDA":                        {spillway.Config{GPUs: []spillway.GPUConfig{{Backend: spillway.CUDA}}, CUDALibrary: "/nowhere/libcuda.so", Disks: small}, tier.ErrNotSupported, "CUDA"},
		"an unknown backend":             {spillway.Config{GPUs: []spillway.GPUConfig{{Backend: "opencl"}}, Disks: small}, nil, "opencl"},
		"negative memory":                {spillway.Config{HostMemory: spillway.Bytes(-1), Disks: small}, nil, "negative"},
		"marks in the wrong order":       {spillway.Config{GPUMarks: tier.Marks{Trigger: 0.5, Stop: 0.6}, Disks: small}, nil, "stop"},
		"a key that is too short":        {spillway.Config{Disks: []spillway.DiskConfig{{Dir: small[0].Dir, Capacity: spillway.Bytes(1 << 20), Encrypt: true, Key: make([]byte, 20)}}}, nil, "disk:0: the key has 20 bytes"},
		"kept with a key that is made":   {spillway.Config{Disks: []spillway.DiskConfig{{Dir: small[0].Dir, Capacity: spillway.Bytes(1 << 20), Encrypt: true, Persist: true}}}, nil, "disk:0: Persist with Encrypt needs a Key"},
		"a key for nothing":              {spillway.Config{Disks: []spillway.DiskConfig{{Dir: small[0].Dir, Capacity: spillway.Bytes(1 << 20), Key: make([]byte, 32)}}}, nil, "Encrypt is not set"},
		"a monitor that never rests":     {spillway.Config{MonitorPeriod: 1, Disks: small}, nil, "monitor period 1ns: want at least 100µs"},
		"a directory that is not there":  {spillway.Config{Disks: []spillway.DiskConfig{{Dir: small[0].Dir + "/missing", Capacity: spillway.Bytes(1 << 20)}}}, nil, "missing: the directory does not exist"},
	} {
		t.Run(name, func(t *testing.T) {
			if c.cfg.HostMemory.IsZero() && c.cfg.Hosts == nil { // the default is much, and of Go's heap if the race detector is on
				c.cfg.HostMemory = spillway.Bytes(1 << 20)
			}
			eng, err := spillway.Open(t.Context(), c.cfg)
			if err == nil {
				t.Fatal(errors.Join(errors.New("opened"), eng.Close()))
			}
			if c.want != nil && !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "\n") {
				t.Errorf("%v", err)
			}
		})
	}
}

// What fits under host memory's limit, but not beside the engine's own staging, goes to disk: that
// room could never be made.
func TestPutBesideStaging(t *testing.T) {
	eng, _ := openSmall(t, 64<<10, 1<<20)
	plan, err := eng.Plan("p")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := plan.Repository("scan", 0)
	if err != nil {
		t.Fatal(err)
	}
	host, _ := eng.Reservations().Spaces().ByID(tier.ID{Kind: tier.Host})
	rows := 0
	for rows = 1000; ; rows += 500 {
		rec := numberedRecord(1, rows, wordList(1, 10))
		var placed *batch.Batch
		err := repo.Put(t.Context(), 0, rec, repository.WithPlacement(reservation.AnyInTier(tier.GPU)))
		for b := range repo.Batches(0) {
			placed = b
		}
		if err != nil {
			t.Fatalf("%d rows: %v", rows, err)
		}
		body := placed.Info().Descriptor.Body
		if body > host.State().Room && body <= host.State().Limit {
			if k := placed.Info().Space.Kind; k != tier.Disk {
				t.Errorf("%d bytes lie in %s", body, k)
			}
			break
		}
		if body > host.State().Limit {
			t.Fatal("no size was between room and limit")
		}
		taken, err := repo.Take(context.Background(), 0, batch.Idle)
		if err := errors.Join(err, taken.Discard(t.Context())); err != nil {
			t.Fatal(err)
		}
	}
	if err := eng.Close(); err != nil {
		t.Error(err)
	}
}

// openWith opens an engine whose repositories the test fills.
func openWith(t *testing.T, gpu, host int64) (*spillway.Engine, *repository.Repository) {
	t.Helper()
	eng, _ := openSmall(t, gpu, host)
	t.Cleanup(func() {
		if err := eng.Close(); err != nil {
			t.Error(err)
		}
	})
	return eng, scanOf(t, eng)
}

// scanOf makes a plan with one repository.
func scanOf(t testing.TB, eng *spillway.Engine) *repository.Repository {
	t.Helper()
	plan, err := eng.Plan("p")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := plan.Repository("scan", 0)
	if err != nil {
		t.Fatal(err)
	}
	return repo
}

// A Put into a space in pieces waits for batches that can leave, and not for the handle that its
// caller holds.
func TestPutIntoPiecesWhileHolding(t *testing.T) {
	_, repo := openWith(t, 1<<20, 4<<20)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // only a hang takes so long
	defer cancel()
	words := wordList(1, 1)
	gpu := repository.WithPlacement(reservation.AnyInTier(tier.GPU))
	for i := range 9 {
		if err := repo.Put(ctx, i%2, numberedRecord(int64(i), []int{20, 5000}[i%2], words), gpu); err != nil {
			t.Fatal(err)
		}
	}
	for h, err := range repo.Drain(ctx, 1, tier.GPU) { // holes
		if err := errors.Join(err, h.Close()); err != nil {
			t.Fatal(err)
		}
	}
	for h, err := range repo.Drain(ctx, 0, tier.GPU) {
		if err != nil {
			t.Fatal(err)
		}
		err := repo.Put(ctx, 2, numberedRecord(99, 15_000, words), gpu)
		if err := errors.Join(err, h.Close()); err != nil {
			t.Fatal(err)
		}
	}
}

// A caller that waits for a batch stops waiting for room when another brings it, or drops it.
func TestAcquireWhatOthersBring(t *testing.T) {
	eng, repo := openWith(t, 1<<20, 4<<20)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	words := wordList(1, 1)
	put := func(partition int, k tier.Kind) *batch.Batch {
		if err := repo.Put(ctx, partition, numberedRecord(int64(partition), 15_000, words), repository.WithPlacement(reservation.AnyInTier(k))); err != nil {
			t.Fatal(err)
		}
		b, ok := repo.Peek(partition)
		if !ok {
			t.Fatal("the batch is not there")
		}
		return b
	}
	gpu := reservation.AnyInTier(tier.GPU)
	y, x := put(0, tier.GPU), put(1, tier.Host)
	held, err := eng.Mover().Acquire(ctx, y, gpu)
	if err != nil {
		t.Fatal(err)
	}
	handles := make(chan *batch.Handle)
	for range 2 {
		go func() {
			h, err := eng.Mover().Acquire(ctx, x, gpu)
			if err != nil {
				t.Error(err)
			}
			handles <- h
		}()
	}
	if err := held.Close(); err != nil {
		t.Fatal(err)
	}
	one, two := <-handles, <-handles // the second while the first is open
	z := put(2, tier.Host)
	dropped := make(chan error)
	go func() {
		_, err := eng.Mover().Acquire(ctx, z, gpu) // there is no room while x is held
		dropped <- err
	}()
	if err := z.Discard(ctx); err != nil {
		t.Fatal(err)
	}
	if err := <-dropped; !errors.Is(err, batch.ErrState) {
		t.Errorf("acquiring what is dropped: %v", err)
	}
	if err := errors.Join(one.Close(), two.Close()); err != nil {
		t.Error(err)
	}
}

// Clones that are handed to a repository move down like other batches.
func TestClonesAreSpilled(t *testing.T) {
	eng, repo := openWith(t, 1<<20, 4<<20)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	words := wordList(1, 1)
	gpu := repository.WithPlacement(reservation.AnyInTier(tier.GPU))
	if err := repo.Put(ctx, 0, numberedRecord(1, 6000, words), gpu); err != nil {
		t.Fatal(err)
	}
	first, _ := repo.Peek(0)
	for range 3 {
		c, err := eng.Mover().Clone(ctx, first, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := repo.PutBatch(0, c); err != nil {
			t.Fatal(err)
		}
	}
	if err := repo.Put(ctx, 1, numberedRecord(2, 15_000, words), gpu); err != nil {
		t.Fatal(err)
	}
}

// The least host memory, with the lowest marks, has room for staging still.
func TestOpenWithTheLeast(t *testing.T) {
	eng, err := spillway.Open(t.Context(), spillway.Config{
		GPUs: []spillway.GPUConfig{{Memory: spillway.Bytes(64 << 10)}}, HostMemory: spillway.Bytes(256 << 10),
		HostMarks: tier.Marks{Limit: 0.2, Trigger: 0.15, Stop: 0.1},
		Disks:     []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(1 << 20)}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := eng.Close(); err != nil {
		t.Error(err)
	}
}

// An engine that is closed while a plan is being closed waits for it.
func TestCloseWhileAPlanCloses(t *testing.T) {
	t.Parallel()
	for range 20 {
		eng, _ := openSmall(t, 1<<20, 1<<20)
		plan, err := eng.Plan("p")
		if err != nil {
			t.Fatal(err)
		}
		repo, err := plan.Repository("scan", 0)
		if err != nil {
			t.Fatal(err)
		}
		for i := range 20 {
			if err := repo.Put(t.Context(), 0, numberedRecord(int64(i), 500, wordList(1, 1))); err != nil {
				t.Fatal(err)
			}
		}
		closed := make(chan error)
		go func() {
			_, err := plan.Close()
			closed <- err
		}()
		if err := errors.Join(eng.Close(), <-closed); err != nil {
			t.Fatal(err)
		}
	}
}
