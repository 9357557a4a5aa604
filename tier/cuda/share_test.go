package cuda_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"testing"

	driver "github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/cuda"
)

// plug keeps a stream from going on until it is pulled.
func plug(t *testing.T, d *cuda.Device, s tier.Stream) (pull func()) {
	t.Helper()
	c := make(chan struct{})
	if err := d.WaitEvent(s, foreign(c)); err != nil {
		t.Fatal(err)
	}
	return func() { close(c) }
}

// shared is an event that one device shares with another, and that does not happen before it is
// pulled.
type shared struct {
	from, to *cuda.Device
	stream   tier.Stream
	event    uintptr
	end      func() error
	pull     func()
}

func share(t *testing.T, r *rig) (s shared) {
	t.Helper()
	s.from, s.to = r.open(t, cuda.Config{Memory: 1 << 20}), r.open(t, cuda.Config{Memory: 1 << 20, Ordinal: 1})
	var err error
	s.stream, err = s.from.NewStream()
	must(t, err)
	s.pull = plug(t, s.from, s.stream)
	s.event, s.end, err = s.from.ShareEvent(s.stream)
	must(t, err)
	return s
}

// An event that one device shares is one that another of the same process waits for, until it has
// happened.
func TestSharedEvent(t *testing.T) {
	r := load(t, cudatest.Config{Devices: 2})
	sh := share(t, r)
	s, event, end, pull, b := sh.stream, sh.event, sh.end, sh.pull, sh.to
	if n, m := sh.from.Ordinal(), b.Ordinal(); n != 0 || m != 1 {
		t.Errorf("the devices are numbers %d and %d", n, m)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("why")
	cancel(why)
	if err := b.AwaitShared(ctx, event); !errors.Is(err, why) {
		t.Errorf("waiting in vain: %v", err)
	}
	done := make(chan error, 1)
	go func() { done <- b.AwaitShared(t.Context(), event) }()
	for r.Calls("cuStreamWaitEvent") < 2 && len(done) == 0 {
	}
	select {
	case err := <-done:
		t.Errorf("what is not done was waited for: %v", err)
	default:
	}
	pull()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if err := errors.Join(end(), s.Close()); err != nil {
		t.Error(err)
	}
	if err := end(); !errors.Is(err, tier.ErrReleased) {
		t.Errorf("an event given up twice: %v", err)
	}
	if err := b.AwaitShared(t.Context(), event); !errors.Is(err, driver.ErrInvalidHandle) {
		t.Errorf("waiting for an event that is gone: %v", err)
	}
}

// Closing a device waits for those that work with it. Closing it once more does not.
func TestSecondCloseDoesNotWait(t *testing.T) {
	r := load(t, cudatest.Config{Devices: 2})
	sh := share(t, r)
	s, event, end, pull, b := sh.stream, sh.event, sh.end, sh.pull, sh.to
	waited, closed := make(chan error, 1), make(chan error, 1)
	go func() { waited <- b.AwaitShared(t.Context(), event) }()
	for r.Calls("cuStreamWaitEvent") == 0 && len(waited) == 0 {
		runtime.Gosched()
	}
	go func() { closed <- b.Close() }()
	for err := error(nil); !errors.Is(err, tier.ErrClosed); {
		runtime.Gosched()
		_, err = b.NewStream()
	}
	if err := b.Close(); !errors.Is(err, tier.ErrClosed) || len(closed) > 0 {
		t.Errorf("the second Close: %v; the first one has ended: %v", err, len(closed) > 0)
	}
	pull()
	if err := errors.Join(<-waited, <-closed, end(), s.Close()); err != nil {
		t.Error(err)
	}
}

// Events that are out when the device is closed end with it, as does what waits for them.
func TestCloseEndsSharedEvents(t *testing.T) {
	r := load(t, cudatest.Config{})
	d := r.open(t, cuda.Config{Memory: 1 << 20})
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	event, end, err := d.ShareEvent(s)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.AwaitShared(t.Context(), event); err != nil {
		t.Error(err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if err := end(); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("giving up an event of a closed device: %v", err)
	}
	if _, _, err := d.ShareEvent(s); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("an event of a closed device: %v", err)
	}
	if err := d.AwaitShared(t.Context(), event); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("waiting by a closed device: %v", err)
	}
}

// A stream whose work failed has no event to share.
func TestNoSharedEventBehindAFailure(t *testing.T) {
	r := load(t, cudatest.Config{})
	d := r.open(t, cuda.Config{Memory: 1 << 20})
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	a, err := d.Alloc(s, 100)
	if err != nil {
		t.Fatal(err)
	}
	r.FailWork(0, driver.ErrIllegalAddress, false)
	if err := d.Fill(s, a, 1, 100); err != nil {
		t.Fatal(err)
	}
	if err := s.Sync(); !errors.Is(err, driver.ErrIllegalAddress) {
		t.Fatal(err)
	}
	if _, _, err := d.ShareEvent(s); !errors.Is(err, driver.ErrIllegalAddress) {
		t.Errorf("an event behind what failed: %v", err)
	}
}

// TestBorrow: a device works with an allocation of another of the same GPU while that is borrowed,
// with no more of it, and not with unallocated memory.
func TestBorrow(t *testing.T) {
	for _, onePiece := range []bool{false, true} {
		t.Run(fmt.Sprintf("one piece=%t", onePiece), func(t *testing.T) {
			r := load(t, cudatest.Config{Memory: 4 << 20})
			owner := r.open(t, cuda.Config{Memory: 1 << 20})
			d := r.open(t, cuda.Config{Memory: 1 << 20, OnePiece: onePiece})
			so, err := owner.NewStream()
			if err != nil {
				t.Fatal(err)
			}
			s, err := d.NewStream()
			if err != nil {
				t.Fatal(err)
			}
			const n = 3 * 512
			a, err := owner.Alloc(so, n)
			if err != nil {
				t.Fatal(err)
			}
			fill := func(at tier.Addr, n int64) error { return errors.Join(d.Fill(s, at, 7, n), s.Sync()) }
			if fill(a, 1) == nil {
				t.Error("what is not borrowed was written")
			}
			for name, c := range map[string]struct {
				addr tier.Addr
				size int64
			}{"nothing": {a, 0}, "too much": {a + 512, n}, "nowhere": {12345, 1}} {
				if _, err := d.Borrow(c.addr, c.size); err == nil {
					t.Errorf("%s: borrowed", name)
				}
			}
			borrow := func(at tier.Addr, n int64) func() {
				t.Helper()
				end, err := d.Borrow(at, n)
				if err != nil {
					t.Fatal(err)
				}
				return end
			}
			// Loans in each other: the end of one does not end the others.
			all, part, again, tail := borrow(a, n), borrow(a, 10), borrow(a, n), borrow(a+1024, 512)
			all()
			part()
			for _, at := range []tier.Addr{a, a + 5, a + 1030, a + n - 1} {
				if err := fill(at, 1); err != nil {
					t.Errorf("byte %d of what is borrowed: %v", at-a, err)
				}
			}
			if fill(a, n+1) == nil {
				t.Error("more than is borrowed was written")
			}
			again()
			if err := fill(a+1024, 512); err != nil || fill(a+1023, 2) == nil || fill(a, 1) == nil {
				t.Errorf("with the tail borrowed: %v, or more was written", err)
			}
			tail()
			if fill(a+1024, 1) == nil {
				t.Error("what is not borrowed any more was written")
			}
			own, err := d.Alloc(s, 512)
			if err != nil {
				t.Fatal(err)
			}
			borrow(own, 512)()
			if err := fill(own, 512); err != nil {
				t.Errorf("what is the device's own is gone: %v", err)
			}
			if err := errors.Join(d.Free(s, own), s.Sync(), owner.Free(so, a), so.Sync()); err != nil {
				t.Fatal(err)
			}
			for name, at := range map[string]tier.Addr{"its own memory": own, "another's": a} {
				if end, err := d.Borrow(at, 1); err == nil {
					end()
					t.Errorf("%s was borrowed after it was freed", name)
				}
			}
			r.Fail("cuMemGetAddressRange_v2", 0, driver.ErrNotInitialized, 1)
			if _, err := d.Borrow(a, 1); !errors.Is(err, driver.ErrNotInitialized) {
				t.Errorf("a driver that does not answer: %v", err)
			}
		})
	}
}
