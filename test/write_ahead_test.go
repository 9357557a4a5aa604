package test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// aheadOf sums what was copied to disks ahead, and what was moved there.
func aheadOf(eng *spillway.Engine) (sum convert.EdgeStats) {
	for _, e := range eng.Stats().Edges {
		if e.To.Kind == tier.Disk {
			sum.Ahead += e.Ahead
			sum.AheadUsed += e.AheadUsed
			sum.AheadInVain += e.AheadInVain
			sum.Bytes += e.Bytes
			sum.Unmoved += e.Unmoved
		}
	}
	return sum
}

// fillHost puts batches of about 100 KiB into host memory until so many bytes are used.
func fillHost(t testing.TB, eng *spillway.Engine, repo *repository.Repository, bytes int64) {
	t.Helper()
	host := eng.Reservations().Spaces().InTier(tier.Host)[0]
	words := wordList(1, 10)
	for i := int64(0); host.State().Pressure < bytes; i++ {
		if err := repo.Put(t.Context(), 0, numberedRecord(i, 2500, words), in(tier.Host)); err != nil {
			t.Fatal(err)
		}
	}
}

// openWritingAhead opens an engine without a GPU that writes so many bytes a second ahead.
func openWritingAhead(t *testing.T, rate int64, change ...func(*spillway.Config)) (*spillway.Engine, *repository.Repository, *tier.Space) {
	t.Helper()
	eng := openMarked(t, 8*mib, append(change, func(c *spillway.Config) { c.GPUs, c.WriteAhead, c.Policy = []spillway.GPUConfig{}, rate, monitor.LRU() })...)
	return eng, scanOf(t, eng), eng.Spaces()[0]
}

func closeRepo(t *testing.T, eng *spillway.Engine, repo *repository.Repository) {
	t.Helper()
	if err := repo.Close(t.Context()); err != nil {
		t.Error(err)
	}
	closeClean(t, eng)
}

// TestWrittenInIdleTime: what is above the stop mark gets copies, the first victims first, and not
// faster than the rate. Then the engine sleeps. What leaves later moves no bytes.
func TestWrittenInIdleTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const rate = mib / 4
		eng, repo, host := openWritingAhead(t, rate)
		fillHost(t, eng, repo, host.State().Trigger-200<<10)
		var all []*batch.Batch
		for b := range repo.Batches(0) {
			all = append(all, b)
		}
		one := all[0].Info().Bytes
		start := time.Now()
		for last := int64(-1); last < 0 || aheadOf(eng).Ahead > last; {
			last = aheadOf(eng).Ahead
			time.Sleep(2 * time.Second)
			got, most := aheadOf(eng).Ahead, rate*int64(time.Since(start))/int64(time.Second)+one
			if got > most || got == 0 {
				t.Fatalf("%d bytes were written after %v: want at most %d", got, time.Since(start), most)
			}
		}
		above := host.State().Pressure - host.State().Stop
		if got := aheadOf(eng).Ahead; got < above || got >= above+one {
			t.Errorf("%d bytes were written for %d above the stop mark", got, above)
		}
		for i, b := range all {
			if want := int64(i)*one < above; want != (len(b.Copies()) == 1) {
				t.Errorf("batch %d has copies in %v", b.Info().Place.Seq, b.Copies())
			}
		}
		looks := eng.Stats().Monitor.Looks
		time.Sleep(100 * time.Second)
		if n := eng.Stats().Monitor.Looks - looks; n > 101 {
			t.Errorf("the monitor looked %d times in 100 s", n)
		}
		r, err := eng.Reserve(t.Context(), reservation.Specific(host.ID()),
			host.State().Trigger+above/2-host.State().Used())
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if s := aheadOf(eng); s.Bytes != 0 || s.Unmoved < above/2 || s.AheadUsed != s.Unmoved || s.AheadInVain != 0 {
			t.Errorf("%+v", s)
		}
		if err := r.Release(); err != nil {
			t.Error(err)
		}
		closeRepo(t, eng, repo)
		if s := aheadOf(eng); s.Ahead != s.AheadUsed+s.AheadInVain {
			t.Errorf("at the end %+v", s)
		}
	})
}

// TestNothingIsWrittenWhile somebody waits for room, or where it is switched off. It is when the
// wait is over.
func TestNothingIsWrittenWhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		eng, repo, host := openWritingAhead(t, 64*mib)
		fillHost(t, eng, repo, host.State().Stop+mib/2)
		var subscribed []func()
		for b := range repo.Batches(0) {
			subscribed = append(subscribed, b.Subscribe())
		}
		got := make(chan error)
		go func() {
			r, err := eng.Reserve(t.Context(), reservation.Specific(host.ID()), host.State().Available+mib/2)
			if err == nil {
				err = r.Release()
			}
			got <- err
		}()
		time.Sleep(10 * time.Second)
		if s := aheadOf(eng); s.Ahead != 0 {
			t.Errorf("while somebody waits: %+v", s)
		}
		for _, cancel := range subscribed {
			cancel()
		}
		if err := <-got; err != nil {
			t.Fatal(err)
		}
		synctest.Wait() // moves that it asked for have ended
		fillHost(t, eng, repo, host.State().Stop+mib/2)
		time.Sleep(3 * time.Second)
		if s := aheadOf(eng); s.Ahead < mib/2 {
			t.Errorf("when nobody waits any more: %+v", s)
		}
		closeRepo(t, eng, repo)
	})
	synctest.Test(t, func(t *testing.T) {
		eng, repo, host := openWritingAhead(t, -1)
		fillHost(t, eng, repo, host.State().Stop+mib/2)
		time.Sleep(time.Minute)
		if s := aheadOf(eng); s.Ahead != 0 {
			t.Errorf("switched off: %+v", s)
		}
		closeRepo(t, eng, repo)
	})
}

// TestBurstsAfterWritingAhead: bursts of puts with pauses between them, and a disk of 50 MiB a
// second. Without writing ahead each burst moves bytes. With it one that is smaller than what lies
// above the stop mark moves none, and the producer of a larger one waits for none.
func TestBurstsAfterWritingAhead(t *testing.T) {
	t.Parallel()
	for puts, small := range map[int64]bool{8: true, 24: false} {
		var moved [2]int64
		var took [2]time.Duration
		for i, rate := range []int64{-1, 64 * mib} {
			synctest.Test(t, func(t *testing.T) { moved[i], took[i] = bursts(t, rate, puts) })
		}
		t.Logf("bursts of %d puts: %d bytes and %v without writing ahead, %d and %v with it", puts, moved[0], took[0], moved[1], took[1])
		if moved[0] == 0 || moved[1] > moved[0]/2 || small && moved[1] != 0 || !small && took[0] < 50*time.Millisecond || took[1] > took[0]/10 {
			t.Errorf("bursts of %d puts: %d bytes and %v without writing ahead, %d and %v with it", puts, moved[0], took[0], moved[1], took[1])
		}
	}
}

// bursts makes bursts of puts, and returns how many bytes were moved and how long the puts took.
func bursts(t *testing.T, rate, puts int64) (moved int64, took time.Duration) {
	files := faultfs.New(disk.OS(), 1, faultfs.Rule{Ops: []string{"write"}, Effect: faultfs.Throttle(50 * mib)})
	eng, repo, host := openWritingAhead(t, rate, func(c *spillway.Config) { c.Disks[0].FS = files })
	words := wordList(1, 10)
	fillHost(t, eng, repo, host.State().Trigger-200<<10)
	for range 8 {
		time.Sleep(5 * time.Second)
		start := time.Now()
		for n := range puts {
			if err := repo.Put(t.Context(), 0, numberedRecord(n, 2500, words), in(tier.Host)); err != nil {
				t.Fatal(err)
			}
		}
		took += time.Since(start)
	}
	time.Sleep(time.Second)
	moved = aheadOf(eng).Bytes
	closeRepo(t, eng, repo)
	return moved, took
}
