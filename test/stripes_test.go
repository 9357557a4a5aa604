package test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"math"
	"math/rand/v2"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
	"github.com/spillway-db/spillway/topology"
)

var host0 = tier.ID{Kind: tier.Host}

func diskAt(i int) tier.ID { return tier.ID{Kind: tier.Disk, Ordinal: i} }

// striped is an engine whose volumes are on file systems that write at a rate of the
// test's, on the clock of a bubble.
type striped struct {
	t     *testing.T
	eng   *spillway.Engine
	files []*faultfs.FS
	slow  []func() // ends a throttle
	kept  []*batch.Batch
	next  int64
}

// machineTopology is looked up outside of the bubbles, whose clocks wait for reads.
var machineTopology = sync.OnceValues(func() (*topology.Topology, error) {
	return topology.Discover(context.Background(), topology.Options{})
})

// batchBytes is the size of a batch, but for the little that its image has beside the rows.
const batchBytes = 32 << 10

// openStriped opens an engine with a volume for each rate, in batches a second.
func openStriped(t *testing.T, cfg spillway.Config, rates ...int64) *striped {
	t.Helper()
	topo, err := machineTopology()
	if err != nil {
		t.Fatal(err)
	}
	s := &striped{t: t, slow: make([]func(), len(rates))}
	capacities := make([]int64, len(rates))
	for i := range cfg.Disks {
		capacities[i] = cfg.Disks[i].Capacity.Bytes
	}
	cfg.Disks = nil
	for i, rate := range rates {
		s.files = append(s.files, faultfs.New(disk.OS(), 1))
		s.throttle(i, rate)
		d := spillway.DiskConfig{Dir: t.TempDir(), Capacity: spillway.Bytes(32 << 20), FS: s.files[i]}
		if capacities[i] > 0 {
			d.Capacity = spillway.Bytes(capacities[i])
		}
		cfg.Disks = append(cfg.Disks, d)
	}
	cfg.GPUs = []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(2 << 20)}}
	if cfg.HostMemory.IsZero() {
		cfg.HostMemory = spillway.Bytes(24 << 20)
	}
	cfg.Topology, cfg.Logger = topo, slog.New(slog.NewTextHandler(io.Discard, nil))
	if s.eng, err = spillway.Open(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.close)
	return s
}

// throttle makes volume i write so many batches a second.
func (s *striped) throttle(i int, rate int64) {
	if s.slow[i] != nil {
		s.slow[i]()
	}
	s.slow[i] = s.files[i].Add(faultfs.Rule{Ops: []string{"write"}, Effect: faultfs.Throttle(rate * batchBytes)})
}

func (s *striped) close() {
	for _, b := range s.kept {
		if err := b.Discard(context.Background()); err != nil {
			s.t.Error(err)
		}
	}
	if err := s.eng.Close(); err != nil {
		s.t.Error(err)
	}
	for i, f := range s.files {
		if n := f.Open(); n != 0 {
			s.t.Errorf("volume %d: %d files are open in the end", i, n)
		}
	}
}

func (s *striped) stats(i int) disk.Stats {
	s.t.Helper()
	space, ok := s.eng.Reservations().Spaces().ByID(diskAt(i))
	if !ok {
		s.t.Fatalf("there is no disk:%d", i)
	}
	return space.Pool.(*volumes.Volume).Stats()
}

// written returns how many bytes each volume has written so far.
func (s *striped) written() []int64 {
	n := make([]int64, len(s.files))
	for i := range n {
		n[i] = s.stats(i).Written
	}
	return n
}

// record has batchBytes.
func (s *striped) record() arrow.RecordBatch {
	b := array.NewInt64Builder(memory.DefaultAllocator)
	defer b.Release()
	values := make([]int64, batchBytes/8)
	for i := range values {
		s.next++
		values[i] = s.next
	}
	b.AppendValues(values, nil)
	column := b.NewArray()
	schema := arrow.NewSchema([]arrow.Field{{Name: "n", Type: column.DataType()}}, nil)
	return array.NewRecordBatch(schema, []arrow.Array{column}, int64(column.Len()))
}

// inHost makes n batches in host memory.
func (s *striped) inHost(n int) []*batch.Batch {
	s.t.Helper()
	var made []*batch.Batch
	for range n {
		p, err := s.eng.Mover().Ingest(s.t.Context(), s.record(), reservation.Specific(host0))
		if err != nil {
			s.t.Fatal(err)
		}
		b, err := s.eng.NewBatch(p)
		if err != nil {
			s.t.Fatal(err)
		}
		made = append(made, b)
	}
	s.kept = append(s.kept, made...)
	return made
}

// move moves n new batches to disk by so many goroutines, and returns how many bytes
// each volume was written.
func (s *striped) move(n, movers int, to reservation.Strategy) []int64 {
	s.t.Helper()
	before := s.written()
	work := make(chan *batch.Batch, n)
	for _, b := range s.inHost(n) {
		work <- b
	}
	close(work)
	var wg sync.WaitGroup
	for range movers {
		wg.Go(func() {
			for b := range work {
				if err := s.eng.Mover().Move(s.t.Context(), b, to); err != nil {
					s.t.Errorf("moving batch %d: %v", b.ID(), err)
				}
			}
		})
	}
	wg.Wait()
	after := s.written()
	for i := range after {
		after[i] -= before[i]
	}
	return after
}

// wantRatio fails unless a and b are as want to one, within a tenth.
func wantRatio(t *testing.T, n []int64, want float64) {
	t.Helper()
	if got := float64(n[0]) / float64(n[1]); !(math.Abs(got-want) <= want/10) {
		t.Errorf("the volumes were written %d and %d bytes, %.2f:1; want %.2f:1", n[0], n[1], got, want)
	}
}

// For any mover and strategy, two volumes of which one is three times as fast get bytes 3:1.
func TestStripedByBandwidth(t *testing.T) {
	t.Parallel()
	for i, test := range []struct {
		name   string
		rates  [2]int64
		movers int
		to     reservation.Strategy
	}{
		{"one mover", [2]int64{480, 160}, 1, reservation.AnyInTier(tier.Disk)},
		{"two movers", [2]int64{480, 160}, 2, reservation.AnyInTier(tier.Disk)},
		{"eight movers", [2]int64{480, 160}, 8, reservation.AnyInTier(tier.Disk)},
		{"more movers than slots", [2]int64{480, 160}, 40, reservation.AnyInTier(tier.Disk)},
		{"slow disks, one mover", [2]int64{24, 8}, 1, reservation.AnyInTier(tier.Disk)},
		{"slow disks, four movers", [2]int64{24, 8}, 4, reservation.AnyInTier(tier.Disk)},
		{"fast disks", [2]int64{24000, 8000}, 4, reservation.AnyInTier(tier.Disk)},
		{"the slow one first", [2]int64{160, 480}, 3, reservation.AnyInTier(tier.Disk)},
		{"down from host", [2]int64{480, 160}, 3, reservation.ToDowngrade(host0, tier.Disk)},
		{"any of some tiers", [2]int64{480, 160}, 3, reservation.AnyInTiers(tier.Disk)},
		{"preferring one that is not there", [2]int64{480, 160}, 3, reservation.AnyInTierPreferring(tier.Disk, 9)},
	} {
		if testseed.Hurried() && i%4 > 0 {
			continue
		}
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := openStriped(t, spillway.Config{}, test.rates[:]...)
				n := s.move(320, test.movers, test.to)
				if test.rates[0] < test.rates[1] {
					n[0], n[1] = n[1], n[0]
				}
				wantRatio(t, n, 3)
			})
		})
	}
}

func TestStripedEqualVolumesShareEqually(t *testing.T) {
	t.Parallel()
	for _, movers := range []int{1, 5} {
		synctest.Test(t, func(t *testing.T) {
			s := openStriped(t, spillway.Config{}, 320, 320, 320)
			n := s.move(300, movers, reservation.AnyInTier(tier.Disk))
			wantRatio(t, n, 1)
			wantRatio(t, n[1:], 1)
		})
	}
}

// What a volume is worth is what it does now: rates that change are followed.
func TestStripedFollowsBandwidth(t *testing.T) {
	t.Parallel()
	for _, movers := range []int{1, 4} {
		synctest.Test(t, func(t *testing.T) {
			s := openStriped(t, spillway.Config{}, 480, 160)
			wantRatio(t, s.move(300, movers, reservation.AnyInTier(tier.Disk)), 3)
			s.throttle(0, 80) // and now the other is the fast one
			s.throttle(1, 320)
			wantRatio(t, s.move(300, movers, reservation.AnyInTier(tier.Disk)), 1./4)
			s.throttle(0, 640)
			wantRatio(t, s.move(300, movers, reservation.AnyInTier(tier.Disk)), 2)
		})
	}
}

// A volume without room gets nothing and the other all; when it has room again it gets
// its share, and makes up for no more than a second.
func TestStripedFullVolume(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := openStriped(t, spillway.Config{}, 24, 24)
		space, _ := s.eng.Reservations().Spaces().ByID(diskAt(0))
		full, err := s.eng.Reservations().TryReserve(reservation.Specific(diskAt(0)), space.State().Available, nil)
		if err != nil {
			t.Fatal(err)
		}
		if n := s.move(200, 3, reservation.AnyInTier(tier.Disk)); n[0] != 0 || n[1] < 200*batchBytes {
			t.Errorf("the full volume was written %d bytes, the other %d", n[0], n[1])
		}
		if err := full.Release(); err != nil {
			t.Fatal(err)
		}
		const second = 24 * batchBytes
		n := s.move(100, 1, reservation.AnyInTier(tier.Disk))
		if more := n[0] - n[1]; more < 0 || more > second+second/10 {
			t.Errorf("with room again it was written %d bytes and the other %d; want no more than %d in between", n[0], n[1], int64(second))
		}
		wantRatio(t, s.move(100, 1, reservation.AnyInTier(tier.Disk)), 1)
	})
}

// A small volume takes its share until it is full, and then the large one takes all.
func TestStripedFillsUpOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := openStriped(t, spillway.Config{Disks: []spillway.DiskConfig{{Capacity: spillway.Bytes(1 << 20)}}}, 480, 160)
		if n := s.move(200, 4, reservation.AnyInTier(tier.Disk)); n[0] > 1<<20 || n[0] < 7<<17 || n[0]+n[1] < 200*batchBytes {
			t.Errorf("a volume of 1 MiB was written %d bytes, the other %d", n[0], n[1])
		}
	})
}

// If a volume's file system is full, though the books of its space have room, there is no error:
// another takes the batch.
func TestStripedFileSystemFull(t *testing.T) {
	t.Parallel()
	for _, op := range []string{"allocate", "write"} {
		for _, movers := range []int{1, 4} {
			synctest.Test(t, func(t *testing.T) {
				s := openStriped(t, spillway.Config{}, 480, 160)
				s.files[0].Add(faultfs.Rule{Ops: []string{"allocate"}, Effect: faultfs.Fail(syscall.ENOSPC)})
				if op == "write" {
					s.refuseWrites(0, syscall.ENOSPC)
				}
				if n := s.move(50, movers, reservation.AnyInTier(tier.Disk)); n[0] != 0 || n[1] < 50*batchBytes {
					t.Errorf("%s: the full volume was written %d bytes, the other %d", op, n[0], n[1])
				}
			})
		}
	}
}

// refuseWrites makes writes to volume i fail until the returned function is called.
func (s *striped) refuseWrites(i int, err error) (end func()) {
	s.slow[i]() // the first rule that fits is the one that counts
	s.slow[i] = nil
	return s.files[i].Add(faultfs.Rule{Ops: []string{"write"}, Effect: faultfs.Fail(err)})
}

// A volume that cannot write is an error for the batch that it was tried with, which
// stays whole where it is. The others go past it, until it is given another try; and when
// it works again it gets its share.
func TestStripedFailingVolume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := openStriped(t, spillway.Config{}, 48, 16)
		to := reservation.AnyInTier(tier.Disk)
		heal := s.refuseWrites(0, syscall.EIO)
		mover := s.eng.Mover()
		try := func() (failed []*batch.Batch) {
			var refused *disk.IOError
			for _, b := range s.inHost(6) { // which take less than the second of the first setback
				err := mover.Move(t.Context(), b, to)
				switch {
				case err == nil && b.Info().Space != diskAt(1):
					t.Errorf("a batch went to %s", b.Info().Space)
				case err != nil && (!errors.As(err, &refused) || refused.Space != diskAt(0) || !errors.Is(err, syscall.EIO) ||
					errors.Is(err, tier.ErrNoSpace) || b.Info().Space != host0):
					t.Errorf("a batch in %s ended with %v", b.Info().Space, err)
				case err != nil:
					failed = append(failed, b)
				}
			}
			return failed
		}
		failed := try()
		if len(failed) != 1 || !s.stats(0).Ailing || s.stats(1).Ailing {
			t.Fatalf("%d moves failed; want one. The volumes are %+v, %+v", len(failed), s.stats(0), s.stats(1))
		}
		if err := mover.Move(t.Context(), failed[0], to); err != nil {
			t.Error(err) // on the volume that works
		}
		time.Sleep(time.Second)
		if failed = try(); len(failed) != 1 {
			t.Errorf("after a second %d moves failed; want one more", len(failed))
		}
		time.Sleep(time.Second)
		if failed = try(); len(failed) != 0 {
			t.Errorf("a second later %d moves failed; want none, for the setback is two seconds now", len(failed))
		}
		heal()
		s.throttle(0, 48)
		time.Sleep(2 * time.Second)
		s.move(60, 1, to) // of which the volume makes up for what it missed
		wantRatio(t, s.move(100, 1, to), 3)
	})
}

// Where every volume fails, all callers get the system's error.
func TestStripedAllVolumesFail(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := openStriped(t, spillway.Config{}, 480, 160)
		s.refuseWrites(0, syscall.EIO)
		s.refuseWrites(1, syscall.EIO)
		for _, b := range s.inHost(10) {
			if err := s.eng.Mover().Move(t.Context(), b, reservation.AnyInTier(tier.Disk)); !errors.Is(err, syscall.EIO) {
				t.Errorf("a move ended with %v", err)
			}
		}
		for i := range 2 {
			if st := s.stats(i); st.Backlog != 0 || st.Used != 0 {
				t.Errorf("volume %d has %d bytes handed out and a backlog of %d", i, st.Used, st.Backlog)
			}
		}
	})
}

// A caller that names a volume gets it there, whatever that does to the balance.
func TestStripedObeysWhoNamesAVolume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := openStriped(t, spillway.Config{}, 480, 160)
		for _, to := range []reservation.Strategy{reservation.Specific(diskAt(1)), reservation.AnyInTierPreferring(tier.Disk, 1)} {
			if n := s.move(40, 2, to); n[0] != 0 || n[1] < 40*batchBytes {
				t.Errorf("%s: the volumes were written %d and %d bytes", to, n[0], n[1])
			}
		}
	})
}

// Reserved room on a volume that is not written to is waited for once: after that both get their
// share.
func TestStripedBesideAReservation(t *testing.T) {
	t.Parallel()
	for held := range 2 {
		synctest.Test(t, func(t *testing.T) {
			s := openStriped(t, spillway.Config{}, 48, 16)
			s.move(40, 2, reservation.AnyInTier(tier.Disk)) // until the bandwidths are known
			rate := []int64{48, 16}[held] * batchBytes
			r, err := s.eng.Reserve(t.Context(), reservation.Specific(diskAt(held)), 4*rate) // what takes 4 s
			if err != nil {
				t.Fatal(err)
			}
			s.move(300, 2, reservation.AnyInTier(tier.Disk))
			wantRatio(t, s.move(300, 2, reservation.AnyInTier(tier.Disk)), 3)
			if err := r.Release(); err != nil {
				t.Error(err)
			}
		})
	}
}

// What the monitor moves is striped too, from a faster space at the trigger as from one
// for which others wait, whether it has more to move than the volumes take or now and then
// one batch.
func TestStripedMonitor(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		pause  time.Duration // between two batches
		from   tier.ID
		volume [2]int64
	}{
		{"pressed, from host", 0, host0, [2]int64{480, 160}},
		{"now and then, from host", 100 * time.Millisecond, host0, [2]int64{480, 160}},
		{"now and then, the slow one first", 100 * time.Millisecond, host0, [2]int64{160, 480}},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := openStriped(t, spillway.Config{HostMemory: spillway.Bytes(2 << 20)}, test.volume[:]...)
				for range 400 {
					s.inHost(1)
					time.Sleep(test.pause)
				}
				n := s.written()
				if n[0]+n[1] < 200*batchBytes {
					t.Fatalf("the monitor moved no more than %d bytes", n[0]+n[1])
				}
				if test.volume[0] < test.volume[1] {
					n[0], n[1] = n[1], n[0]
				}
				wantRatio(t, n, 3)
			})
		})
	}
}

// A volume that cannot write holds the monitor up for no more than a few moves.
func TestStripedMonitorGoesPastAFailingVolume(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		failed := make(map[time.Time]bool) // batches that are written together fail together
		cfg := spillway.Config{HostMemory: spillway.Bytes(2 << 20), Events: on(events.MoveEnded, func(e spillway.Event) {
			if e.Err != nil {
				mu.Lock()
				defer mu.Unlock()
				failed[e.At] = true
			}
		})}
		s := openStriped(t, cfg, 480, 160)
		s.refuseWrites(0, syscall.EIO)
		s.inHost(300) // four times what host memory has; 1.6 s
		mu.Lock()
		defer mu.Unlock()
		if n := s.written(); len(failed) == 0 || len(failed) > 5 || n[0] != 0 {
			t.Errorf("moves failed at %d times, and %d bytes were written", len(failed), n)
		}
	})
}

// Random operations on volumes that fail now and then, of which one is small: what is read
// is what was put, and in the end nothing is handed out or expected to be written.
func TestStripedRandomOperationsUnderFaults(t *testing.T) {
	t.Parallel()
	for seed := range testseed.Each(t, testseed.Rounds(2, 1)) {
		fail := faultfs.Rule{Ops: []string{"write"}, Skip: 4, Probability: 0.05, Effect: faultfs.Fail(syscall.EIO)}
		full := faultfs.Rule{Ops: []string{"allocate"}, Skip: 1, Probability: 0.5, Effect: faultfs.Fail(syscall.ENOSPC)}
		s := openStriped(t, spillway.Config{HostMemory: spillway.Bytes(1 << 20), MonitorPeriod: time.Millisecond, Disks: []spillway.DiskConfig{{Capacity: spillway.Bytes(2 << 20)}}},
			1<<20, 1<<20, 1<<20)
		for i, f := range s.files {
			s.slow[i]()
			f.Add(fail)
			f.Add(full)
		}
		plan, err := s.eng.Plan("random")
		if err != nil {
			t.Fatal(err)
		}
		repo, err := plan.Repository("scan", 0)
		if err != nil {
			t.Fatal(err)
		}
		run := &randomRun{eng: s.eng, repo: repo, words: wordList(seed, 1500), sources: make(map[int64]*source)}
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute) // only a stall takes so long
		var wg sync.WaitGroup
		for w := range randomWorkers {
			wg.Go(func() {
				rng := rand.New(rand.NewPCG(seed, uint64(w+1)))
				for op := range 80 {
					err := run.step(ctx, rng)
					if err != nil && !errors.Is(err, syscall.EIO) && !errors.Is(err, tier.ErrNoSpace) {
						t.Errorf("seed %d, worker %d, operation %d: %v", seed, w, op, err)
						return
					}
				}
			})
		}
		wg.Wait()
		cancel()
		if _, err := plan.Close(); err != nil {
			t.Error(err)
		}
		for i := range s.files {
			if st := s.stats(i); st.Backlog != 0 || st.Used != 0 {
				t.Errorf("seed %d: volume %d has %d bytes handed out and a backlog of %d", seed, i, st.Used, st.Backlog)
			}
		}
	}
}
