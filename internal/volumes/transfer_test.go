package volumes_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/test/testfs"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// TestAnyAlignment writes and reads at every kind of address, offset and length, against a model, on
// direct and buffered files, with short and interrupted transfers between. Writes of parts of pages
// are refused, and change nothing.
func TestAnyAlignment(t *testing.T) {
	disturbed := func(fsys disk.FS) disk.FS {
		transfers := []string{"read", "write"}
		return faultfs.New(fsys, 1,
			faultfs.Rule{Ops: transfers, Probability: 0.2, Effect: faultfs.Short()},
			faultfs.Rule{Ops: transfers, Probability: 0.2, Effect: faultfs.Fail(syscall.EINTR)})
	}
	for name, fsys := range map[string]disk.FS{
		"direct": disk.OS(), "buffered": noDirect{disk.OS()}, "disturbed": disturbed(disk.OS()), "disturbed buffered": noDirect{disturbed(disk.OS())},
		"disturbed strict": disturbed(strict{disk.OS()}),
		"sparse":           faultfs.New(disk.OS(), 1, noAllocate),
	} {
		t.Run(name, func(t *testing.T) {
			const size = 10*page + 123
			v := open(t, volumes.Config{Capacity: 16 * page, Request: 2 * page, Depth: 3, FS: fsys})
			if w := v.Stats().Warnings; len(w) > 0 && name == "disturbed strict" {
				t.Errorf("another kind of file was taken: %q", w)
			}
			e := alloc(t, v, size)
			model := random(size, 1)
			write(t, e, model, 0)
			r := rand.New(rand.NewPCG(1, 2))
			edge := func(limit int64) int64 { // often near a page
				n := r.Int64N(limit + 1)
				if r.IntN(2) == 0 {
					n = min(limit, max(0, n/page*page+r.Int64N(3)-1))
				}
				return n
			}
			for i := range uint64(300) {
				off := edge(size - 1)
				n := edge(size - off)
				skew := int64(0)
				if r.IntN(2) == 0 {
					skew = r.Int64N(page)
				}
				p := random(n+skew, i)[skew:]
				err := e.WriteAt(t.Context(), p, off)
				if parts := off%page != 0 || (off+n)%page != 0 && off+n != size; parts != errors.Is(err, tier.ErrNotSupported) {
					t.Fatalf("step %d: writing %d bytes at %d: %v", i, n, off, err)
				} else if !parts && err != nil {
					t.Fatal(err)
				} else if !parts {
					copy(model[off:], p)
				}

				off = edge(size - 1)
				n = edge(size - off)
				guard := aligned(n + skew + 8)
				got := guard[skew : skew+n]
				if err := e.ReadAt(context.Background(), got, off); err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(got, model[off:off+n]) {
					t.Fatalf("step %d: %d bytes at %d are wrong", i, n, off)
				}
				if !bytes.Equal(guard[skew+n:], make([]byte, 8)) {
					t.Fatalf("step %d: bytes behind the buffer were written", i)
				}
			}
			free(v, e)
		})
	}
}

// strict is a file system whose disk wants transfers aligned to 4096 bytes.
type strict struct{ disk.FS }

type strictFile struct{ disk.File }

func (s strict) OpenAnonymous(dir string, direct bool) (disk.File, error) {
	f, err := s.FS.OpenAnonymous(dir, direct)
	if err != nil {
		return nil, err
	}
	return strictFile{f}, nil
}

func (strictFile) Alignment() (address, offset int) { return page, page }

func (f strictFile) ReadAt(p []byte, off int64) (int, error) {
	if start(p)%page != 0 || len(p)%page != 0 || off%page != 0 {
		return 0, syscall.EINVAL
	}
	return f.File.ReadAt(p, off)
}

func (f strictFile) WriteAt(p []byte, off int64) (int, error) {
	if start(p)%page != 0 || len(p)%page != 0 || off%page != 0 {
		return 0, syscall.EINVAL
	}
	return f.File.WriteAt(p, off)
}

// TestRequestsUnderWay counts how many requests a transfer has under way, and how
// many a volume has, while none of them ends.
func TestRequestsUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var under, most atomic.Int64
		leave := make(chan struct{})
		fsys := faultfs.New(disk.OS(), 1, faultfs.Rule{Ops: []string{"write"}, Skip: 2, Effect: faultfs.Do(func(string, string) {
			for n := under.Add(1); ; {
				old := most.Load()
				if n <= old || most.CompareAndSwap(old, n) {
					break
				}
			}
			<-leave
			under.Add(-1)
		})})
		v := open(t, volumes.Config{Capacity: 64 * mib, Request: 64 << 10, Depth: 3, FS: fsys})
		e := alloc(t, v, 64*mib)
		data := random(2*mib, 1)
		write(t, e, data[:64<<10], 0) // in no time: so the disk is known to be fast
		done := make(chan error, 10)
		start := func(n, off int64) {
			go func() { done <- e.WriteAt(context.Background(), data[:n], off) }()
			synctest.Wait()
		}
		start(2*mib, 0)
		if n := under.Load(); n != 3 {
			t.Errorf("one transfer has %d requests under way, want its depth, 3", n)
		}
		start(128<<10, 2*mib)
		if n := under.Load(); n != 5 {
			t.Errorf("a transfer of two requests has %d under way", n-3)
		}
		start(64<<10, 4*mib)
		if n := under.Load(); n != 6 {
			t.Errorf("a transfer of one request has %d under way", n-5)
		}
		for i := range int64(6) {
			start(2*mib, (6+2*i)*mib)
		}
		// 9 callers and at most 4 × 3 helpers.
		if n := under.Load(); n < 9+9 || n > 9+12 {
			t.Errorf("9 transfers have %d requests under way", n)
		}
		close(leave)
		for range 9 {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
		if !bytes.Equal(read(t, e, 2*mib, 0), data) {
			t.Error("reads differ from writes")
		}
		if n := most.Load(); n > 9+12 {
			t.Errorf("%d requests were under way", n)
		}
		free(v, e)
	})
}

// TestRequestsEndOnPages: requests of a read that begins and ends inside of pages end on pages, so no
// page is read twice; no write reads.
func TestRequestsEndOnPages(t *testing.T) {
	onLinux(t)
	var moved atomic.Int64
	fsys := faultfs.New(countBytes{disk.OS(), &moved}, 1)
	v := open(t, volumes.Config{Capacity: 4 * mib, FS: fsys}) // nothing is measured: requests are short
	e := alloc(t, v, 4*mib)
	reads := fsys.Count("read")
	write(t, e, random(4*mib, 1), 0)
	if n := fsys.Count("read") - reads; n != 0 {
		t.Errorf("a write has read %d times", n)
	}
	moved.Store(0)
	read(t, e, 2*mib, 100)
	if n := moved.Load(); n != 2*mib+page {
		t.Errorf("%d bytes were read, want %d", n, 2*mib+page)
	}
	free(v, e)
}

// countBytes is a file system that counts the bytes that anonymous files read.
type countBytes struct {
	disk.FS
	read *atomic.Int64
}

type countingFile struct {
	disk.File
	read *atomic.Int64
}

func (c countBytes) OpenAnonymous(dir string, direct bool) (disk.File, error) {
	f, err := c.FS.OpenAnonymous(dir, direct)
	if err != nil {
		return nil, err
	}
	return countingFile{f, c.read}, nil
}

func (f countingFile) ReadAt(p []byte, off int64) (int, error) {
	n, err := f.File.ReadAt(p, off)
	f.read.Add(int64(n))
	return n, err
}

// TestCancellation: no request begins after the context has ended, and the caller's
// memory is its own again when the call returns.
func TestCancellation(t *testing.T) {
	for _, op := range []string{"read", "write"} {
		t.Run(string(op), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				leave := make(chan struct{})
				fsys := faultfs.New(disk.OS(), 1)
				v := open(t, volumes.Config{Capacity: 4 * mib, Request: 64 << 10, Depth: 4, FS: fsys})
				e := alloc(t, v, 4*mib)
				write(t, e, random(4*mib, 1), 0)
				fsys.Add(faultfs.Rule{Ops: []string{op}, Effect: faultfs.Do(func(string, string) { <-leave })})
				before := fsys.Count(op)
				ctx, cancel := context.WithCancelCause(context.Background())
				p := aligned(4 * mib)
				done := make(chan error, 1)
				go func() {
					if op == "read" {
						done <- e.ReadAt(ctx, p, 0)
					} else {
						done <- e.WriteAt(ctx, p, 0)
					}
				}()
				synctest.Wait()
				why := errors.New("enough")
				cancel(why)
				synctest.Wait()
				if len(done) > 0 {
					t.Fatal("the call returned while requests work on the caller's memory")
				}
				close(leave)
				if err := <-done; !errors.Is(err, why) {
					t.Errorf("got %v", err)
				}
				for i := range p { // the race detector sees a worker that still reads or writes
					p[i] = 7
				}
				synctest.Wait()
				if n := fsys.Count(op) - before; n != 4 {
					t.Errorf("%d requests were begun; 4 were under way when the context ended", n)
				}
				if bytes.Count(p, []byte{7}) != len(p) {
					t.Error("the caller's memory changed after the call returned")
				}
				free(v, e)
			})
		})
	}
}

func TestEndedContextBeginsNothing(t *testing.T) {
	fsys := faultfs.New(disk.OS(), 1)
	v := open(t, volumes.Config{Capacity: mib, FS: fsys})
	e := alloc(t, v, mib)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	before := fsys.Count()
	if err := e.WriteAt(ctx, aligned(mib), 0); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if n := fsys.Count() - before; n != 0 {
		t.Errorf("%d operations", n)
	}
	free(v, e)
}

// TestErrorsNameThePlace: file and offset in one line, and the rest of the transfer
// is not begun.
func TestErrorsNameThePlace(t *testing.T) {
	fsys := faultfs.New(disk.OS(), 1)
	v := open(t, volumes.Config{Capacity: 16 * mib, Request: mib / 4, Depth: 1, FS: fsys})
	e := alloc(t, v, 10*mib)
	for _, c := range []struct {
		op   string
		err  error
		do   func() error
		want []string
	}{
		{"write", syscall.EIO, func() error { return e.WriteAt(context.Background(), aligned(2*mib), 0) }, []string{"disk: writing 262144 bytes", "input/output error"}},
		{"read", syscall.EIO, func() error { return e.ReadAt(context.Background(), aligned(2*mib), 0) }, []string{"disk: reading 262144 bytes", "input/output error"}},
		{"write", syscall.EROFS, func() error { return e.WriteAt(context.Background(), aligned(2*mib), 0) }, []string{"read-only file system"}},
	} {
		write(t, e, random(2*mib, 1), 0)
		_, file, off := e.Locate(3 * mib / 4)
		remove := fsys.Add(faultfs.Rule{Ops: []string{c.op}, Skip: 3, Times: 1, Effect: faultfs.Fail(c.err)})
		before := fsys.Count(c.op)
		err := c.do()
		if !errors.Is(err, c.err) {
			t.Fatalf("got %v", err)
		}
		oneLine(t, err.Error(), append(c.want, fmt.Sprintf("at offset %d of %s in %s", off, file, v.Dir()))...)
		if n := fsys.Count(c.op) - before; n != 4 {
			t.Errorf("%d requests; the fourth failed", n)
		}
		remove()
	}
	free(v, e)
}

func TestTransfersThatNeverProgressEnd(t *testing.T) {
	fsys := faultfs.New(disk.OS(), 1)
	v := open(t, volumes.Config{Capacity: mib, FS: fsys})
	e := alloc(t, v, mib)
	remove := fsys.Add(faultfs.Rule{Ops: []string{"write"}, Effect: faultfs.Fail(syscall.EINTR)})
	if err := e.WriteAt(context.Background(), aligned(mib), 0); !errors.Is(err, io.ErrNoProgress) || !errors.Is(err, syscall.EINTR) {
		t.Errorf("interrupted for ever: %v", err)
	}
	remove()
	write(t, e, aligned(mib), 0)
	fsys.Add(faultfs.Rule{Ops: []string{"read"}, Effect: faultfs.Fail(io.EOF)})
	if err := e.ReadAt(context.Background(), aligned(mib), 0); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("the file ends too early: %v", err)
	}
	free(v, e)
}

func TestCounters(t *testing.T) {
	v := open(t, volumes.Config{Capacity: mib})
	e, small := alloc(t, v, mib-page), alloc(t, v, 100)
	write(t, e, aligned(mib-page), 0)
	write(t, small, make([]byte, 100), 0)
	read(t, e, 3000, 0)
	if s := v.Stats(); s.Written != mib-page+100 || s.Read != 3000 {
		t.Errorf("written %d, read %d", s.Written, s.Read)
	}
	free(v, e, small)
}

// TestEveryOperationFailsOnce runs a volume's life with each operation of the file system failing,
// or panicking, in turn. Whatever comes of it, the books are exact, no descriptor is open, and the
// next volume in the directory leaves it empty.
func TestEveryOperationFailsOnce(t *testing.T) {
	boom := faultfs.Do(func(string, string) { panic("boom") })
	for _, c := range []struct {
		name   string
		also   []faultfs.Rule
		fail   faultfs.Effect
		panics bool
		onDisk bool // the others are in memory: it is no test of the disk
	}{
		{"EIO", nil, faultfs.Fail(syscall.EIO), false, true},
		{"ENOSPC", nil, faultfs.Fail(syscall.ENOSPC), false, false},
		{"named EACCES", []faultfs.Rule{noAnonymous}, faultfs.Fail(syscall.EACCES), false, false},
		{"no holes EIO", []faultfs.Rule{noPunch, noAllocate}, faultfs.Fail(syscall.EIO), false, false},
		{"panic", nil, boom, true, false},
		{"named panic", []faultfs.Rule{noAnonymous}, boom, true, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			onLinux(t)
			dir := testfs.MemoryDir(t)
			if c.onDisk {
				dir = tempDir(t)
			}
			count := faultfs.New(disk.OS(), 1, c.also...)
			if failed := life(t, dir, count); len(failed) > 0 {
				t.Fatalf("without a fault: %v", failed)
			}
			total := count.Count()
			if total < 30 {
				t.Fatalf("a life has only %d operations", total)
			}
			t.Logf("%d operations", total)
			tries, quiet := 0, 0
			for i := 0; i < total; i += testseed.Rounds(1, 4) {
				tries++
				fds := descriptors(t)
				fsys := faultfs.New(disk.OS(), 1, append([]faultfs.Rule{{Skip: i, Times: 1, Effect: c.fail}}, c.also...)...)
				failed := life(t, dir, fsys)
				told := 0
				for _, err := range failed {
					var p *guard.PanicError
					switch {
					case errors.As(err, &p):
						told++
					case c.panics: // what came of it elsewhere
					default:
						told++
						oneLine(t, err.Error())
					}
				}
				if told == 0 {
					quiet++
				}
				if fsys.Open() != 0 || descriptors(t) != fds {
					t.Fatalf("operation %d: %d files open, %d descriptors of %d", i, fsys.Open(), descriptors(t), fds)
				}
				v, err := openVolume(volumes.Config{Dir: dir, Capacity: mib})
				if err != nil {
					t.Fatal(err)
				}
				if err := v.Close(); err != nil {
					t.Fatal(err)
				}
				wantEmpty(t, dir)
				if t.Failed() {
					t.Fatalf("after operation %d failed", i)
				}
			}
			if quiet > tries*2/3 { // those of calls that give advice, or give room back
				t.Errorf("%d of %d failures were not returned", quiet, tries)
			}
		})
	}
}

// life opens a volume behind a space, uses it in every way, and closes it. It
// returns the errors; that the books balance it checks itself.
func life(t *testing.T, dir string, fsys *faultfs.FS) (failed []error) {
	t.Helper()
	note := func(err error) bool {
		if err != nil {
			failed = append(failed, err)
		}
		return err == nil
	}
	const capacity = 64 * page
	v, err := openVolume(volumes.Config{Dir: dir, Capacity: capacity, Request: 8 * page, Depth: 2, FS: fsys, Idle: -1})
	if !note(err) {
		return failed
	}
	space, err := tier.NewSpace(tier.SpaceConfig{
		ID: tier.ID{Kind: tier.Disk}, Capacity: capacity, Pool: v, Backend: "disk",
	})
	if err != nil {
		t.Fatal(err)
	}
	use := func(size int64) *tier.Buffer {
		if n := space.State().Available; n < space.Charge(size) {
			t.Errorf("the books are off: %d bytes are available", n)
			return nil
		}
		b, err := space.DrawNew(size)
		if !note(err) {
			return nil
		}
		m := b.Memory().(tier.FileMemory)
		data, got := random(size, uint64(size)), aligned(size)
		if note(m.WriteAt(context.Background(), data, 0)) && note(m.ReadAt(context.Background(), got, 0)) && !bytes.Equal(got, data) {
			t.Error("reads differ from writes, and no error said so")
		}
		return b
	}
	release := func(bs ...*tier.Buffer) {
		for _, b := range bs {
			if err := b.Release(); err != nil {
				t.Error(err)
			}
		}
	}
	a, b, c := use(capacity/4), use(capacity/4+capacity/8), use(20001)
	release(a, c)
	_, err = v.Trim(context.Background())
	note(err)
	d := use(capacity / 2)
	release(b, d)
	_, err = v.Trim(context.Background())
	note(err)
	release(use(capacity)) // all of it is there
	if u := space.State().Usage; u.Used() != 0 {
		t.Errorf("in the end the space has %+v", u)
	}
	note(space.Close())
	if s := v.Stats(); s.Used != 0 || s.Backed != 0 || s.Segments != 0 || v.UnderWay() != 0 {
		t.Errorf("in the end: %+v, %d bytes under way", s, v.UnderWay())
	}
	return failed
}

// crookedFS has no anonymous files, and its file panics in one method.
type crookedFS struct {
	disk.FS
	in string
}

func (f *crookedFS) OpenAnonymous(string, bool) (disk.File, error) {
	return nil, errors.ErrUnsupported
}

func (f *crookedFS) Create(path string, direct bool) (disk.File, error) {
	file, err := f.FS.Create(path, direct)
	return crookedFile{file, f.in}, err
}

type crookedFile struct {
	disk.File
	in string
}

func (f crookedFile) Alignment() (int, int) {
	if f.in == "Alignment" {
		panic("boom")
	}
	return f.File.Alignment()
}

func (f crookedFile) Allocate(off, n int64) error {
	if f.in == "Allocate" {
		panic("boom")
	}
	return f.File.Allocate(off, n)
}

// TestFileThatPanicsAtOnce: a file that was made and cannot be used leaves nothing behind.
func TestFileThatPanicsAtOnce(t *testing.T) {
	for _, in := range []string{"Alignment", "Allocate"} {
		dir := tempDir(t)
		v, err := openVolume(volumes.Config{Dir: dir, Capacity: mib, FS: &crookedFS{disk.OS(), in}})
		if err == nil {
			_, err = v.Alloc(mib/4, nil)
		}
		if p := (*guard.PanicError)(nil); !errors.As(err, &p) {
			t.Errorf("%s: %v", in, err)
		}
		if v != nil {
			if err := v.Close(); err != nil {
				t.Error(err)
			}
		}
		wantEmpty(t, dir)
	}
}
