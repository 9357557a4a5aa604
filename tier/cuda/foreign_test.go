package cuda_test

import (
	"errors"
	"fmt"
	"testing"

	driver "github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/cuda"
)

// curious is another backend's event that, when it is asked how the work went, asks the device
// something, as a decorator might that logs.
type curious struct {
	done chan struct{}
	dev  *cuda.Device
	err  error
}

func (c *curious) Done() <-chan struct{} { return c.done }

func (c *curious) Err() error {
	c.dev.Outstanding()
	return c.err
}

// Events of others are asked without a lock of the device's, whoever asks.
func TestEventOfOthersIsAskedWithoutALock(t *testing.T) {
	lost := errors.New("lost")
	for _, want := range []error{nil, lost} {
		t.Run(fmt.Sprint(want), func(t *testing.T) {
			d := load(t, cudatest.Config{}).open(t, cuda.Config{Memory: 1 << 20})
			s, err := d.NewStream()
			if err != nil {
				t.Fatal(err)
			}
			e := &curious{make(chan struct{}), d, want}
			if err := d.WaitEvent(s, e); err != nil {
				t.Fatal(err)
			}
			pending, err := d.Record(s)
			if err != nil {
				t.Fatal(err)
			}
			if err := d.WaitEvent(s, e); err != nil {
				t.Fatal(err)
			}
			close(e.done)
			var events []tier.Event
			for range 2 {
				after, err := d.Record(s)
				if err != nil {
					t.Fatal(err)
				}
				events = append(events, after)
			}
			for _, e := range append(events, pending) {
				<-e.Done()
				if !errors.Is(e.Err(), want) || want == nil && e.Err() != nil {
					t.Errorf("the event says %v, want %v", e.Err(), want)
				}
			}
			if err := s.Sync(); !errors.Is(err, want) {
				t.Errorf("the stream says %v, want %v", err, want)
			}
		})
	}
}

// TestGPUThatCannotWaitForAWord: a virtual one may not, although the driver has the call.
func TestGPUThatCannotWaitForAWord(t *testing.T) {
	r := load(t, cudatest.Config{})
	d := r.open(t, cuda.Config{})
	s, err := d.NewStream()
	must(t, err)
	r.Fail("cuStreamWaitValue32_v2", 0, driver.ErrNotSupported, 1)
	if err := d.WaitEvent(s, foreign(make(chan struct{}))); !errors.Is(err, tier.ErrNotSupported) {
		t.Errorf("%v; want tier.ErrNotSupported", err)
	}
}
