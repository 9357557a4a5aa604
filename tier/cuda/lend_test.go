package cuda_test

import (
	"errors"
	"testing"

	driver "github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/cuda"
	"github.com/spillway-db/spillway/tier/tiertest"
)

// lent is a device with memory that is lent, full of sevens.
type lent struct {
	*cuda.Device
	s    tier.Stream
	addr tier.Addr
	back []func() error
}

const lentBytes = 1000

func (r *rig) lend(t *testing.T, onePiece bool, times int) *lent {
	t.Helper()
	l := &lent{Device: r.open(t, cuda.Config{Memory: 3 << 20, OnePiece: onePiece})}
	var err, err2 error
	if l.s, err = l.NewStream(); err == nil {
		l.addr, err = l.Alloc(l.s, lentBytes)
	}
	if err != nil {
		t.Fatal(err)
	}
	much, err := l.Alloc(l.s, 2<<20)
	if err = errors.Join(err, l.Fill(l.s, l.addr, 7, lentBytes), l.Free(l.s, much), l.s.Sync()); err != nil {
		t.Fatal(err)
	}
	for range times {
		back, err := l.Lend()
		l.back, err2 = append(l.back, back), errors.Join(err2, err)
	}
	if err2 != nil {
		t.Fatal(err2)
	}
	return l
}

// TestLent: what is lent outlives the device, with its events, and nothing else does; it ends with
// the last holder.
func TestLent(t *testing.T) {
	for name, onePiece := range map[string]bool{"pool": false, "one piece": true} {
		t.Run(name, func(t *testing.T) {
			r := load(t, cudatest.Config{Memory: 4 << 20})
			tiertest.NoLeaks(t)
			l := r.lend(t, onePiece, 2)
			event, end, err := l.ShareEvent(l.s)
			if err != nil {
				t.Fatal(err)
			}
			_, endOther, err := l.ShareEvent(l.s)
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(endOther(), l.Close()); err != nil {
				t.Fatal(err)
			}
			if n := r.Live("contexts"); n != 1 {
				t.Errorf("%d contexts while memory is lent, want 1", n)
			}
			if n := r.Live("streams") + r.Live("host allocations") + r.Live("modules"); n != 0 {
				t.Errorf("%d streams, host allocations and modules are left", n)
			}
			if _, err := l.Lend(); !errors.Is(err, tier.ErrClosed) {
				t.Errorf("lending by a closed device: %v", err)
			}
			memory := int64(512 << 10)
			if !onePiece { // what the closed device had freed is there for others
				memory = 3 << 20
			}
			other := r.open(t, cuda.Config{Memory: memory, OnePiece: true})
			if err := other.AwaitShared(t.Context(), event); err != nil {
				t.Errorf("waiting for the event of a closed device: %v", err)
			}
			if err := end(); err != nil {
				t.Errorf("giving up the event of a closed device: %v", err)
			}
			for range 2 { // the second time does nothing
				if err := l.back[0](); err != nil {
					t.Error(err)
				}
			}
			if got := read(t, other, l.addr); got != 7 {
				t.Errorf("the lent memory holds %d, want 7", got)
			}
			if err := l.back[1](); err != nil {
				t.Error(err)
			}
			if _, err := other.Borrow(l.addr, lentBytes); err == nil {
				t.Error("the memory is there after the last has given it back")
			}
			if err := end(); !errors.Is(err, tier.ErrClosed) {
				t.Errorf("giving up an event that is gone: %v", err)
			}
		})
	}
}

// read returns the first of the bytes that d borrows.
func read(t *testing.T, d *cuda.Device, addr tier.Addr) byte {
	t.Helper()
	back, err := d.Borrow(addr, lentBytes)
	if err != nil {
		t.Fatal(err)
	}
	defer back()
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	p := make([]byte, lentBytes)
	if err := errors.Join(d.CopyToHost(s, p, addr), s.Sync(), s.Close()); err != nil {
		t.Fatal(err)
	}
	return p[0]
}

// TestLentWhileClosing: the last holder gives memory back while the device is being closed. The
// later of the two gives it up, and the rig finds nothing left in the driver.
func TestLentWhileClosing(t *testing.T) {
	r := load(t, cudatest.Config{Memory: 4 << 20})
	for range 50 {
		l := r.lend(t, false, 1)
		done := make(chan error)
		go func() { done <- l.back[0]() }()
		if err := errors.Join(l.Close(), <-done); err != nil {
			t.Fatal(err)
		}
		if n := r.Live("contexts"); n != 0 {
			t.Fatalf("%d contexts are left", n)
		}
	}
}

// TestLentFails: each call that ends the lending is refused once, and nothing is left nevertheless.
func TestLentFails(t *testing.T) {
	r := load(t, cudatest.Config{Memory: 4 << 20})
	told := 0
	for n, more := int64(0), true; more; n++ {
		l := r.lend(t, false, 1)
		if _, _, err := l.ShareEvent(l.s); err != nil {
			t.Fatal(err)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		before := r.Calls("")
		r.Fail("", n, driver.ErrInvalidValue, 1)
		err := l.back[0]()
		r.ClearFailures()
		if more = r.Calls("")-before > n; errors.Is(err, driver.ErrInvalidValue) {
			told++
		}
		for _, leak := range r.Leaks() {
			t.Errorf("call %d refused: %s", n, leak)
		}
	}
	if told < 3 {
		t.Errorf("%d refusals were told of", told)
	}
}

// TestLentAndClosingFails: each call of closing a device is refused once, while memory is lent. It
// is there nevertheless until it is given back, and then nothing is left.
func TestLentAndClosingFails(t *testing.T) {
	for _, onePiece := range []bool{false, true} {
		r := load(t, cudatest.Config{Memory: 8 << 20})
		mem := page(t)
		told := 0
		for n, more := int64(0), true; more; n++ {
			l := r.lend(t, onePiece, 1)
			event, end, err := l.ShareEvent(l.s)
			if err = errors.Join(err, l.Pin(mem), l.CopyToHost(l.s, make([]byte, lentBytes), l.addr)); err != nil {
				t.Fatal(err)
			}
			before := r.Calls("")
			r.Fail("", n, driver.ErrInvalidValue, 1)
			err = l.Close()
			r.ClearFailures()
			if more = r.Calls("")-before > n; errors.Is(err, driver.ErrInvalidValue) {
				told++
			}
			other := r.open(t, cuda.Config{Memory: 512 << 10})
			if got := read(t, other, l.addr); got != 7 {
				t.Errorf("call %d refused: the lent memory holds %d, want 7", n, got)
			}
			if err := errors.Join(other.AwaitShared(t.Context(), event), end(), other.Close(), l.back[0]()); err != nil {
				t.Errorf("call %d refused: %v", n, err)
			}
			for _, leak := range r.Leaks() {
				t.Errorf("call %d refused (%v): %s", n, err, leak)
			}
		}
		if told < 4 {
			t.Errorf("%d refusals were told of", told)
		}
	}
}
