package inject

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/sim"
)

func parse(t *testing.T, texts ...string) (all []Spec) {
	t.Helper()
	for _, text := range texts {
		s, err := Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, s)
	}
	return all
}

func create(t *testing.T, fsys disk.FS) disk.File {
	t.Helper()
	f, err := fsys.Create(filepath.Join(t.TempDir(), "file"), false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	})
	return f
}

func TestNothingAskedForChangesNothing(t *testing.T) {
	f := New(nil, 0, 1)
	dev, err := sim.New(sim.Config{Memory: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	if volume, slow := f.Volume(), f.Slow(); volume != nil || slow != disk.OS() {
		t.Errorf("a volume gets %T, and a file beside it %T", volume, slow)
	}
	if d := f.Device(dev); d != tier.Device(dev) {
		t.Errorf("a device becomes %T", d)
	}
	if d := New(parse(t, "op=read,kind=eio"), 0, 1).Device(dev); d != tier.Device(dev) {
		t.Errorf("for faults of disks a device becomes %T", d)
	}
	f.Arm()
	if len(f.Told()) != 0 || f.Blame() != "" {
		t.Errorf("%q, %q", f.Told(), f.Blame())
	}
}

// TestVolumesAreCountedTogether, from the time on at which faults are let loose; and what
// is told of them.
func TestVolumesAreCountedTogether(t *testing.T) {
	f := New(parse(t, "op=write,kind=slow:0.001,times=1", "op=write,kind=eio,at=3", "op=read,kind=bitflip"), 0, 1)
	a, b := create(t, f.Volume()), create(t, f.Volume())
	for range 5 { // while opening
		if _, err := a.WriteAt([]byte("x"), 0); err != nil {
			t.Fatal(err)
		}
	}
	f.Arm()
	for i, file := range []disk.File{a, b, a, b} {
		if _, err := file.WriteAt([]byte("x"), 0); errors.Is(err, syscall.EIO) != (i == 2) {
			t.Errorf("write %d: %v", i, err)
		}
		if i == 1 && f.Blame() != "" {
			t.Errorf("a delay is blamed: %q", f.Blame())
		}
	}
	if got := f.Hits(); !slices.Equal(got, []int64{1, 1, 0}) {
		t.Errorf("hits %v", got)
	}
	want := []string{
		"--fault op=write,kind=slow:0.001,times=1, hits: 1 of 4 operations",
		"--fault op=write,kind=eio,at=3, hits: 1 of 4 operations",
		"--fault op=read,kind=bitflip, hits: 0 of 0 operations",
	}
	if got := f.Told(); !slices.Equal(got, want) {
		t.Errorf("told:\n%s", strings.Join(got, "\n"))
	}
	if got := f.Blame(); got != "--fault op=write,kind=eio,at=3, hits: 1" {
		t.Errorf("blamed: %q", got)
	}
}

// TestEachVolumeHasItsRate: reads and writes of one share it, another has its own; and
// faults come under it.
func TestEachVolumeHasItsRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := New(parse(t, "op=read,kind=short"), 1000, 1)
		a, b := create(t, f.Volume()), create(t, f.Volume())
		f.Arm()
		begin := time.Now()
		done := make(chan error)
		for _, file := range []disk.File{a, b} {
			go func() {
				_, err := file.WriteAt(make([]byte, 1000), 0)
				done <- err
				n, err := file.ReadAt(make([]byte, 1000), 0)
				if n == 0 || n == 1000 {
					t.Errorf("a short read of %d bytes", n)
				}
				done <- err
			}()
		}
		for range 4 {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
		if took := time.Since(begin); took != 2*time.Second {
			t.Errorf("2000 bytes on each of two disks at 1000 a second took %v", took)
		}
	})
}

func TestDevicesFail(t *testing.T) {
	inner, err := sim.New(sim.Config{Memory: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	f := New(parse(t, "op=alloc,kind=oom,at=2", "op=copy,kind=eio"), 0, 1)
	dev := f.Device(inner)
	defer dev.Close()
	s, err := dev.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := dev.Alloc(s, 1); err != nil {
		t.Fatal(err)
	}
	f.Arm()
	a, err := dev.Alloc(s, 8)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := dev.Alloc(s, 8); !errors.Is(err, tier.ErrNoSpace) {
		t.Errorf("the second: %v", err)
	}
	if err := errors.Join(dev.Fill(s, a, 1, 8), s.Sync()); err != nil {
		t.Errorf("no copy: %v", err)
	}
	if err := errors.Join(dev.CopyRegions(s, []tier.Region{{HostDst: make([]byte, 8), Src: a}}), s.Sync()); !errors.Is(err, syscall.EIO) {
		t.Errorf("a copy: %v", err)
	}
	if got := f.Hits(); !slices.Equal(got, []int64{1, 1}) {
		t.Errorf("hits %v", got)
	}
}

// TestChance: the same seed has the same operations hit, and another has others; on disks and
// on devices.
func TestChance(t *testing.T) {
	const n = 64
	ofDisk := func(seed uint64) string {
		f := New(parse(t, "op=write,kind=eio,p=0.5"), 0, seed)
		file := create(t, f.Volume())
		f.Arm()
		return pattern(n, func() bool { _, err := file.WriteAt([]byte("x"), 0); return err != nil })
	}
	ofDevice := func(seed uint64) string {
		inner, err := sim.New(sim.Config{Memory: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		f := New(parse(t, "op=alloc,kind=oom,p=0.5"), 0, seed)
		dev := f.Device(inner)
		defer dev.Close()
		s, err := dev.NewStream()
		if err != nil {
			t.Fatal(err)
		}
		f.Arm()
		return pattern(n, func() bool { _, err := dev.Alloc(s, 8); return err != nil })
	}
	for what, hit := range map[string]func(seed uint64) string{"disk": ofDisk, "device": ofDevice} {
		if a, b, c := hit(5), hit(5), hit(6); a != b || a == c {
			t.Errorf("%s: seeds 5, 5 and 6 hit\n%s\n%s\n%s", what, a, b, c)
		}
	}
}

// pattern says which of n operations failed.
func pattern(n int, failed func() bool) string {
	out := make([]byte, n)
	for i := range out {
		if out[i] = '.'; failed() {
			out[i] = 'x'
		}
	}
	return string(out)
}
