package convert

import (
	"testing"
	"testing/synctest"
	"time"
)

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
			s := run(func() error {
				<-before // one after the other, as on a stream
				time.Sleep(took)
				return nil
			})
			last = s.(*task).done
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
