package cuda_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/cuda"
	"github.com/spillway-db/spillway/tier/tiertest"
)

// realDriver is the driver that tests on a real GPU use, and what it shows.
func realDriver(t testing.TB) (*cuda.Driver, []cuda.DeviceInfo) {
	t.Helper()
	driver, err := cuda.Load(cudatest.Real(t))
	if err != nil {
		t.Fatal(err)
	}
	infos, err := driver.Devices()
	if err != nil {
		t.Fatal(err)
	}
	return driver, infos
}

// openReal opens a device, which the test's end closes.
func openReal(t testing.TB, driver *cuda.Driver, cfg cuda.Config) *cuda.Device {
	t.Helper()
	d, err := driver.OpenDevice(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil && !errors.Is(err, tier.ErrClosed) {
			t.Errorf("closing the device: %v", err)
		}
	})
	return d
}

// realKinds are the ways to get memory that are tried.
func realKinds(infos []cuda.DeviceInfo) map[string]bool {
	kinds := map[string]bool{"one piece": true}
	if infos[0].Pools {
		kinds["pools"] = false
	}
	return kinds
}

// TestRealDeviceConforms holds a real GPU to the suites of all devices. It cannot be made to fail
// on purpose, so those tests are left to the emulator.
func TestRealDeviceConforms(t *testing.T) {
	driver, infos := realDriver(t)
	for _, i := range infos {
		t.Logf("%d: %s, %s, %d bytes, CUDA %s", i.Ordinal, i.Name, i.PCI, i.Memory, driver.Version())
	}
	for name, onePiece := range realKinds(infos) {
		t.Run(name, func(t *testing.T) {
			count := 0
			tiertest.RunDevice(t, func(t *testing.T, memory int64, faults tiertest.FaultFunc) tier.Device {
				if faults != nil {
					t.Skip("needs the CUDA emulator, which fails on purpose (TestDeviceConforms)")
				}
				d, err := driver.OpenDevice(cuda.Config{Ordinal: count % len(infos), Node: -1, Memory: memory, OnePiece: onePiece})
				if err != nil {
					t.Fatal(err)
				}
				count++
				return d
			})
			var traits []tiertest.Trait
			if !onePiece {
				traits = append(traits, tiertest.HolesUnknown)
			}
			tiertest.RunPool(t, func(t *testing.T, capacity int64) tier.Pool {
				p, err := devpool.NewMemory(openReal(t, driver, cuda.Config{Memory: capacity, OnePiece: onePiece}))
				if err != nil {
					t.Fatal(err)
				}
				return p
			}, traits...)
		})
	}
}

// work is a device with a stream, whose methods end the test when they fail.
type work struct {
	*cuda.Device
	t testing.TB
	s tier.Stream
}

func newWork(t testing.TB, d *cuda.Device) *work {
	t.Helper()
	s, err := d.NewStream()
	w := &work{d, t, s}
	w.ok(err)
	t.Cleanup(func() { w.ok(s.Close()) })
	return w
}

func (w *work) ok(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *work) alloc(n int64) tier.Addr {
	w.t.Helper()
	a, err := w.Alloc(w.s, n)
	w.ok(err)
	w.t.Cleanup(func() { w.ok(w.Free(w.s, a)) })
	return a
}

func (w *work) wait() {
	w.t.Helper()
	e, err := w.Record(w.s)
	w.ok(err)
	w.ok(tier.Wait(context.Background(), e))
}

// pinned returns mapped memory that the device has pinned.
func (w *work) pinned(n int64) []byte {
	w.t.Helper()
	b, err := unix.Mmap(-1, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	w.ok(err)
	w.t.Cleanup(func() { w.ok(unix.Munmap(b)) })
	w.ok(w.Pin(b))
	w.t.Cleanup(func() { w.ok(w.Unpin(b)) })
	return b
}

func fillRandom(b []byte, seed byte) {
	_, _ = rand.NewChaCha8([32]byte{seed}).Read(b) // cannot fail
}

// TestRealPinnedByOthers: memory that other code in the process has pinned whole is used as it is,
// and what is pinned in part is not.
func TestRealPinnedByOthers(t *testing.T) {
	driver, _ := realDriver(t)
	others, _ := realDriver(t)
	theirs := newWork(t, openReal(t, others, cuda.Config{Memory: 1 << 20}))
	w := newWork(t, openReal(t, driver, cuda.Config{Memory: 1 << 20}))
	whole, part := theirs.pinned(1<<20), pages(t, 8)
	w.ok(w.Pin(whole))
	t.Cleanup(func() { w.ok(w.Unpin(whole)) })
	w.ok(theirs.Pin(part[:4*4096]))
	t.Cleanup(func() { w.ok(theirs.Unpin(part[:4*4096])) })
	if err := w.Pin(part); err == nil {
		t.Error("what is pinned in part was taken for pinned")
	}
	roundTrip(t, w.Device, whole[:1<<20-512])
	roundTrip(t, w.Device, part)
}

// TestRealPeers copies between each two GPUs that can reach each other.
func TestRealPeers(t *testing.T) {
	driver, infos := realDriver(t)
	if len(infos) < 2 {
		t.Skipf("needs two GPUs, beside %s another", infos[0].Name)
	}
	const n = 8<<20 + 5
	for _, from := range infos {
		for _, to := range infos {
			if from.Ordinal == to.Ordinal {
				continue
			}
			t.Run(fmt.Sprintf("%d to %d", from.Ordinal, to.Ordinal), func(t *testing.T) {
				a := newWork(t, openReal(t, driver, cuda.Config{Ordinal: from.Ordinal, Memory: 16 << 20}))
				b := newWork(t, openReal(t, driver, cuda.Config{Ordinal: to.Ordinal, Memory: 16 << 20}))
				in, out := a.pinned(n), b.pinned(n)
				fillRandom(in, 2)
				src, dst := a.alloc(n), b.alloc(n)
				b.wait() // until its memory is there
				a.ok(a.CopyToDevice(a.s, src, in))
				err := a.CopyPeer(a.s, dst, b.Device, src, n)
				if errors.Is(err, tier.ErrNotSupported) {
					t.Skip("needs GPUs that reach each other: ", err)
				}
				a.ok(err)
				a.wait()
				b.ok(b.CopyToHost(b.s, out, dst))
				b.wait()
				if !bytes.Equal(in, out) {
					t.Error("what came there is not what was sent")
				}
			})
		}
	}
}

// TestRealBorrow: other code's allocations on the GPU, of any kind, can be used while they are
// borrowed, and unallocated memory cannot.
func TestRealBorrow(t *testing.T) {
	driver, infos := realDriver(t)
	const n = 3<<20 + 5
	for name, onePiece := range realKinds(infos) {
		t.Run(name, func(t *testing.T) {
			theirs := newWork(t, openReal(t, driver, cuda.Config{Memory: 16 << 20, OnePiece: onePiece}))
			w := newWork(t, openReal(t, driver, cuda.Config{Memory: 1 << 20}))
			in, out := w.pinned(n), w.pinned(n)
			fillRandom(in, 5)
			a := theirs.alloc(n)
			theirs.wait() // until it is there
			if err := w.CopyToDevice(w.s, a, in); err == nil {
				t.Error("what is not borrowed was worked with")
			}
			giveBack, err := w.Borrow(a+1, n-1)
			w.ok(err)
			w.ok(w.CopyToDevice(w.s, a+1, in[1:]))
			w.ok(w.CopyToHost(w.s, out[1:], a+1))
			w.wait()
			if !bytes.Equal(in[1:], out[1:]) {
				t.Error("what came back is not what was sent")
			}
			giveBack()
			for _, none := range []struct {
				at tier.Addr
				n  int64
			}{{1, 8}, {a, 1 << 45}} {
				if _, err := w.Borrow(none.at, none.n); err == nil {
					t.Errorf("%d bytes at %#x, which nobody has, were borrowed", none.n, uint64(none.at))
				}
			}
		})
	}
}

// largestReal is as much as tests take of a GPU at once, if it has that.
const largestReal = 256 << 20

// TestRealAlignments copies from and to everywhere in a line of memory, pinned and not, and looks
// at what lies beside.
func TestRealAlignments(t *testing.T) {
	driver, _ := realDriver(t)
	const room = 64 << 10
	w := newWork(t, openReal(t, driver, cuda.Config{Memory: 1 << 20}))
	a := w.alloc(room)
	for name, memory := range map[string]func(int64) []byte{
		"pinned":     w.pinned,
		"not pinned": func(n int64) []byte { return make([]byte, n) },
	} {
		t.Run(name, func(t *testing.T) {
			in, out, want := memory(room), memory(room), make([]byte, room)
			fillRandom(in, 4)
			for host := range 16 {
				for device := range 8 {
					for _, n := range []int{1, 2, 3, 4, 7, 8, 63, 64, 65, 511, 4095, 4097, 60_001} {
						clear(out)
						clear(want)
						copy(want[host+1:], in[host:host+n])
						w.ok(w.CopyToDevice(w.s, a+tier.Addr(device), in[host:host+n]))
						w.ok(w.CopyToHost(w.s, out[host+1:host+1+n], a+tier.Addr(device)))
						w.wait()
						if !bytes.Equal(out, want) {
							t.Fatalf("%d bytes between %d in host memory and %d on the device are not what was sent", n, host, device)
						}
					}
				}
			}
		})
	}
}

// held is an event that the test ends.
type held struct{ done chan struct{} }

func (h held) Done() <-chan struct{} { return h.done }
func (h held) Err() error            { return nil }

// TestRealFullStream is TestFullStream on a real GPU.
func TestRealFullStream(t *testing.T) {
	driver, infos := realDriver(t)
	for name, onePiece := range realKinds(infos) {
		t.Run(name, func(t *testing.T) {
			fullStream(t, openReal(t, driver, cuda.Config{Memory: 1 << 20, OnePiece: onePiece}))
		})
	}
}

// TestFullStream: who puts more work on a stream that does not get on than the driver queues keeps
// nobody else waiting.
func TestFullStream(t *testing.T) {
	fullStream(t, load(t, cudatest.Config{}).open(t, cuda.Config{Memory: 1 << 20}))
}

func fullStream(t *testing.T, d *cuda.Device) {
	full, other := newWork(t, d), newWork(t, d)
	at, there, n := full.alloc(512), other.alloc(1<<16), 6000
	pinned := full.pinned(4096)
	in, out := pinned[:1024], make([]byte, 1024)
	fillRandom(in, 1)
	e := held{make(chan struct{})}
	full.ok(full.WaitEvent(full.s, e))
	var put atomic.Int64
	var filled errgroup.Group
	filled.Go(func() error {
		for i := range n {
			if err := full.CopyToDevice(full.s, at+tier.Addr(i%512), in[i%512:i%512+1]); err != nil {
				return err
			}
			put.Add(1)
		}
		return nil
	})
	for last := int64(-1); put.Load() != last; time.Sleep(100 * time.Millisecond) {
		last = put.Load()
	}
	t.Logf("%d of %d copies are put", put.Load(), n)
	var rest errgroup.Group
	steps := make(chan string, 10)
	rest.Go(func() error {
		defer close(steps)
		for i := range 4 {
			if err := errors.Join(other.CopyToDevice(other.s, there, in), other.CopyToHost(other.s, out, there)); err != nil {
				return err
			}
			steps <- fmt.Sprint("copies ", i)
			ev, err := other.Record(other.s)
			if err != nil {
				return err
			}
			steps <- fmt.Sprint("record ", i)
			if err := tier.Wait(context.Background(), ev); err != nil {
				return err
			}
		}
		s, err := other.NewStream()
		if err != nil {
			return err
		}
		return s.Close()
	})
	last, hang := "nothing", time.After(10*time.Second)
watch:
	for {
		select {
		case s, ok := <-steps:
			if !ok {
				break watch
			}
			last = s
		case <-hang:
			t.Errorf("work on another stream waits for the one that is full, after %s", last)
			break watch
		}
	}
	close(e.done)
	full.ok(errors.Join(filled.Wait(), rest.Wait()))
	if !bytes.Equal(in, out) {
		t.Error("what came back beside a full stream is not what was sent")
	}
	full.wait()
	got := make([]byte, 512)
	full.ok(full.CopyToHost(full.s, got, at))
	full.wait()
	if !bytes.Equal(got, in[:512]) {
		t.Error("what was put on the full stream is not there")
	}
}

// BenchmarkReal is what a mover sees of a GPU: copies of memory that is pinned and that is not.
func BenchmarkReal(b *testing.B) {
	driver, infos := realDriver(b)
	most := min(largestReal, infos[0].Memory/4)
	w := newWork(b, openReal(b, driver, cuda.Config{Memory: most + 1<<20}))
	at := w.alloc(most)
	for name, memory := range map[string][]byte{"pinned": w.pinned(most), "not pinned": make([]byte, most)} {
		fillRandom(memory, 1)
		for _, n := range []int64{1 << 20, 64 << 20, 256 << 20} {
			if n > most {
				continue
			}
			part := memory[:n]
			what := map[string]func() error{
				"to device": func() error { return w.CopyToDevice(w.s, at, part) },
				"to host":   func() error { return w.CopyToHost(w.s, part, at) },
			}
			for does, call := range what {
				if name == "pinned" {
					does += " pinned"
				}
				b.Run(does+"/"+size.Format(n), func(b *testing.B) {
					b.SetBytes(n)
					for b.Loop() {
						w.ok(call())
						w.wait()
					}
				})
			}
		}
	}
}
