package cuda_test

import (
	"errors"
	"runtime"
	"testing"

	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/cuda"
)

// Who unpins memory that a device has pinned which is just being closed may unmap it afterwards: it is not
// pinned any more.
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
