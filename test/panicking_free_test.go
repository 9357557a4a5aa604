package test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// freePanics is a decorated device, whose Free panics once, when it is armed.
type freePanics struct {
	tier.Device
	armed *atomic.Bool
}

func (d freePanics) Unwrap() tier.Device { return d.Device }
func (d freePanics) Free(s tier.Stream, a tier.Addr) error {
	if d.armed.CompareAndSwap(true, false) {
		panic("in Free")
	}
	return d.Device.Free(s, a)
}

// TestRoomAfterFreePanicked: bytes of a buffer whose Free panicked come back when the free is tried
// again. A waiter for more than is available is served, and Close finds nothing left.
func TestRoomAfterFreePanicked(t *testing.T) {
	var armed atomic.Bool
	eng, err := callbackEngine(t, func(c *spillway.Config) {
		c.GPUs[0].Wrap = func(d tier.Device) (tier.Device, error) { return freePanics{d, &armed}, nil }
		c.MonitorPeriod = time.Millisecond
		c.HostMemory = spillway.Bytes(16 << 20)
	})
	if err != nil {
		t.Fatal(err)
	}
	gpu := reservation.AnyInTier(tier.GPU)
	r, err := eng.Reserve(t.Context(), gpu, 400<<10)
	if err != nil {
		t.Fatal(err)
	}
	buf, err := r.Alloc(400 << 10)
	if err := errors.Join(err, r.Release()); err != nil {
		t.Fatal(err)
	}
	armed.Store(true)
	if err := buf.Release(); err != nil {
		t.Error(err)
	}
	repo := scanOf(t, eng)
	rec := arrowgen.Ints(1, 10_000, 1) // 80 KB
	defer rec.Release()
	for range 4 { // 320 KB beside 400 KB, of 1 MiB
		if err := repo.Put(t.Context(), 0, rec, repository.WithPlacement(gpu)); err != nil {
			t.Fatal(err)
		}
	}
	s := gpuOf(t, eng)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	got, err := eng.Reserve(ctx, gpu, s.Available()+100<<10) // two batches must leave for it
	if err != nil {
		t.Errorf("a waiter is not served, though batches could move down: %v", err)
	} else if err := got.Release(); err != nil {
		t.Error(err)
	}
	closeClean(t, eng)
}
