package test

import (
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

const slowDisk = 200 * mib // bytes a second

// onSlowDisk opens an engine with so much host memory, and puts batches on its disk, which reads
// slowly from then on. It returns how long the disk takes for one.
func onSlowDisk(t testing.TB, memory int64, batches int, change ...func(*spillway.Config)) (*spillway.Engine, *repository.Repository, time.Duration) {
	t.Helper()
	files := faultfs.New(disk.OS(), 1)
	cfg := spillway.Config{
		GPUs: []spillway.GPUConfig{}, HostMemory: spillway.Bytes(memory), Codec: convert.CodecNone,
		Disks: []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(64 * mib), FS: files}},
	}
	for _, f := range change {
		f(&cfg)
	}
	eng, err := spillway.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	repo := scanOf(t, eng)
	words := wordList(1, 100)
	for i := range int64(batches) {
		if err := repo.Put(t.Context(), 0, numberedRecord(i, 20_000, words), repository.WithPlacement(reservation.AnyInTier(tier.Disk))); err != nil {
			t.Fatal(err)
		}
	}
	files.Add(faultfs.Rule{Ops: []string{"read"}, Effect: faultfs.Throttle(slowDisk)})
	bytes := repo.Bytes(tier.Disk) / int64(batches)
	return eng, repo, time.Duration(float64(bytes) / slowDisk * float64(time.Second))
}

// drained drains a repository with some work on each batch, and returns how long that took.
func drained(t testing.TB, repo *repository.Repository, work time.Duration, opts ...repository.TakeOption) time.Duration {
	t.Helper()
	start := time.Now()
	last := int64(-1)
	for h, err := range repo.Drain(t.Context(), 0, tier.Host, opts...) {
		if err != nil {
			t.Fatal(err)
		}
		if seq := int64(h.Batch().Info().Place.Seq); seq <= last {
			t.Errorf("batch %d comes after %d", seq, last)
		} else {
			last = seq
		}
		time.Sleep(work)
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	}
	return time.Since(start)
}

// TestDrainReadsAhead: a consumer whose work takes as long as the disk's takes half of the time,
// because both go on at once; with the disk's time alone if its work is shorter, or its own.
func TestDrainReadsAhead(t *testing.T) {
	t.Parallel()
	const batches = 20
	for name, share := range map[string]float64{"as long": 1, "shorter": 0.3, "longer": 3} {
		t.Run(name, func(t *testing.T) {
			var took [2]time.Duration
			var reading, work time.Duration
			for i, opts := range [][]repository.TakeOption{{repository.ReadAhead(0)}, nil} {
				synctest.Test(t, func(t *testing.T) {
					eng, repo, one := onSlowDisk(t, 32*mib, batches)
					reading, work = batches*one, time.Duration(share*float64(one))
					took[i] = drained(t, repo, work, opts...)
					if err := repo.Close(t.Context()); err != nil {
						t.Error(err)
					}
					closeClean(t, eng)
				})
			}
			sum, most := reading+batches*work, max(reading, batches*work)
			if took[0] < sum*95/100 || took[1] > most*11/10 {
				t.Errorf("without reading ahead %v, with it %v; the work takes %v, the disk %v", took[0], took[1], batches*work, reading)
			}
		})
	}
}

// TestReaderReadsAhead: so do Arrow records.
func TestReaderReadsAhead(t *testing.T) {
	t.Parallel()
	const batches = 20
	synctest.Test(t, func(t *testing.T) {
		eng, repo, one := onSlowDisk(t, 32*mib, batches)
		repo.CloseInput()
		start, rows := time.Now(), int64(0)
		rd, err := repo.Reader(t.Context(), 0)
		if err != nil {
			t.Fatal(err)
		}
		for rd.Next() {
			rows += rd.RecordBatch().NumRows()
			time.Sleep(one)
		}
		if rd.Err() != nil || rows != batches*20_001 {
			t.Errorf("%d rows, %v", rows, rd.Err())
		}
		if took := time.Since(start); took > batches*one*12/10 {
			t.Errorf("it took %v; the work and the disk take %v each", took, batches*one)
		}
		rd.Release()
		if err := repo.Close(t.Context()); err != nil {
			t.Error(err)
		}
		closeClean(t, eng)
	})
}

// TestNothingIsReadAheadWhereRoomIsNeeded: not above the stop mark, not while somebody waits for
// room, and not right after a batch has made room.
func TestNothingIsReadAheadWhereRoomIsNeeded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		eng, repo, _ := onSlowDisk(t, 32*mib, 3)
		host := eng.Spaces()[0]
		to := reservation.AnyInTier(tier.Host)
		var all []*batch.Batch
		for b := range repo.Batches(0) {
			all = append(all, b)
		}
		ahead := func(why string, want bool) {
			t.Helper()
			err := eng.Mover().Ahead(t.Context(), all[0], to)
			var full *tier.NoSpaceError
			if there := all[0].Info().Space.Kind == tier.Host; there != want || (err == nil) != want || err != nil && !errors.As(err, &full) {
				t.Errorf("%s: it is there: %v, %v", why, there, err)
			} else if err != nil && full.Available != host.State().Available {
				t.Errorf("%s: %d bytes are available, and the error says %v", why, host.State().Available, err)
			}
			if err := eng.Mover().Move(t.Context(), all[0], reservation.AnyInTier(tier.Disk)); err != nil {
				t.Fatal(err)
			}
		}
		ahead("there is room", true)
		r, err := eng.Reserve(t.Context(), reservation.Specific(host.ID()), host.State().Stop-host.State().Used())
		if err != nil {
			t.Fatal(err)
		}
		ahead("above the stop mark", false)
		done := make(chan error)
		go func() {
			w, err := eng.Reserve(t.Context(), reservation.Specific(host.ID()), host.State().Room-2*tier.Page)
			done <- errors.Join(err, w.Release())
		}()
		synctest.Wait()
		if err := r.Shrink(r.Unused() - mib); err != nil {
			t.Fatal(err)
		}
		ahead("somebody waits", false)
		if err := errors.Join(r.Release(), <-done); err != nil {
			t.Fatal(err)
		}
		if err := eng.Mover().Move(t.Context(), all[1], to); err != nil {
			t.Fatal(err)
		}
		errs := eng.Mover().Evict(t.Context(), all[1:2], tier.ID{Kind: tier.Disk}, convert.ReasonTrigger)
		if err := errs[0]; err != nil {
			t.Fatal(err)
		}
		ahead("a batch has just left", false)
		time.Sleep(time.Second)
		ahead("a second later", true)
		if err := repo.Close(t.Context()); err != nil {
			t.Error(err)
		}
		closeClean(t, eng)
	})
}

// meeting is a strategy whose users meet when a move ahead has looked at the room, and is about to
// ask for it.
type meeting struct {
	reservation.Strategy
	all   *sync.WaitGroup
	calls int
}

func (m *meeting) Candidates(all *reservation.Spaces, dst []*tier.Space) []*tier.Space {
	if m.calls++; m.calls == 3 { // it was asked where the batch is to be, and what room is needed
		m.all.Done()
		m.all.Wait()
	}
	return m.Strategy.Candidates(all, dst)
}

// TestReadAheadAtOnce: several consumers read ahead at the same moment. Together they stay below
// the stop mark.
func TestReadAheadAtOnce(t *testing.T) {
	eng, repo, _ := onSlowDisk(t, 4*mib, 16,
		func(c *spillway.Config) { c.HostMarks = tier.Marks{Limit: 1, Trigger: 0.8, Stop: 0.6} })
	host := eng.Spaces()[0]
	var meet, done sync.WaitGroup
	meet.Add(16)
	for b := range repo.Batches(0) {
		done.Go(func() {
			var full *tier.NoSpaceError
			err := eng.Mover().Ahead(t.Context(), b, &meeting{Strategy: reservation.AnyInTier(tier.Host), all: &meet})
			if err != nil && !errors.As(err, &full) {
				t.Error(err)
			}
		})
	}
	done.Wait()
	if n := repo.Bytes(tier.Host); n == 0 || host.State().Peak > host.State().Stop {
		t.Errorf("%d bytes were brought, and %d used at the peak; the stop mark is at %d",
			n, host.State().Peak, host.State().Stop)
	}
	if err := repo.Close(t.Context()); err != nil {
		t.Error(err)
	}
	closeClean(t, eng)
}

// TestDrainThatIsBrokenOff leaves the rest whole, and nothing that goes on.
func TestDrainThatIsBrokenOff(t *testing.T) {
	eng, repo, one := onSlowDisk(t, 32*mib, 6)
	for h, err := range repo.Drain(t.Context(), 0, tier.Host) {
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(one / 2)
		if err := h.Close(); err != nil {
			t.Error(err)
		}
		break
	}
	ahead := func() (read, used, inVain int64) {
		for _, e := range eng.Stats().Edges {
			if e.To.Kind == tier.Host {
				read, used, inVain = read+e.Ahead, used+e.AheadUsed, inVain+e.AheadInVain
			}
		}
		return read, used, inVain
	}
	read, used, inVain := ahead()
	if read == 0 || used != 0 || inVain != 0 {
		t.Errorf("%d bytes were read ahead, %d used, %d in vain", read, used, inVain)
	}
	n := 0
	for b := range repo.Batches(0) {
		if now := b.Info(); now.State != batch.Idle {
			t.Errorf("%+v", now)
		}
		n++
	}
	if n != 5 {
		t.Errorf("%d batches are left", n)
	}
	left := int64(0)
	for b := range repo.Batches(0) {
		if now := b.Info(); left == 0 && now.Space.Kind == tier.Host {
			left = now.Descriptor.Body
			if err := eng.Mover().Move(t.Context(), b, reservation.AnyInTier(tier.Disk)); err != nil {
				t.Fatal(err)
			}
		}
	}
	drained(t, repo, 0, repository.ReadAhead(0))
	if _, used, inVain := ahead(); left == 0 || inVain != left || used != read-left {
		t.Errorf("%d bytes were read ahead, %d of it left again: %d are counted as used, %d as in vain", read, left, used, inVain)
	}
	if err := repo.Close(t.Context()); err != nil {
		t.Error(err)
	}
	closeClean(t, eng)
}

// BenchmarkReadAhead drains batches from the disk, of 200 MiB a second, with as much work on each
// as its reading takes: with read-ahead and without, in turns. The metric is how many times as
// fast.
func BenchmarkReadAhead(b *testing.B) {
	const batches = 40
	var took [2]time.Duration
	for range b.N {
		for i, opts := range [][]repository.TakeOption{{repository.ReadAhead(0)}, nil} {
			eng, repo, one := onSlowDisk(b, 48*mib, batches)
			took[i] += drained(b, repo, one, opts...)
			if err := errors.Join(repo.Close(b.Context()), eng.Close()); err != nil {
				b.Fatal(err)
			}
		}
	}
	b.ReportMetric(took[0].Seconds()/took[1].Seconds(), "times")
}
