package convert

import (
	"testing"
	"testing/synctest"
	"time"
)

// done is a stage that cannot fail.
type done chan struct{}

func (d done) Done() <-chan struct{} { return d }
func (d done) Err() error            { return nil }

// TestWindowOfADeviceThatBecomesSlow: no more copies are under way on it than on one that was
// slow from the beginning, so that a cancelled move ends as soon.
func TestWindowOfADeviceThatBecomesSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := window{most: copiesUnderWay}
		took := time.Millisecond
		last := closed
		for i := range 60 {
			if i == 40 {
				if w.size != copiesUnderWay {
					t.Errorf("a window of %d on a fast device", w.size)
				}
				took = 80 * time.Millisecond
			}
			before, took := last, took
			s := make(done)
			go func() {
				defer close(s)
				<-before // one after the other, as on a stream
				time.Sleep(took)
			}()
			last = s
			if err := w.add(s); err != nil {
				t.Fatal(err)
			}
			if i >= 50 && len(w.stages) > 2 {
				t.Errorf("copy %d: %d are under way", i, len(w.stages))
			}
		}
		if err := w.wait(); err != nil {
			t.Fatal(err)
		}
	})
}
