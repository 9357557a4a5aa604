//go:build linux && (amd64 || arm64)

package cuda_test

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/ebitengine/purego"

	driver "github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/cuda"
)

// mapper is a program that maps its memory itself.
type mapper struct {
	t       *testing.T
	reserve func(addr *uint64, n, alignment uintptr, hint, flags uint64) int32
	free    func(addr uint64, n uintptr) int32
	create  func(h *uint64, n uintptr, props *allocationProps, flags uint64) int32
	put     func(addr uint64, n, offset uintptr, h, flags uint64) int32
	unmap   func(addr uint64, n uintptr) int32
	access  func(addr uint64, n uintptr, desc *accessDesc, count uintptr) int32
	release func(h uint64) int32
}

type allocationProps struct {
	kind, _, location, device int32 // the second: no handles for others
	_                         [16]byte
}

type accessDesc struct{ location, device, flags int32 }

const granule = 2 << 20

func newMapper(t *testing.T, path string) *mapper {
	t.Helper()
	lib, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	must(t, err)
	m := &mapper{t: t}
	for name, f := range map[string]any{
		"cuMemAddressReserve": &m.reserve, "cuMemAddressFree": &m.free, "cuMemCreate": &m.create, "cuMemMap": &m.put,
		"cuMemUnmap": &m.unmap, "cuMemSetAccess": &m.access, "cuMemRelease": &m.release,
	} {
		purego.RegisterLibFunc(f, lib, name)
	}
	return m
}

func (m *mapper) ok(code int32) {
	m.t.Helper()
	if code != 0 {
		m.t.Fatalf("the driver says %d", code)
	}
}

// addresses reserves n granules until the test ends, when nothing must be mapped there.
func (m *mapper) addresses(n uintptr) tier.Addr {
	m.t.Helper()
	var at uint64
	m.ok(m.reserve(&at, n*granule, 0, 0, 0))
	m.t.Cleanup(func() { m.ok(m.free(at, n*granule)) })
	return tier.Addr(at)
}

// memory maps n granules of a GPU's memory until the test ends.
func (m *mapper) memory(at tier.Addr, n uintptr, device int32) {
	m.t.Helper()
	var h uint64
	m.ok(m.create(&h, n*granule, &allocationProps{kind: 1, location: 1, device: device}, 0))
	m.ok(m.put(uint64(at), n*granule, 0, h, 0))
	m.ok(m.release(h)) // what is mapped stays
	m.t.Cleanup(func() { m.ok(m.unmap(uint64(at), n*granule)) })
}

func (m *mapper) let(at tier.Addr, n uintptr, device, flags int32) {
	m.t.Helper()
	m.ok(m.access(uint64(at), n*granule, &accessDesc{1, device, flags}, 1))
}

// TestBorrowMappedMemory: what a program has mapped itself is borrowed as a whole, of however many
// pieces it is, where the GPU may use all of it.
func TestBorrowMappedMemory(t *testing.T) {
	const none, read, readWrite = 0, 1, 3
	r := load(t, cudatest.Config{Devices: 2})
	m := newMapper(t, r.Path)
	at := m.addresses(10)
	m.memory(at, 1, 0)           // 0
	m.memory(at+granule, 2, 0)   // 1 and 2
	m.memory(at+3*granule, 1, 1) // 3, the other GPU's
	m.memory(at+5*granule, 3, 0) // 5 to 7, behind a hole
	m.let(at, 4, 0, readWrite)
	m.let(at+5*granule, 3, 0, readWrite)
	m.let(at+6*granule, 1, 0, none)
	m.let(at+7*granule, 1, 0, read)
	d := newWork(t, r.open(t, cuda.Config{Memory: 4 << 20}))
	for name, c := range map[string]struct {
		off, size int64
		want      error
		first     int64 // byte that cannot be had
	}{
		"in one piece":         {100, 1000, nil, 0},
		"a whole piece":        {granule, 2 * granule, nil, 0},
		"across two":           {granule - 1, 2, nil, 0},
		"all before the hole":  {0, 4 * granule, nil, 0},
		"the other GPU's":      {3 * granule, granule, nil, 0},
		"into the hole":        {0, 4*granule + 1, cuda.ErrNotAllocated, 4 * granule},
		"in the hole":          {4*granule + 5, 1, cuda.ErrNotAllocated, 4*granule + 5},
		"across the hole":      {3 * granule, 3 * granule, cuda.ErrNotAllocated, 4 * granule},
		"behind the hole":      {5 * granule, granule, nil, 0},
		"barred":               {6*granule + 7, 1, cuda.ErrNotAccessible, 6*granule + 7},
		"partly barred":        {5*granule + 9, 3*granule - 9, cuda.ErrNotAccessible, 6 * granule},
		"to be read only":      {7 * granule, 1, cuda.ErrNotAccessible, 7 * granule},
		"behind all of it":     {8 * granule, 1, cuda.ErrNotAllocated, 8 * granule},
		"beyond the addresses": {10 * granule, 1, cuda.ErrNotAllocated, 10 * granule},
		"more than there is":   {0, 1<<63 - 1, cuda.ErrNotAllocated, 4 * granule},
	} {
		end, err := d.Borrow(at+tier.Addr(c.off), c.size)
		if c.want == nil {
			if err != nil {
				t.Errorf("%s: %v", name, err)
				continue
			}
			d.roundTrip(at+tier.Addr(c.off), c.size)
			end()
		}
		var refused *cuda.BorrowError
		if !errors.Is(err, c.want) || c.want != nil && (!errors.As(err, &refused) || refused.At != at+tier.Addr(c.first) || refused.Size != c.size) {
			t.Errorf("%s: %v, want %v of byte %d", name, err, c.want, c.first-c.off)
		}
	}
	other := newWork(t, r.open(t, cuda.Config{Memory: 4 << 20, Ordinal: 1}))
	if _, err := other.Borrow(at, 1); !errors.Is(err, cuda.ErrNotAccessible) || !strings.Contains(err.Error(), "cuMemSetAccess") {
		t.Errorf("what another GPU may use was borrowed: %v", err)
	}
}

// roundTrip copies bytes to borrowed memory and back.
func (w *work) roundTrip(at tier.Addr, n int64) {
	w.t.Helper()
	in, out := make([]byte, n), make([]byte, n)
	fillRandom(in, byte(at))
	w.ok(w.CopyToDevice(w.s, at, in))
	w.ok(w.CopyToHost(w.s, out, at))
	w.wait()
	if !bytes.Equal(in, out) {
		w.t.Errorf("of %d bytes at %#x others came back", n, uint64(at))
	}
}

// TestRealBorrowMappedMemory: the driver of a real GPU answers as the emulator does.
func TestRealBorrowMappedMemory(t *testing.T) {
	driver, _ := realDriver(t)
	path := cudatest.Real(t)
	if path == "" {
		path = "libcuda.so.1"
	}
	d := newWork(t, openReal(t, driver, cuda.Config{Memory: 4 << 20}))
	m := newMapper(t, path)
	at := m.addresses(5)
	m.memory(at, 1, 0)
	m.memory(at+granule, 2, 0)
	m.memory(at+4*granule, 1, 0) // behind a hole, and without access
	m.let(at, 3, 0, 3)
	end, err := d.Borrow(at+5, 3*granule-5)
	must(t, err)
	d.roundTrip(at+5, 3*granule-5)
	end()
	for off, want := range map[tier.Addr]error{3 * granule: cuda.ErrNotAllocated, 4 * granule: cuda.ErrNotAccessible} {
		if _, err := d.Borrow(at+off, 100); !errors.Is(err, want) {
			t.Errorf("of byte %d: %v, want %v", off, err, want)
		}
	}
}

// A driver that is not asked for access to mapped memory lends what lies in one piece.
func TestBorrowMappedMemoryOfAnOldDriver(t *testing.T) {
	r := load(t, cudatest.Config{Without: []string{"cuMemGetAccess"}})
	m := newMapper(t, r.Path)
	at := m.addresses(2)
	m.memory(at, 1, 0)
	m.memory(at+granule, 1, 0)
	m.let(at, 2, 0, 3)
	d := newWork(t, r.open(t, cuda.Config{Memory: 4 << 20}))
	end, err := d.Borrow(at+granule, granule)
	must(t, err)
	d.roundTrip(at+granule, granule)
	end()
	if _, err := d.Borrow(at, 2*granule); !errors.Is(err, cuda.ErrNotAllocated) {
		t.Errorf("two pieces were borrowed of a driver that does not say whose they are: %v", err)
	}
}

// What programs have allocated in the ordinary ways is lent whatever the driver answers to
// questions that are meant for other memory, and whichever question it refuses.
func TestBorrowWhateverTheDriverAnswers(t *testing.T) {
	for name, onePiece := range map[string]bool{"pool": false, "plain": true} {
		for _, set := range []map[string]int64{
			{"plain_access": 0}, {"plain_access": 1}, {"plain_access": 3}, {"plain_unmapped": 1}, {"plain_access": 0, "plain_unmapped": 1},
		} {
			t.Run(fmt.Sprint(name, set), func(t *testing.T) {
				r := load(t, cudatest.Config{})
				others, err := cuda.Load(r.Path)
				must(t, err)
				const n = 5 << 20
				theirs := newWork(t, openReal(t, others, cuda.Config{Memory: 8 << 20, OnePiece: onePiece}))
				at := theirs.alloc(n)
				theirs.wait()
				d := newWork(t, r.open(t, cuda.Config{Memory: 1 << 20}))
				for what, v := range set {
					r.Set(what, v)
				}
				end, err := d.Borrow(at+1, n-1)
				must(t, err)
				d.roundTrip(at+1, n-1)
				end()
				if _, err := d.Borrow(at, 100<<20); !errors.Is(err, cuda.ErrNotAllocated) {
					t.Errorf("more than there is: %v", err)
				}
			})
		}
		for _, code := range []driver.Code{driver.ErrInvalidValue, driver.ErrNotFound, driver.ErrNotSupported} {
			t.Run(fmt.Sprint(name, code), func(t *testing.T) {
				r := load(t, cudatest.Config{})
				theirs := newWork(t, r.open(t, cuda.Config{Memory: 8 << 20, OnePiece: onePiece}))
				at := theirs.alloc(5 << 20)
				theirs.wait()
				d := r.open(t, cuda.Config{Memory: 1 << 20})
				asked := 0
				for n, more := int64(0), true; more; n++ {
					before, pushed := r.Calls(""), r.Calls("cuCtxPushCurrent_v2")
					r.Fail("", n, code, 1)
					end, err := d.Borrow(at, 5<<20)
					r.ClearFailures()
					if more = r.Calls("")-before > n; err == nil {
						end()
						asked++
					} else if n > 0 || r.Calls("cuCtxPushCurrent_v2") == pushed {
						t.Errorf("%s: call %d answered by %v: %v", name, n, code, err)
					}
				}
				if asked < 3 {
					t.Errorf("%s: %d calls were refused", name, asked)
				}
			})
		}
	}
}
