package cuda_test

import (
	"encoding/binary"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"

	"github.com/ebitengine/purego"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/testseed"
)

// examplePTX returns the text of the kernel of the example of tier/cuda/gorgonia.
func examplePTX(t testing.TB) string {
	t.Helper()
	text, err := os.ReadFile("../../tier/cuda/gorgonia/testdata/add.ptx")
	ok(t, err)
	return string(text)
}

// int64Bytes returns numbers as they lie in a device's memory.
func int64Bytes(numbers []uint64) (b []byte) {
	for _, x := range numbers {
		b = binary.LittleEndian.AppendUint64(b, x)
	}
	return b
}

// The text of the example's kernel, interpreted, adds a number to each of many, and touches nothing
// else. The emulator computes the same for a launch of that text.
func TestExampleKernel(t *testing.T) {
	text := examplePTX(t)
	k, err := parsePTX(text)
	ok(t, err)
	// CUDA 11.0 came with PTX 7.0.
	if v, err := strconv.ParseFloat(k.version, 64); err != nil || v > 7.0 || k.target != "sm_50" {
		t.Errorf("the text is PTX %s for %s", k.version, k.target)
	}
	r := open(t, cudatest.Config{})
	d := r.devices[0]
	const most = 1000
	s, in, out, host := r.stream(d), r.alloc(d, 8*most), r.alloc(d, 8*most+8), r.host(d, 8*most+8)
	lib, err := purego.Dlopen(r.Path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	ok(t, err)
	var load func(m *uintptr, text string) int32
	var function func(f *uintptr, m uintptr, name string) int32
	var unload func(m uintptr) int32
	var launch func(f uintptr, bx, by, bz, tx, ty, tz, shared uint32, s uintptr, args *[4]*uint64, extra uintptr) int32
	for name, f := range map[string]any{"cuModuleLoadData": &load, "cuModuleGetFunction": &function,
		"cuModuleUnload": &unload, "cuLaunchKernel": &launch} {
		purego.RegisterLibFunc(f, lib, name)
	}
	refused := func(code int32) error {
		if code != 0 {
			return cuda.Code(code)
		}
		return nil
	}
	var m, f uintptr
	r.do(func(*cuda.Calls) error { return refused(load(&m, text) | function(&f, m, k.name)) })
	t.Cleanup(func() { r.do(func(*cuda.Calls) error { return refused(unload(m)) }) })
	lots := rand.New(rand.NewPCG(testseed.One(t), 1))
	for _, grid := range []struct{ Blocks, Threads uint32 }{{1, 32}, {3, 64}, {4, 256}} {
		for _, n := range []int{0, 1, 31, 32, 33, 256, lots.IntN(most), most} {
			numbers := make([]uint64, n)
			for i := range numbers {
				numbers[i] = lots.Uint64()
			}
			addend := lots.Uint64()
			want := slices.Clone(numbers)
			for i := range want {
				want[i] += addend
			}
			want = append(want, 0x0707070707070707) // what is behind the result stays

			const from, to = 0x7f52_3460_0008, 0x7f52_0000_0008
			got := slices.Repeat([]byte{7}, 8*n+8)
			memory := ptxMemory{{from, int64Bytes(numbers), false}, {to, got, true}}
			ok(t, k.launch(int(grid.Blocks), int(grid.Threads), memory, lots, to, from, uint64(n), addend))
			if !slices.Equal(got, int64Bytes(want)) {
				t.Errorf("%+v: %d numbers: the text computes %x, want %x", grid, n, got, int64Bytes(want))
			}

			copy(host, int64Bytes(numbers))
			r.do(func(c *cuda.Calls) error {
				if n > 0 {
					ok(t, c.CopyToDevice(s, in, extent.Address(host), int64(8*n)))
				}
				ok(t, c.Fill(s, out, 7, 8*most+8))
				a, b, count := uint64(out), uint64(in), uint64(n)
				args := &[4]*uint64{&a, &b, &count, &addend}
				return refused(launch(f, grid.Blocks, 1, 1, grid.Threads, 1, 1, 0, uintptr(s), args, 0))
			})
			r.do(func(c *cuda.Calls) error { return c.CopyToHost(s, extent.Address(host), out, int64(8*n+8)) })
			ok(t, r.wait(d, s))
			if !slices.Equal(host[:8*n+8], int64Bytes(want)) {
				t.Errorf("%+v: %d numbers: the emulator computes %x, want %x", grid, n, host[:8*n+8], int64Bytes(want))
			}
		}
	}
}
