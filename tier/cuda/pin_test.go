package cuda_test

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"

	driver "github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/cuda"
)

// Memory that a closing device has pinned may be unmapped after Unpin: it is not pinned any more.
func TestUnpinWhileTheDeviceIsClosed(t *testing.T) {
	r := load(t, cudatest.Config{})
	d := r.open(t, cuda.Config{Memory: 1 << 20})
	mem := page(t)
	if err := d.Pin(mem); err != nil {
		t.Fatal(err)
	}
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	opened := make(chan struct{})
	if err := d.WaitEvent(s, foreign(opened)); err != nil {
		t.Fatal(err)
	}
	closed := make(chan error, 1)
	go func() { closed <- d.Close() }() // which waits for the event
	for err == nil {
		if err = d.Pin(mem); err != nil && !errors.Is(err, tier.ErrClosed) {
			t.Fatal(err)
		}
	}
	unpinned := make(chan error, 1)
	go func() { unpinned <- d.Unpin(mem) }()
	for range 1000 {
		if runtime.Gosched(); len(unpinned) > 0 {
			break
		}
	}
	select {
	case <-unpinned:
		t.Errorf("unpinned, and %d registrations are there", r.Live("registrations"))
		close(opened)
	default:
		close(opened)
		if err := <-unpinned; !errors.Is(err, tier.ErrClosed) || r.Live("registrations") != 0 {
			t.Errorf("unpinning said %v, and %d registrations are there", err, r.Live("registrations"))
		}
	}
	if err := <-closed; err != nil {
		t.Error(err)
	}
}

// No memory is not all memory.
func TestUnpinOfNothing(t *testing.T) {
	r := load(t, cudatest.Config{})
	d := r.open(t, cuda.Config{Memory: 1 << 20})
	mem := page(t)
	must(t, errors.Join(d.Pin(mem), d.Unpin(nil), d.Unpin(mem[:0])))
	if n := r.Live("registrations"); n != 1 {
		t.Errorf("%d registrations are there, want that of the memory", n)
	}
	must(t, d.Unpin(mem))
}

// roundTrip copies mem to the device and back, and says whether it is as it was.
func roundTrip(t *testing.T, d *cuda.Device, mem []byte) {
	t.Helper()
	s, err := d.NewStream()
	must(t, err)
	n := int64(len(mem))
	a, err := d.Alloc(s, n)
	must(t, err)
	for i := range mem {
		mem[i] = byte(i * 3)
	}
	want := bytes.Clone(mem)
	must(t, d.CopyToDevice(s, a, mem))
	must(t, s.Sync())
	clear(mem)
	must(t, d.CopyToHost(s, mem, a))
	must(t, d.Free(s, a))
	must(t, s.Sync())
	must(t, s.Close())
	if !bytes.Equal(mem, want) {
		t.Error("the bytes did not come back as they went")
	}
}

// Memory of which others have registered a part, or all of it in two pieces, is not pinned: the
// driver refuses copies that lie across the end of a registration. Such memory works by way of
// other.
func TestPinWhatOthersHaveRegistered(t *testing.T) {
	for name, c := range map[string]struct {
		pieces [][2]int // first page, pages
		refuse int64    // which question is refused; 0: none
		ok     bool
	}{
		"all":                       {[][2]int{{0, 8}}, 0, true},
		"all, its range not told":   {[][2]int{{0, 8}}, 1, true},
		"the begin":                 {[][2]int{{0, 4}}, 0, false},
		"the begin, range not told": {[][2]int{{0, 4}}, 1, false},
		"the end":                   {[][2]int{{4, 4}}, 0, false},
		"the middle":                {[][2]int{{2, 4}}, 0, false},
		"both ends":                 {[][2]int{{0, 2}, {6, 2}}, 0, false},
		"both ends, not told":       {[][2]int{{0, 2}, {6, 2}}, 1, false},
		"two pieces":                {[][2]int{{0, 4}, {4, 4}}, 0, false},
		"two pieces, not told":      {[][2]int{{0, 4}, {4, 4}}, 1, false},
	} {
		t.Run(name, func(t *testing.T) {
			const page = 4096
			mem := pages(t, 8)
			r := load(t, cudatest.Config{})
			others, err := driver.Load(r.Path)
			must(t, err)
			other, err := others.Open(0, 0)
			must(t, err)
			defer func() { must(t, other.Close()) }()
			for _, p := range c.pieces {
				part := mem[p[0]*page : (p[0]+p[1])*page]
				must(t, other.Here(func(c *driver.Calls) error {
					return c.RegisterHost(extent.Address(part), int64(len(part)))
				}))
				defer func() {
					must(t, other.Here(func(c *driver.Calls) error { return c.UnregisterHost(extent.Address(part)) }))
				}()
			}
			d := r.open(t, cuda.Config{Memory: 1 << 20})
			defer func() { must(t, d.Close()) }() // before what others have registered goes
			r.Fail("cuPointerGetAttribute", 0, driver.ErrInvalidValue, c.refuse)
			err = d.Pin(mem)
			if (err == nil) != c.ok || err != nil && !errors.Is(err, driver.ErrHostMemoryAlreadyRegistered) {
				t.Errorf("pinning: %v", err)
			}
			roundTrip(t, d, mem)
			if pinned := r.Calls("cuMemHostAlloc") == 0; pinned != c.ok {
				t.Errorf("copied from where it lies: %v, want %v", pinned, c.ok)
			}
		})
	}
}

// Devices that share pinned memory are closed in any order: it is pinned for those that are left,
// and not any more when there are none.
func TestClosedInAnyOrder(t *testing.T) {
	for _, unpin := range []bool{false, true} {
		for _, order := range [][]int{{0, 1, 2}, {2, 1, 0}, {1, 0, 2}} {
			r := load(t, cudatest.Config{Devices: 2})
			mem := page(t)
			var devices []*cuda.Device
			for _, ordinal := range []int{0, 1, 1} {
				d := r.open(t, cuda.Config{Ordinal: ordinal, Memory: 1 << 20})
				must(t, d.Pin(mem))
				must(t, d.Pin(mem[100:200])) // which is pinned, so this has no end of its own
				devices = append(devices, d)
			}
			for i, closed := range order {
				if unpin {
					must(t, devices[closed].Unpin(mem))
				}
				must(t, devices[closed].Close())
				if left := len(order) - 1 - i; (r.Live("registrations") == 1) != (left > 0) {
					t.Errorf("%v: with %d devices left there are %d registrations", order, left, r.Live("registrations"))
				}
				for _, other := range order[i+1:] {
					roundTrip(t, devices[other], mem)
				}
			}
			if n := r.Calls("cuMemHostAlloc") + r.Calls("copy of memory that is not pinned"); n != 0 {
				t.Errorf("%v: memory was pinned besides, or not pinned, %d times", order, n)
			}
		}
	}
}

// Devices come, have the same memory pinned, copy and go, at any time: a device that has it pinned
// copies from it directly.
func TestPinStorm(t *testing.T) {
	const users, rounds, part = 4, 30, 4096
	r := load(t, cudatest.Config{Devices: 2})
	mem := pages(t, users)
	var all sync.WaitGroup
	for u := range users {
		rng := rand.New(rand.NewPCG(7, uint64(u)))
		all.Go(func() {
			for range rounds {
				d, err := r.driver.OpenDevice(cuda.Config{Ordinal: rng.IntN(2), Memory: 64 << 10})
				if err == nil {
					err = pinAndCopy(d, mem, mem[u*part:(u+1)*part], byte(rng.IntN(256)), rng.IntN(2) == 0)
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	if n := r.Calls("cuMemHostAlloc") + r.Calls("copy of memory that is not pinned"); n != 0 {
		t.Errorf("memory was pinned besides, or not pinned, %d times", n)
	}
}

// pinAndCopy has mem pinned, sends own, a part of it, to the device and back, and closes the
// device.
func pinAndCopy(d *cuda.Device, mem, own []byte, value byte, unpin bool) (err error) {
	defer func() { err = errors.Join(err, d.Close()) }()
	if err := d.Pin(mem); err != nil {
		return err
	}
	s, err := d.NewStream()
	if err != nil {
		return err
	}
	n := int64(len(own))
	a, err := d.Alloc(s, n)
	if err != nil {
		return err
	}
	for i := range own {
		own[i] = value
	}
	err = errors.Join(d.CopyToDevice(s, a, own), s.Sync())
	clear(own)
	err = errors.Join(err, d.CopyToHost(s, own, a), s.Sync())
	if !bytes.Equal(own, bytes.Repeat([]byte{value}, len(own))) {
		err = errors.Join(err, errors.New("the bytes did not come back as they went"))
	}
	if unpin {
		err = errors.Join(err, d.Unpin(mem))
	}
	return err
}

// Whichever call of pinning and unpinning is refused, nothing is left, and memory that is said to
// be pinned is.
func TestPinFails(t *testing.T) {
	r := load(t, cudatest.Config{Devices: 2})
	mem := page(t)
	refused := 0
	for n, more := int64(0), true; more; n++ {
		first, second := r.open(t, cuda.Config{Memory: 1 << 20}), r.open(t, cuda.Config{Ordinal: 1, Memory: 1 << 20})
		before := r.Calls("")
		r.Fail("", n, driver.ErrInvalidValue, 1)
		pinned := map[*cuda.Device]error{first: first.Pin(mem), second: second.Pin(mem)}
		last := first.Close()
		if pinned[second] == nil && r.Live("registrations") != 1 {
			t.Errorf("call %d refused: %d registrations while a device has the memory pinned", n, r.Live("registrations"))
		}
		last = errors.Join(last, second.Unpin(mem), second.Close())
		more = r.Calls("")-before > n
		r.ClearFailures()
		if errors.Join(pinned[first], pinned[second], last) != nil {
			refused++
		}
		for _, leak := range r.Leaks() {
			t.Errorf("call %d refused (%v, %v, %v): %s", n, pinned[first], pinned[second], last, leak)
		}
	}
	if refused < 10 {
		t.Errorf("%d refusals were told of", refused)
	}
}
