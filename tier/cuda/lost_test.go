package cuda_test

import (
	"errors"
	"testing"

	driver "github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/cuda"
)

// When the context is lost what is freed is free, and events are done with the reason, but not before those of
// others that they stand for: whoever waits is told, and the books are at zero.
func TestContextIsLost(t *testing.T) {
	for _, kind := range []cuda.Allocation{cuda.StreamOrdered, cuda.OnePiece} {
		e := cudatest.New(t, cudatest.Config{})
		lib, err := cuda.Load(e.Path)
		if err != nil {
			t.Fatal(err)
		}
		d, err := lib.Open(cuda.Config{Memory: 1 << 20, Allocation: kind})
		if err != nil {
			t.Fatal(err)
		}
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
		e.FailWork(0, driver.ErrIllegalAddress, true)
		if err := d.Fill(s, a, 1, 1000); err != nil {
			t.Fatal(err)
		}
		if err := s.Sync(); !errors.Is(err, driver.ErrIllegalAddress) {
			t.Fatalf("the stream says %v", err)
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
		if !errors.Is(done.Err(), driver.ErrIllegalAddress) {
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
		if !errors.Is(late.Err(), driver.ErrIllegalAddress) {
			t.Errorf("the event says %v", late.Err())
		}
		if err := d.Close(); !errors.Is(err, driver.ErrIllegalAddress) {
			t.Errorf("closing says %v", err)
		}
		if n := e.Live("contexts"); n != 0 {
			t.Errorf("%d contexts are left", n)
		}
	}
}
