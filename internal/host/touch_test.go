package host

import (
	"bytes"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/tiertest"
)

func TestTouchAheadReachesTheEndAndChangesNothing(t *testing.T) {
	tiertest.NoLeaks(t)
	const capacity = 5*step + 3*tier.Page
	begin := make(chan struct{})
	a := openFaulty(t, Config{Capacity: capacity, Node: -1, Touch: true}, &faulty{
		onTouch: func([]byte) error { <-begin; return nil },
	})
	m := alloc(t, a, capacity)
	fill(m, 0x5a)
	close(begin)
	<-a.touchDone
	if !holds(m, 0x5a) {
		t.Error("touching changed bytes in use")
	}
	if s := a.Stats(); s.Touched != capacity || s.Committed != capacity {
		t.Errorf("touched %d, committed %d of %d", s.Touched, s.Committed, capacity)
	}
	free(a, m)
}

// TestIdleArenaTouchesLittle: pages are touched some way ahead of what was used, and no
// further.
func TestIdleArenaTouchesLittle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const capacity = 512 * step
		var steps int
		a := openFaulty(t, Config{Capacity: capacity, Node: -1, Touch: true}, &faulty{
			onTouch: func([]byte) error { steps++; return nil },
		})
		var held []tier.HostMemory
		for _, c := range []struct {
			alloc int64
			want  int // steps
		}{{0, 32}, {100, 33}, {32 * step, 65}, {4 * step, 73}, {100, 73}} {
			if c.alloc > 0 {
				held = append(held, alloc(t, a, c.alloc))
			}
			synctest.Wait()
			if s := a.Stats(); steps != c.want || s.Touched != int64(steps)*step {
				t.Errorf("after %d bytes: %d steps were touched, %d bytes; want %d steps", c.alloc, steps, s.Touched, c.want)
			}
		}
		free(a, held...)
		synctest.Wait()
		if steps != 73 {
			t.Errorf("giving memory back touched %d steps", steps-73)
		}
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

func TestTouchPagesLosesNoWrite(t *testing.T) {
	b := make([]byte, 64*tier.Page)
	for i := range b {
		b[i] = byte(i)
	}
	want := bytes.Clone(b)
	extent.Touch(b[8 : len(b)-8])
	if !bytes.Equal(b, want) {
		t.Error("bytes were changed")
	}
}

func TestCloseEndsTouching(t *testing.T) {
	tiertest.NoLeaks(t)
	var touches atomic.Int64
	entered := make(chan struct{}, 100)
	a := openFaulty(t, Config{Capacity: 100 * step, Node: -1, Touch: true}, &faulty{
		onTouch: func([]byte) error {
			touches.Add(1)
			entered <- struct{}{}
			return nil
		},
	})
	<-entered
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	n := touches.Load()
	if got := a.Stats().Touched; got != n*step {
		t.Errorf("%d bytes touched by %d steps", got, n)
	}
}

func TestFailedTouchEndsWithAWarning(t *testing.T) {
	if poison {
		t.Skip("needs a build without -tags invariants, where failures to touch freed pages are reported")
	}
	var touches atomic.Int64
	a := openFaulty(t, Config{Capacity: 5 * step, Node: -1, Touch: true}, &faulty{
		onTouch: func([]byte) error {
			if touches.Add(1) == 3 {
				return errors.New("out of memory")
			}
			return nil
		},
	})
	free(a, alloc(t, a, 5*step))
	<-a.touchDone
	if s := a.Stats(); s.Touched != 2*step || len(s.Warnings) != 1 ||
		!strings.Contains(s.Warnings[0].What, "out of memory") {
		t.Errorf("%+v", s)
	}
}

func TestCommittedCountsStepsOnce(t *testing.T) {
	a := open(t, Config{Capacity: 4 * step, Node: -1})
	if c := a.Stats().Committed; c != 0 {
		t.Fatalf("%d bytes committed in a new arena", c)
	}
	small := []tier.HostMemory{alloc(t, a, 1), alloc(t, a, 1), alloc(t, a, step)}
	if c := a.Stats().Committed; c != 2*step {
		t.Errorf("committed %d, want two steps", c)
	}
	free(a, small...)
	if c := a.Stats().Committed; c != 2*step {
		t.Errorf("committed %d after Free: pages stay until Trim", c)
	}
}
