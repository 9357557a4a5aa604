package faultfs

import (
	"bytes"
	"errors"
	"math/bits"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/tier/disk"
)

func open(t *testing.T, f *FS) disk.File {
	t.Helper()
	file, err := f.Create(filepath.Join(t.TempDir(), "segment-0000"), false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := file.Close(); err != nil {
			t.Error(err)
		}
		if n := f.Open(); n != 0 {
			t.Errorf("%d files are open", n)
		}
	})
	return file
}

func pattern(n int) []byte {
	b := extent.Aligned(n)
	for i := range b {
		b[i] = byte(i * 7)
	}
	return b
}

func TestNoRulesNoFaults(t *testing.T) {
	f := New(disk.OS(), 1)
	file := open(t, f)
	want := pattern(8192)
	if n, err := file.WriteAt(want, 0); n != len(want) || err != nil {
		t.Fatal(n, err)
	}
	got := extent.Aligned(8192)
	if n, err := file.ReadAt(got, 0); n != len(got) || err != nil || !bytes.Equal(got, want) {
		t.Fatal(n, err)
	}
	if f.Count() != 3 || f.Count("read", "write") != 2 || f.Count("punch") != 0 || f.Hits() != 0 || f.Open() != 1 {
		t.Errorf("%d operations, %d transfers, %d hits, %d open",
			f.Count(), f.Count("read", "write"), f.Hits(), f.Open())
	}
}

// TestRulesChoose checks by their errors which of several writes were hit.
func TestRulesChoose(t *testing.T) {
	eio := Fail(syscall.EIO)
	for _, c := range []struct {
		name string
		rule Rule
		want string // of 6 writes: x is hit
	}{
		{"all", Rule{Effect: eio}, "xxxxxx"},
		{"by kind", Rule{Ops: []string{"write"}, Effect: eio}, "xxxxxx"},
		{"other kinds", Rule{Ops: []string{"read", "punch"}, Effect: eio}, "......"},
		{"from an index", Rule{Skip: 2, Effect: eio}, "..xxxx"},
		{"one index", Rule{Skip: 3, Times: 1, Effect: eio}, "...x.."},
		{"the first two", Rule{Times: 2, Effect: eio}, "xx...."},
		{"by name", Rule{Path: "segment-*", Effect: eio}, "xxxxxx"},
		{"another name", Rule{Path: "lock", Effect: eio}, "......"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := New(disk.OS(), 1)
			file := open(t, f)
			remove := f.Add(c.rule)
			var got []byte
			for range 6 {
				switch _, err := file.WriteAt(pattern(512), 0); {
				case err == nil:
					got = append(got, '.')
				case errors.Is(err, syscall.EIO):
					got = append(got, 'x')
				default:
					t.Fatal(err)
				}
			}
			if string(got) != c.want {
				t.Errorf("hit %s, want %s", got, c.want)
			}
			remove()
			if _, err := file.WriteAt(pattern(512), 0); err != nil {
				t.Errorf("with the rule removed: %v", err)
			}
		})
	}
}

func TestTheFirstRuleIsApplied(t *testing.T) {
	f := New(disk.OS(), 1,
		Rule{Ops: []string{"write"}, Times: 1, Effect: Fail(syscall.EIO)},
		Rule{Ops: []string{"write"}, Effect: Fail(syscall.ENOSPC)})
	file := open(t, f)
	for i, want := range []error{syscall.EIO, syscall.ENOSPC, syscall.ENOSPC} {
		if _, err := file.WriteAt(pattern(512), 0); !errors.Is(err, want) {
			t.Errorf("write %d: %v, want %v", i, err, want)
		}
	}
	if f.Hits() != 3 {
		t.Errorf("%d hits", f.Hits())
	}
}

func TestProbability(t *testing.T) {
	hits := func(seed uint64) int {
		f := New(disk.OS(), seed, Rule{Ops: []string{"write"}, Probability: 0.25, Effect: Fail(syscall.EIO)})
		file := open(t, f)
		for range 400 {
			_, _ = file.WriteAt(pattern(16), 0)
		}
		return f.Hits()
	}
	if a, b := hits(5), hits(5); a != b || a < 60 || a > 140 {
		t.Errorf("%d and %d of 400 writes hit with the same seed; want the same, about 100", a, b)
	}
}

func TestEveryOperationCanFail(t *testing.T) {
	dir := t.TempDir()
	f := New(disk.OS(), 1)
	file, err := f.Create(filepath.Join(dir, "file"), false)
	if err != nil {
		t.Fatal(err)
	}
	lock, err := f.Lock(filepath.Join(dir, "lock"), true)
	if err != nil {
		t.Fatal(err)
	}
	f.Add(Rule{Effect: Fail(syscall.EIO)})
	do := map[string]func() error{
		"stat":           func() error { _, err := f.Stat(dir); return err },
		"usage":          func() error { _, err := f.Usage(dir); return err },
		"open-anonymous": func() error { _, err := f.OpenAnonymous(dir, false); return err },
		"create":         func() error { _, err := f.Create(filepath.Join(dir, "new"), false); return err },
		"mkdir":          func() error { return f.Mkdir(filepath.Join(dir, "new")) },
		"readdir":        func() error { _, err := f.ReadDir(dir); return err },
		"remove":         func() error { return f.Remove(filepath.Join(dir, "file")) },
		"lock":           func() error { _, err := f.Lock(filepath.Join(dir, "new"), true); return err },
		"read":           func() error { _, err := file.ReadAt(make([]byte, 1), 0); return err },
		"write":          func() error { _, err := file.WriteAt(make([]byte, 1), 0); return err },
		"allocate":       func() error { return file.Allocate(0, 1) },
		"punch":          func() error { return file.Punch(0, 1) },
		"truncate":       func() error { return file.Truncate(1) },
		"unlock":         lock.Close,
		"close":          file.Close,
	}
	for op, call := range do {
		before := f.Count(op)
		if err := call(); !errors.Is(err, syscall.EIO) {
			t.Errorf("%s: %v", op, err)
		}
		if f.Count(op) != before+1 {
			t.Errorf("%s was counted %d times", op, f.Count(op)-before)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 2 {
		t.Errorf("operations that failed were done: %v %v", entries, err)
	}
	if f.Open() != 0 {
		t.Errorf("%d files are open", f.Open())
	}
}

func TestShort(t *testing.T) {
	f := New(disk.OS(), 1)
	file := open(t, f)
	want := pattern(8192)
	remove := f.Add(Rule{Effect: Short()})
	n, err := file.WriteAt(want, 0)
	if err != nil || n != 3584 { // 7 sectors
		t.Fatalf("a short write did %d bytes, %v", n, err)
	}
	remove()
	if _, err := file.WriteAt(want, 0); err != nil {
		t.Fatal(err)
	}
	f.Add(Rule{Effect: Short()})
	got := extent.Aligned(8192)
	if n, err := file.ReadAt(got, 0); err != nil || n != 3584 || !bytes.Equal(got[:n], want[:n]) {
		t.Errorf("a short read did %d bytes, %v", n, err)
	}
}

// coarse is a file that must be read and written in blocks.
type coarse struct {
	disk.File
	block int
}

func (c coarse) Alignment() (address, offset int) { return 1, c.block }

type coarseFS struct{ disk.FS }

func (f coarseFS) Create(path string, direct bool) (disk.File, error) {
	file, err := f.FS.Create(path, direct)
	return coarse{file, 4096}, err
}

// TestShortGoesOn checks that a disk that is always short makes progress each time.
func TestShortGoesOn(t *testing.T) {
	f := New(coarseFS{disk.OS()}, 1, Rule{Effect: Short()})
	file := open(t, f)
	for _, c := range []struct{ asked, want int }{
		{512, 512}, {4096, 4096}, {8192, 4608}, {12288, 5632}, {65536, 32256},
	} {
		if n, err := file.WriteAt(pattern(c.asked), 0); n != c.want || err != nil {
			t.Errorf("of %d bytes %d were written, want %d: %v", c.asked, n, c.want, err)
		}
	}
}

func TestBitFlip(t *testing.T) {
	differ := func(a, b []byte) (n int) {
		for i := range a {
			n += bits.OnesCount8(a[i] ^ b[i])
		}
		return n
	}
	for _, op := range []string{"read", "write"} {
		f := New(disk.OS(), 1, Rule{Ops: []string{op}, Times: 1, Effect: BitFlip()})
		file := open(t, f)
		want := pattern(4096)
		given := bytes.Clone(want)
		if n, err := file.WriteAt(given, 0); n != 4096 || err != nil {
			t.Fatal(n, err)
		}
		if !bytes.Equal(given, want) {
			t.Errorf("%s: the caller's bytes were changed", op)
		}
		got := extent.Aligned(4096)
		if n, err := file.ReadAt(got, 0); n != 4096 || err != nil {
			t.Fatal(n, err)
		}
		if d := differ(got, want); d != 1 {
			t.Errorf("%s: %d bits differ", op, d)
		}
	}
}

func TestTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := New(disk.OS(), 1,
			Rule{Ops: []string{"write"}, Effect: Slow(time.Second)},
			Rule{Ops: []string{"read"}, Effect: Throttle(1000)})
		file := open(t, f)
		begin := time.Now()
		if _, err := file.WriteAt(pattern(500), 0); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(begin); d != time.Second {
			t.Errorf("a slow write took %v", d)
		}
		begin = time.Now()
		done := make(chan error, 4)
		for range 4 { // at the same time: the rate is shared
			go func() {
				_, err := file.ReadAt(make([]byte, 500), 0)
				done <- err
			}()
		}
		for range 4 {
			if err := <-done; err != nil {
				t.Fatal(err)
			}
		}
		if d := time.Since(begin); d != 2*time.Second {
			t.Errorf("2000 bytes at 1000 a second took %v", d)
		}
	})
}

func TestDo(t *testing.T) {
	var called []string
	record := func(op, path string) { called = append(called, op+" "+path) }
	f := New(disk.OS(), 1, Rule{Ops: []string{"stat"}, Effect: Do(record)})
	dir := t.TempDir()
	if _, err := f.Stat(dir); err != nil {
		t.Fatal(err)
	}
	if len(called) != 1 || called[0] != "stat "+dir {
		t.Errorf("called: %q", called)
	}
}
