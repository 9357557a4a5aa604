package volumes_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/test/testfs"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// underWay counts the bytes of requests that have begun and not ended.
type underWay struct {
	disk.FS
	mu    sync.Mutex
	now   int64
	begun int64
}

func (u *underWay) OpenAnonymous(dir string, direct bool) (disk.File, error) {
	f, err := u.FS.OpenAnonymous(dir, direct)
	return busyFile{f, u}, err
}

func (u *underWay) add(n, begun int64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.now += n
	u.begun += begun
}

func (u *underWay) read() (now, begun int64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.now, u.begun
}

type busyFile struct {
	disk.File
	u *underWay
}

func (f busyFile) ReadAt(p []byte, off int64) (int, error) {
	f.u.add(int64(len(p)), int64(len(p)))
	defer f.u.add(-int64(len(p)), 0)
	return f.File.ReadAt(p, off)
}

func (f busyFile) WriteAt(p []byte, off int64) (int, error) {
	f.u.add(int64(len(p)), int64(len(p)))
	defer f.u.add(-int64(len(p)), 0)
	return f.File.WriteAt(p, off)
}

// TestSlowDiskHasLittleUnderWay: a request that has begun cannot be cancelled. So on a
// disk of 2 MiB/s little is under way, however many transfers there are. After the context
// ends nothing begins.
func TestSlowDiskHasLittleUnderWay(t *testing.T) {
	for _, op := range []string{"read", "write"} {
		for name, c := range map[string]struct {
			fastBefore bool
			after      time.Duration
			most       int64
		}{
			"at once":          {false, 0, mib},
			"later":            {false, 5 * time.Second, mib / 2},
			"with a fast past": {true, 40 * time.Second, mib / 2}, // when what was begun in it has ended,
		} {
			t.Run(op+" "+name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					files := faultfs.New(disk.OS(), 1)
					u := &underWay{FS: files}
					v := open(t, volumes.Config{Dir: testfs.MemoryDir(t), Capacity: 256 * mib, FS: u})
					transfer := (tier.FileMemory).WriteAt
					if op == "read" {
						transfer = (tier.FileMemory).ReadAt
					}
					var all []tier.FileMemory
					data := random(16*mib, 1)
					for range 8 {
						e := alloc(t, v, 16*mib)
						if op == "read" { // there must be something
							write(t, e, data, 0)
						}
						if c.fastBefore {
							if err := transfer(e, t.Context(), data, 0); err != nil {
								t.Fatal(err)
							}
						}
						all = append(all, e)
					}
					files.Add(faultfs.Rule{Ops: []string{op}, Effect: faultfs.Throttle(2 * mib)})
					why := errors.New("enough")
					ctx, cancel := context.WithCancelCause(t.Context())
					done := make(chan error, len(all))
					for _, e := range all {
						go func() { done <- transfer(e, ctx, aligned(16*mib), 0) }()
					}
					time.Sleep(c.after)
					synctest.Wait()
					now, before := u.read()
					if now == 0 || now > c.most {
						t.Errorf("%d bytes are under way, want at most %d", now, c.most)
					}
					cancel(why)
					cancelled := time.Now()
					for range all {
						if err := <-done; !errors.Is(err, why) {
							t.Errorf("got %v", err)
						}
					}
					if _, after := u.read(); after != before {
						t.Errorf("%d bytes began after the context had ended", after-before)
					}
					if took := time.Since(cancelled); took > time.Second { // of the bubble's clock
						t.Errorf("what was under way took %v", took)
					}
					free(v, all...)
				})
			})
		}
	}
}

// TestDiskThatIsFastAgain: as soon as it is, as much is under way as before.
func TestDiskThatIsFastAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		files := faultfs.New(disk.OS(), 1)
		u := &underWay{FS: files}
		v := open(t, volumes.Config{Dir: testfs.MemoryDir(t), Capacity: 256 * mib, FS: u})
		e := alloc(t, v, 64*mib)
		data := random(64*mib, 1)
		slow := files.Add(faultfs.Rule{Ops: []string{"write"}, Effect: faultfs.Throttle(2 * mib)})
		write(t, e, data[:8*mib], 0)
		slow()
		const rate = 1000 * mib
		files.Add(faultfs.Rule{Ops: []string{"write"}, Effect: faultfs.Throttle(rate)})
		begin := time.Now()
		write(t, e, data, 0)
		if took := time.Since(begin); took > 2*time.Second*64*mib/rate {
			t.Errorf("64 MiB at 1000 MiB/s took %v after a slow time", took)
		}
		if v.Stats().Request != volumes.DefaultRequest {
			t.Errorf("the configuration has changed: %+v", v.Stats())
		}
		free(v, e)
	})
}
