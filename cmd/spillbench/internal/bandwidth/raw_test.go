package bandwidth

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
	"github.com/spillway-db/spillway/tier/faultdev"
)

// newRegionsOf returns regions that are unmapped when the test ends.
func newRegionsOf(t *testing.T, n int64) regions {
	t.Helper()
	room, err := newRegions(t.Context(), n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := room.close(); err != nil {
			t.Error(err)
		}
	})
	return room
}

// rawOf returns a bench without batches, and the raw transfer of a link between the named spaces.
func rawOf(t *testing.T, cfg Config, from, to string, l load) (*bench, transfer) {
	t.Helper()
	b := &bench{cfg: &cfg, load: l, room: newRegionsOf(t, l.total())}
	links := cfg.edges()
	i := slices.IndexFunc(links, func(k link) bool { return k.from.ID().String() == from && k.to.ID().String() == to })
	raw, free, err := b.raw(t.Context(), links[i])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := free(); err != nil {
			t.Error(err)
		}
	})
	return b, raw
}

// TestRawMemory: every byte of every thread goes there, and back.
func TestRawMemory(t *testing.T) {
	l := load{3 << 20, 2}
	b, raw := rawOf(t, small(engine(t)), "gpu:0", "host:0", l)
	room := b.room
	for i := range l.threads {
		here, far := room.part(0, l, i), room.part(1, l, i)
		if int64(len(here)) != l.bytes || int64(len(far)) != l.bytes || bytes.Equal(here, far) {
			t.Fatalf("regions of %d and %d bytes", len(here), len(far))
		}
	}
	first := slices.Clone(room[:l.total()])
	for _, d := range []direction{there, back} {
		for i := range l.threads {
			if err := raw(t.Context(), i, d); err != nil {
				t.Fatal(err)
			}
		}
		if d == there {
			clear(room[:l.total()])
		}
	}
	if !bytes.Equal(room[:l.total()], first) {
		t.Error("the bytes have changed on their way")
	}
}

// write fills the memory of an end, and read returns its contents.
func (e *end) write(t *testing.T, b *bench, content []byte) {
	t.Helper()
	if e.device == nil {
		copy(e.bytes(), content)
		return
	}
	host, err := b.open(t.Context(), b.cfg.host())
	if err != nil {
		t.Fatal(err)
	}
	copy(host.bytes(), content)
	if err := errors.Join(host.copyTo(t.Context(), e), host.buffer.Release()); err != nil {
		t.Fatal(err)
	}
}

func (e *end) read(t *testing.T, b *bench) []byte {
	t.Helper()
	if e.device == nil {
		return slices.Clone(e.bytes())
	}
	host, err := b.open(t.Context(), b.cfg.host())
	if err != nil {
		t.Fatal(err)
	}
	err = e.copyTo(t.Context(), host)
	content := slices.Clone(host.bytes())
	if err := errors.Join(err, host.buffer.Release()); err != nil {
		t.Fatal(err)
	}
	return content
}

// TestLanes: raw copies between spaces are complete in both directions, also between GPUs that cannot
// reach each other. Closing a lane returns its memory.
func TestLanes(t *testing.T) {
	apart := cudatest.New(t, cudatest.Config{Memory: 4 << 20, Devices: 2, NoPeer: true})
	peers := cudatest.New(t, cudatest.Config{Memory: 4 << 20, Devices: 2})
	for _, c := range []struct {
		name, from, to string
		eng            *spillway.Engine
		via            bool
	}{
		{"driver", "gpu:0", "host:0", emulated(t, 1, emulator(t)), false},
		{"simulated peers", "gpu:0", "gpu:1", several(t), false},
		{"host spaces", "host:0", "host:1", several(t), false},
		{"peers of a driver", "gpu:0", "gpu:1", emulated(t, 2, peers), false},
		{"GPUs that cannot reach each other", "gpu:0", "gpu:1", emulated(t, 2, apart), true},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := small(c.eng)
			held := used(c.eng)
			links := cfg.edges()
			i := slices.IndexFunc(
				links,
				func(k link) bool { return k.from.ID().String() == c.from && k.to.ID().String() == c.to },
			)
			b := &bench{cfg: &cfg, load: load{256 << 10, 2}}
			all, err := b.newLanes(t.Context(), links[i])
			if err != nil {
				t.Fatal(err)
			}
			for i, l := range all {
				if got := len(l) == 3; got != c.via {
					t.Errorf("copies go by way of the host: %v", got)
				}
				want := make([]byte, b.load.bytes)
				for j := range want {
					want[j] = byte(j*7 + i)
				}
				none := make([]byte, b.load.bytes)
				for _, d := range []direction{there, back} {
					src, dst := l[0], l[len(l)-1]
					if d == back {
						src, dst = dst, src
					}
					src.write(t, b, want)
					dst.write(t, b, none)
					if err := l.transfer(t.Context(), d); err != nil {
						t.Fatal(err)
					}
					if !bytes.Equal(dst.read(t, b), want) {
						t.Errorf("lane %d, direction %d: other bytes arrive", i, d)
					}
				}
			}
			if err := all.close(); err != nil {
				t.Error(err)
			}
			for _, l := range all {
				if l[0].stream != nil && !errors.Is(l[0].stream.Close(), tier.ErrClosed) {
					t.Error("a stream was left open")
				}
			}
			givenBack(t, c.eng, held)
		})
	}
}

// TestApart: GPUs that cannot reach each other are measured, beside copies by way of the host.
func TestApart(t *testing.T) {
	cfg := small(emulated(t, 2, cudatest.New(t, cudatest.Config{Memory: 4 << 20, Devices: 2, NoPeer: true})))
	cfg.Sizes, cfg.Between = cfg.Sizes[:1], []tier.Kind{tier.GPU}
	if rows := run(t, cfg); len(rows) != 2+3 {
		t.Errorf("%+v", rows)
	}
}

// TestLanesRefused: if the driver refuses a resource of lanes, those that they had are given back.
func TestLanesRefused(t *testing.T) {
	emulator := emulator(t)
	eng := emulated(t, 1, emulator)
	cfg := small(eng)
	links := cfg.edges()
	b := bench{cfg: &cfg, load: load{64 << 10, 2}}
	held, streams := used(eng), emulator.Live("streams")
	for _, call := range []string{"cuMemAllocFromPoolAsync", "cuStreamCreate", "cuMemcpyHtoDAsync_v2"} {
		for lane := range int64(b.load.threads) {
			emulator.Fail(call, lane, cuda.ErrInvalidValue, 1)
			if _, err := b.newLanes(t.Context(), links[0]); !errors.Is(err, cuda.ErrInvalidValue) {
				t.Fatalf("%s refused to lane %d: %v", call, lane, err)
			}
			givenBack(t, eng, held)
			if now := emulator.Live("streams"); now != streams || t.Failed() {
				t.Fatalf("%s refused to lane %d: %d streams are open; before it was %d", call, lane, now, streams)
			}
		}
	}
}

// TestFaultsSpareRaw: faults of a device happen to moves, and not to what raw copies.
func TestFaultsSpareRaw(t *testing.T) {
	var all []*faultdev.Device
	gpu := spillway.GPUConfig{
		Backend: spillway.Sim,
		Memory:  spillway.Bytes(1 << 20),
		Wrap: func(d tier.Device) (tier.Device, error) {
			f := faultdev.New(d, 1)
			all = append(all, f)
			return f, nil
		},
	}
	eng := open(
		t,
		spillway.Config{
			GPUs:       []spillway.GPUConfig{gpu, gpu},
			HostMemory: spillway.Bytes(1 << 20),
			Disks:      []spillway.DiskConfig{},
		},
	)
	_, raw := rawOf(t, small(eng), "gpu:0", "gpu:1", load{64 << 10, 1})
	if err := raw(t.Context(), 0, there); err != nil {
		t.Fatal(err)
	}
	for i, d := range all {
		if n := d.Count("copy-*"); n != 0 {
			t.Errorf("%d copies of raw passed the faults of GPU %d", n, i)
		}
	}
}

// unnamed is a file system without anonymous files.
type unnamed struct{ disk.FS }

func (unnamed) OpenAnonymous(string, bool) (disk.File, error) { return nil, errors.ErrUnsupported }

// rawFile returns a bench whose link to a disk has raw files with these faults, and the link. Volume
// and files have anonymous files or none. All files must be closed when the test ends.
func rawFile(t *testing.T, anonymous bool, l load, rules ...faultfs.Rule) (b *bench, k link, dir string) {
	t.Helper()
	base := disk.OS()
	if !anonymous {
		base = unnamed{base}
	}
	dir = t.TempDir()
	fs := faultfs.New(base, 1, rules...)
	eng := open(t, spillway.Config{GPUs: []spillway.GPUConfig{}, HostMemory: spillway.Bytes(1 << 20),
		Disks: []spillway.DiskConfig{{Dir: dir, Capacity: spillway.Bytes(4 << 20), FS: base}}})
	v := eng.Spaces()[1].Pool.(*volumes.Volume)
	if got := v.Stats().Anonymous; anonymous && !got {
		t.Skip("needs a file system with anonymous files")
	}
	cfg := small(eng)
	cfg.Files = func() disk.FS { return fs }
	t.Cleanup(func() {
		if n := fs.Open(); n != 0 {
			t.Errorf("%d files are open", n)
		}
	})
	return &bench{cfg: &cfg, load: l, room: newRegionsOf(t, l.total())}, cfg.edges()[0], dir
}

// names returns the names of raw files in a directory.
func names(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".spillbench") {
			names = append(names, e.Name())
		}
	}
	return names
}

// TestRawFile: raw reads what it has written, whole, by any number of threads, and its file has no
// name in the directory.
func TestRawFile(t *testing.T) {
	for _, anonymous := range []bool{false, true} {
		for _, l := range []load{{64 << 10, 1}, {3<<20 + tier.Page, 2}, {12 << 20, 1}} {
			t.Run(fmt.Sprint(anonymous, l), func(t *testing.T) {
				b, k, dir := rawFile(t, anonymous, l)
				for range 2 { // a new file each time
					raw, free, err := b.raw(t.Context(), k)
					if err != nil {
						t.Fatal(err)
					}
					if left := names(t, dir); len(left) != 0 {
						t.Errorf("there are %q", left)
					}
					want := slices.Clone(b.room[:l.total()])
					for _, d := range []direction{there, back} {
						for i := range l.threads {
							if err := raw(t.Context(), i, d); err != nil {
								t.Fatal(err)
							}
						}
						if d == there {
							clear(b.room[:l.total()])
						}
					}
					if !bytes.Equal(b.room[:l.total()], want) {
						t.Error("other bytes come back")
					}
					if err := free(); err != nil {
						t.Error(err)
					}
				}
			})
		}
	}
}

// TestRawFileFails: lack of room is reported as such, other errors as what they are, and nothing is
// left. A file system that cannot allocate has sparse files.
func TestRawFileFails(t *testing.T) {
	l := load{256 << 10, 1}
	for _, c := range []struct {
		op        string
		effect    faultfs.Effect
		want      error
		full      bool
		anonymous bool
	}{
		{"allocate", faultfs.Fail(syscall.ENOSPC), syscall.ENOSPC, true, true},
		{"allocate", faultfs.Fail(syscall.EDQUOT), syscall.EDQUOT, true, true},
		{"allocate", faultfs.Fail(syscall.EIO), syscall.EIO, false, true},
		{"allocate", faultfs.Fail(errors.ErrUnsupported), nil, false, true},
		{"create", faultfs.Fail(syscall.EACCES), syscall.EACCES, false, false},
		{"remove", faultfs.Fail(syscall.EIO), syscall.EIO, false, false},
		{"write", faultfs.Fail(syscall.EIO), syscall.EIO, false, true},
		{"read", faultfs.Fail(syscall.EIO), syscall.EIO, false, true},
		{"read", faultfs.Short(), io.ErrNoProgress, false, true},
	} {
		t.Run(fmt.Sprint(c.op, " ", c.want), func(t *testing.T) {
			b, k, dir := rawFile(t, c.anonymous, l, faultfs.Rule{Ops: []string{c.op}, Times: 1, Effect: c.effect})
			raw, free, err := b.raw(t.Context(), k)
			if err == nil {
				_, err = b.turn(t.Context(), raw, []step{{there, there}, {back, back}})
				err = errors.Join(err, free())
			}
			if !errors.Is(err, c.want) || errors.Is(err, tier.ErrNoSpace) != c.full {
				t.Errorf("it ends with %v", err)
			}
			for _, name := range names(t, dir) {
				if c.op != "remove" { // then the name is what could not be removed
					t.Errorf("there is %q", name)
				}
				if err := os.Remove(dir + "/" + name); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// TestRequestsCancelled: no request begins after the context has ended.
func TestRequestsCancelled(t *testing.T) {
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	var begun atomic.Int64
	err := requests(ctx, make([]byte, 16*rawDepth*rawRequest), 0, func(p []byte, _ int64) (int, error) {
		begun.Add(1)
		cancel(cause) // so each goroutine that began one begins no other
		return len(p), nil
	})
	if !errors.Is(err, cause) || begun.Load() > rawDepth {
		t.Errorf("%d requests were begun, %v", begun.Load(), err)
	}
}

// TestRequestsAreMany: as many are in flight as the limit promises.
func TestRequestsAreMany(t *testing.T) {
	all := make(chan struct{}, rawDepth)
	begun := make(chan struct{}, rawDepth)
	go func() {
		for range rawDepth {
			<-begun
		}
		for range rawDepth {
			all <- struct{}{}
		}
	}()
	var lengths [rawDepth]int
	err := requests(t.Context(), make([]byte, rawDepth*rawRequest), 0, func(p []byte, off int64) (int, error) {
		lengths[off/rawRequest] = len(p)
		begun <- struct{}{}
		<-all // until all are in flight
		return len(p), nil
	})
	if err != nil || slices.Min(lengths[:]) != rawRequest {
		t.Errorf("%v, %v", err, lengths)
	}
}

// TestRequestsEnd: after one has failed, no other begins.
func TestRequestsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broken := errors.New("broken")
		var begun atomic.Int64
		err := requests(t.Context(), make([]byte, 16*rawDepth*rawRequest), 0, func(p []byte, off int64) (int, error) {
			begun.Add(1)
			if off == 0 {
				time.Sleep(time.Second) // until all others have begun
				return 0, broken
			}
			time.Sleep(2 * time.Second) // until that one has failed
			return len(p), nil
		})
		if !errors.Is(err, broken) || begun.Load() != rawDepth {
			t.Errorf("%d requests were begun, %v", begun.Load(), err)
		}
	})
}

// TestRewrittenRoom: when the first write of the limit is timed, its file has all its room, and our side
// takes no fresh room after its first turn.
func TestRewrittenRoom(t *testing.T) {
	cfg := small(engine(t))
	cfg.Sizes, cfg.Threads, cfg.Between = cfg.Sizes[:1], []int{1}, []tier.Kind{tier.Host, tier.Disk}
	v := cfg.Engine.Spaces()[2].Pool.(*volumes.Volume)
	files := faultfs.New(disk.OS(), 1)
	cfg.Files = func() disk.FS { return files }
	fresh := make(map[int64]bool)
	cfg.Progress = &steps{at: 1, then: func() { fresh[v.Stats().Fresh] = true }}
	run(t, cfg)
	fresh[v.Stats().Fresh] = true
	if len(fresh) != 1 || fresh[0] {
		t.Errorf("the volume took fresh room after the first round: %v", fresh)
	}
	if n := files.Count("open-anonymous", "create"); n != 1 {
		t.Errorf("%d files of the limit were made", n)
	}
}
