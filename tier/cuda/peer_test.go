//go:build linux && (amd64 || arm64)

package cuda_test

import (
	"bytes"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"weak"

	"github.com/ebitengine/purego"
	driver "github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/tier/cuda"
)

// context makes a context of a GPU, as a program does for itself, until the test ends.
func (r *rig) context(t *testing.T, ordinal int32) (ctx uintptr) {
	t.Helper()
	lib, err := purego.Dlopen(r.Path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		t.Fatal(err)
	}
	var create func(ctx *uintptr, flags uint32, dev int32) int32
	var pop func(ctx *uintptr) int32
	var destroy func(ctx uintptr) int32
	purego.RegisterLibFunc(&create, lib, "cuCtxCreate_v2")
	purego.RegisterLibFunc(&pop, lib, "cuCtxPopCurrent_v2")
	purego.RegisterLibFunc(&destroy, lib, "cuCtxDestroy_v2")
	runtime.LockOSThread() // to which it belongs until it is popped
	defer runtime.UnlockOSThread()
	var popped uintptr
	if code := create(&ctx, 0, ordinal) | pop(&popped); code != 0 || popped != ctx {
		t.Fatalf("creating a context: %d", code)
	}
	t.Cleanup(func() {
		if code := destroy(ctx); code != 0 {
			t.Errorf("destroying the context: %d", code)
		}
	})
	return ctx
}

// Two contexts of a GPU copy to each other, although a driver says that a GPU is no peer of itself.
func TestCopyBetweenContextsOfAGPU(t *testing.T) {
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			r := load(t, k.emulator)
			ctx := r.context(t, 0)
			d := r.open(t, cuda.Config{Memory: 1 << 20, OnePiece: k.onePiece})
			own := r.open(t, cuda.Config{Memory: 1 << 20, OnePiece: k.onePiece, Context: ctx})
			s, err := d.NewStream()
			if err != nil {
				t.Fatal(err)
			}
			there, err := own.NewStream()
			if err != nil {
				t.Fatal(err)
			}
			const n = 1000
			want, got := bytes.Repeat([]byte{1, 2, 3, 4}, n/4), make([]byte, n)
			from, ferr := d.Alloc(s, n)
			to, terr := own.Alloc(there, n)
			if err := errors.Join(ferr, terr, there.Sync(), d.CopyToDevice(s, from, want)); err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(d.CopyPeer(s, to, own, from, n), s.Sync(), own.CopyToHost(there, got, to), there.Sync()); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, want) {
				t.Error("the copy differs")
			}
		})
	}
}

// A context is refused that is not of the GPU that was asked for, in an error that names both.
func TestContextOfAnotherGPU(t *testing.T) {
	r := load(t, cudatest.Config{Devices: 2})
	ctx := r.context(t, 1)
	_, err := r.driver.OpenDevice(cuda.Config{Memory: 1 << 20, Context: ctx})
	if err == nil || !strings.Contains(err.Error(), "device 0: the context is of another GPU, device 1: set Config.Ordinal to 1, or Config.Context to a context of device 0") {
		t.Errorf("opening GPU 0 with a context of GPU 1: %v", err)
	}
	roundTrip(t, r.open(t, cuda.Config{Ordinal: 1, Memory: 1 << 20, Context: ctx}), page(t))
	r.Fail("cuCtxGetDevice", 0, driver.ErrInvalidValue, 1)
	if _, err := r.driver.OpenDevice(cuda.Config{Ordinal: 1, Memory: 1 << 20, Context: ctx}); !errors.Is(err, driver.ErrInvalidValue) {
		t.Errorf("a driver that does not answer: %v", err)
	}
}

// A device that is closed is not kept in memory by its peers; one that is opened in its place is as
// good a peer.
func TestClosedPeersAreForgotten(t *testing.T) {
	r := load(t, cudatest.Config{Devices: 2})
	d := newWork(t, r.open(t, cuda.Config{Memory: 1 << 20}))
	from := d.alloc(512)
	visit := func() weak.Pointer[cuda.Device] {
		peer, err := r.driver.OpenDevice(cuda.Config{Ordinal: 1, Memory: 1 << 20})
		must(t, err)
		s, err := peer.NewStream()
		must(t, err)
		to, err := peer.Alloc(s, 512)
		must(t, err)
		must(t, s.Sync())
		must(t, d.CopyPeer(d.s, to, peer, from, 512))
		must(t, d.s.Sync())
		must(t, peer.CopyPeer(s, from, d.Device, to, 512))
		must(t, s.Sync())
		must(t, peer.Close())
		return weak.Make(peer)
	}
	for range 3 {
		closed := visit()
		for tries := 0; closed.Value() != nil; tries++ {
			if tries == 100 {
				t.Fatal("a device that is closed is kept in memory")
			}
			runtime.GC()
		}
	}
}

// Pinned memory is given up also by a driver that wants to be asked where it was pinned, by
// whomever of the devices that share it is the last.
func TestUnpinnedByTheLast(t *testing.T) {
	for _, adopted := range []bool{false, true} {
		t.Run(fmt.Sprintf("adopted=%t", adopted), func(t *testing.T) {
			r := load(t, cudatest.Config{Devices: 2})
			r.Set("unregister_home", 1)
			cfg := cuda.Config{Memory: 1 << 20}
			if adopted {
				cfg.Context = r.context(t, 0)
			}
			first, second := r.open(t, cfg), r.open(t, cuda.Config{Ordinal: 1, Memory: 1 << 20})
			mem := page(t)
			must(t, first.Pin(mem))
			must(t, second.Pin(mem))
			must(t, first.Unpin(mem))
			must(t, second.Unpin(mem))
			if n := r.Live("registrations"); n != 0 {
				t.Errorf("%d registrations are left", n)
			}
		})
	}
}
