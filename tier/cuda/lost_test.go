package cuda_test

import (
	"errors"
	"testing"

	driver "github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/cuda"
)

// When the context is lost, freed memory is free. Events are done with the reason, but not before
// the events that they depend on. Waiters get the error, and the books are at zero.
func TestContextIsLost(t *testing.T) {
	for i, code := range []driver.Code{driver.ErrIllegalAddress, driver.ErrIllegalAddress, driver.ErrUnknown, driver.ErrDeviceUnavailable} {
		onePiece := i%2 == 1
		e := cudatest.New(t, cudatest.Config{})
		lib, err := cuda.Load(e.Path)
		if err != nil {
			t.Fatal(err)
		}
		d, err := lib.OpenDevice(cuda.Config{Memory: 1 << 20, OnePiece: onePiece})
		if err != nil {
			t.Fatal(err)
		}
		told := 0
		d.OnLost(func(why error) {
			if told++; !errors.Is(why, code) {
				t.Errorf("the loss is told as %v", why)
			}
		})
		s, serr := d.NewStream()
		waiting, werr := d.NewStream()
		if err := errors.Join(serr, werr); err != nil {
			t.Fatal(err)
		}
		a, err := d.Alloc(s, 1000)
		opened := make(chan struct{})
		if err := errors.Join(err, d.WaitEvent(waiting, foreign(opened))); err != nil {
			t.Fatal(err)
		}
		e.FailWork(0, code, true)
		if err := d.Fill(s, a, 1, 1000); err != nil {
			t.Fatal(err)
		}
		if err := s.Sync(); !errors.Is(err, code) {
			t.Fatalf("the stream says %v", err)
		}
		if told != 1 {
			t.Errorf("when the stream tells, the loss was told %d times", told)
		}
		if err := d.Free(s, a); err != nil {
			t.Errorf("freeing what is lost: %v", err)
		}
		recorded := func(s tier.Stream) tier.Event {
			t.Helper()
			ev, err := d.Record(s)
			if err != nil {
				t.Fatal(err)
			}
			return ev
		}
		done, late := recorded(s), recorded(waiting)
		<-done.Done()
		if !errors.Is(done.Err(), code) {
			t.Errorf("the event says %v", done.Err())
		}
		if n := d.Outstanding(); n != 0 {
			t.Errorf("%d bytes are outstanding", n)
		}
		select {
		case <-late.Done():
			t.Error("an event is done before that for which its stream waits")
		default:
		}
		close(opened)
		<-late.Done()
		if !errors.Is(late.Err(), code) {
			t.Errorf("the event says %v", late.Err())
		}
		if err := d.Close(); !errors.Is(err, code) {
			t.Errorf("closing says %v", err)
		}
		if n := e.Live("contexts"); n != 0 {
			t.Errorf("%d contexts are left", n)
		}
		if told != 1 {
			t.Errorf("the loss was told %d times", told)
		}
		again := 0
		defer d.OnLost(func(error) { again++ })()
		if again != 1 {
			t.Errorf("who asks later is told %d times", again)
		}
	}
}

// TestContextIsLostBehindAnIdleStream: the context is lost after an event was put behind a stream
// without work. The event must not report success, and the loss is reported.
func TestContextIsLostBehindAnIdleStream(t *testing.T) {
	e := cudatest.New(t, cudatest.Config{})
	lib, err := cuda.Load(e.Path)
	if err != nil {
		t.Fatal(err)
	}
	d, err := lib.OpenDevice(cuda.Config{Memory: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	var losses []error
	d.OnLost(func(why error) { losses = append(losses, why) })
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	for _, symbol := range []string{"cuEventQuery", "cuMemGetInfo_v2"} { // all that the device then asks
		e.Fail(symbol, 0, driver.ErrIllegalAddress, -1)
	}
	event, err := d.Record(s)
	if err != nil {
		t.Fatal(err)
	}
	<-event.Done()
	if err := event.Err(); !errors.Is(err, driver.ErrIllegalAddress) {
		t.Errorf("the event ended with %v", err)
	}
	if len(losses) != 1 || !errors.Is(losses[0], driver.ErrIllegalAddress) {
		t.Errorf("the losses are %v", losses)
	}
	e.ClearFailures()
	if err := d.Close(); !errors.Is(err, driver.ErrIllegalAddress) {
		t.Errorf("the device was closed with %v", err)
	}
}

// An error that may mean anything is no loss while the context answers: nothing is taken for free
// that is not.
func TestUnknownErrorIsNoLoss(t *testing.T) {
	e := cudatest.New(t, cudatest.Config{})
	lib, err := cuda.Load(e.Path)
	if err != nil {
		t.Fatal(err)
	}
	d, err := lib.OpenDevice(cuda.Config{Memory: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	d.OnLost(func(why error) { t.Errorf("a loss is told: %v", why) })
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	a, err := d.Alloc(s, 1000)
	if err != nil {
		t.Fatal(err)
	}
	for _, symbol := range []string{"cuMemFreeAsync", "cuEventRecord", "cuMemsetD8Async"} {
		e.Fail(symbol, 0, driver.ErrUnknown, 1)
	}
	_, rerr := d.Record(s)
	for _, err := range []error{d.Free(s, a), rerr, d.Fill(s, a, 1, 1000)} {
		if !errors.Is(err, driver.ErrUnknown) {
			t.Errorf("a call that is refused: %v", err)
		}
	}
	if n := d.Outstanding(); n != d.Charge(1000) {
		t.Errorf("%d bytes are outstanding", n)
	}
	if err := errors.Join(d.Fill(s, a, 1, 1000), d.Free(s, a), s.Sync(), d.Close()); err != nil {
		t.Error(err)
	}
}

// What one GPU has to do with another whose context is lost does not make it one that is lost
// itself.
func TestPeerIsLost(t *testing.T) {
	e := cudatest.New(t, cudatest.Config{Devices: 2})
	lib, err := cuda.Load(e.Path)
	if err != nil {
		t.Fatal(err)
	}
	var devs [2]*cuda.Device
	var streams [2]tier.Stream
	var addrs [2]tier.Addr
	var told [2]int
	for i := range devs {
		var serr, aerr error
		devs[i], err = lib.OpenDevice(cuda.Config{Ordinal: i, Memory: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		devs[i].OnLost(func(error) { told[i]++ })
		streams[i], serr = devs[i].NewStream()
		addrs[i], aerr = devs[i].Alloc(streams[i], 1000)
		if err := errors.Join(serr, aerr); err != nil {
			t.Fatal(err)
		}
	}
	e.FailWork(0, driver.ErrIllegalAddress, true)
	if err := devs[0].Fill(streams[0], addrs[0], 1, 1000); err != nil {
		t.Fatal(err)
	}
	if err := streams[0].Sync(); !errors.Is(err, driver.ErrIllegalAddress) {
		t.Fatalf("the stream says %v", err)
	}
	e.Fail("cuMemcpyPeerAsync", 0, driver.ErrIllegalAddress, 1) // the peer's word for itself
	if err := devs[1].CopyPeer(streams[1], addrs[0], devs[0], addrs[1], 1000); !errors.Is(err, driver.ErrIllegalAddress) {
		t.Errorf("a copy to memory that is lost: %v", err)
	}
	if err := errors.Join(devs[1].Fill(streams[1], addrs[1], 1, 1000), streams[1].Sync()); err != nil {
		t.Errorf("the other works no more: %v", err)
	}
	if told != [2]int{1, 0} {
		t.Errorf("losses are told %v times", told)
	}
	if err := devs[1].Close(); err != nil {
		t.Error(err)
	}
	_ = devs[0].Close() // which says what it was lost with
}
