package cuda_test

import (
	"errors"

	"github.com/ebitengine/purego"

	"github.com/spillway-db/spillway/internal/cuda"
)

// program maps memory of the first device as a program does by itself, behind the first half of the
// addresses that it has reserved.
func (r *rig) program() {
	r.t.Helper()
	const granule = 2 << 20
	lib, err := purego.Dlopen(r.Path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	ok(r.t, err)
	var reserve func(addr *uint64, n, alignment uintptr, hint, flags uint64) int32
	var create func(h *uint64, n uintptr, props *[8]int32, flags uint64) int32
	var put func(addr uint64, n, offset uintptr, h, flags uint64) int32
	var access func(addr uint64, n uintptr, desc *[3]int32, count uintptr) int32
	var unmap, free func(addr uint64, n uintptr) int32
	var release func(h uint64) int32
	for name, f := range map[string]any{"cuMemAddressReserve": &reserve, "cuMemCreate": &create, "cuMemMap": &put, "cuMemSetAccess": &access,
		"cuMemUnmap": &unmap, "cuMemAddressFree": &free, "cuMemRelease": &release} {
		purego.RegisterLibFunc(f, lib, name)
	}
	var at, h uint64
	code := reserve(&at, 2*granule, 0, 0, 0) | create(&h, granule, &[8]int32{1, 0, 1, 0}, 0)
	code |= put(at, granule, 0, h, 0) | access(at, granule, &[3]int32{1, 0, 3}, 1) | release(h)
	if code != 0 {
		r.t.Fatalf("mapping memory: %d", code)
	}
	ok(r.t, r.devices[0].Here(func(c *cuda.Calls) error {
		may, err := c.MayUse(cuda.Ptr(at))
		if !may || !c.ProgramMapped(cuda.Ptr(at)) || c.Reserved(cuda.Ptr(at)) {
			err = errors.Join(err, errors.New("memory that is mapped is not taken for such"))
		}
		if behind := cuda.Ptr(at + granule); c.ProgramMapped(behind) || !c.Reserved(behind) {
			err = errors.Join(err, errors.New("addresses without memory are not taken for such"))
		}
		return err
	}))
	if code := unmap(at, granule) | free(at, 2*granule); code != 0 { // nothing is left of it, so no handle of it was kept
		r.t.Errorf("giving up mapped memory: %d", code)
	}
}
