package waitline

import (
	"context"
	"errors"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
)

// waiting is a queue with its lock, and goroutines that wait in it.
type waiting struct {
	mu    sync.Mutex
	queue Queue[int, string]
	left  int // how often somebody left by itself
}

type outcome struct {
	got string
	err error
}

func (w *waiting) join(ctx context.Context, ask int) <-chan outcome {
	w.mu.Lock()
	turn := w.queue.Join(ask)
	w.mu.Unlock()
	out := make(chan outcome, 1)
	go func() {
		got, err := w.queue.Wait(ctx, &w.mu, turn, func() { w.left++ })
		out <- outcome{got, err}
	}()
	return out
}

func (w *waiting) handOver(v string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.queue.HandOver(v, err)
}

// TestQueueIsInOrder: who came first is first, also when some have left between.
func TestQueueIsInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w waiting
		ctx, cancel := context.WithCancelCause(t.Context())
		why := errors.New("why")
		var outs []<-chan outcome
		for i := range 6 {
			c := t.Context()
			if i == 0 || i == 3 {
				c = ctx
			}
			outs = append(outs, w.join(c, i))
		}
		cancel(why)
		synctest.Wait()
		for _, i := range []int{0, 3} {
			if o := <-outs[i]; !errors.Is(o.err, why) || o.got != "" {
				t.Errorf("who left ends with %+v", o)
			}
		}
		if w.left != 2 || w.queue.Len() != 4 {
			t.Errorf("%d have left, %d wait", w.left, w.queue.Len())
		}
		refused := errors.New("refused")
		for _, i := range []int{1, 2, 4, 5} {
			if first := w.queue.First(); first == nil || first.Ask != i {
				t.Fatalf("the first is %+v, want %d", first, i)
			}
			if i == 4 {
				w.handOver("", refused)
			} else {
				w.handOver(string(rune('a'+i)), nil)
			}
			o := <-outs[i]
			if want := (outcome{string(rune('a' + i)), nil}); i != 4 && o != want || i == 4 && o.err != refused {
				t.Errorf("turn %d ends with %+v", i, o)
			}
		}
		if w.queue.First() != nil || w.queue.Len() != 0 {
			t.Error("somebody waits still")
		}
	})
}

// TestHandedOverAtTheSameMoment: what was handed over is had, though the context has ended.
func TestHandedOverAtTheSameMoment(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for range 50 {
			var w waiting
			ctx, cancel := context.WithCancel(t.Context())
			w.mu.Lock()
			turn := w.queue.Join(1)
			w.mu.Unlock()
			cancel()
			w.handOver("it", nil)
			if got, err := w.queue.Wait(ctx, &w.mu, turn, nil); got != "it" || err != nil {
				t.Fatalf("%q, %v", got, err)
			}
		}
	})
}

// TestQueueUnderRaces: what is handed over is had by one each, or by nobody who left.
func TestQueueUnderRaces(t *testing.T) {
	var w waiting
	var all sync.WaitGroup
	var mu sync.Mutex
	had := make(map[string]int)
	given := 0
	handOver := func() {
		given++
		w.queue.HandOver(strconv.Itoa(given), nil)
	}
	for i := range 400 {
		ctx, cancel := context.WithCancel(t.Context())
		out := w.join(ctx, i)
		all.Go(func() {
			if i%3 == 0 {
				cancel()
			}
			o := <-out
			cancel()
			mu.Lock()
			defer mu.Unlock()
			if o.err == nil {
				had[o.got]++
			}
		})
		all.Go(func() {
			w.mu.Lock()
			defer w.mu.Unlock()
			if w.queue.First() != nil {
				handOver()
			}
		})
	}
	done := make(chan struct{})
	go func() {
		all.Wait()
		close(done)
	}()
	for over := false; !over; {
		select {
		case <-done:
			over = true
		default:
			runtime.Gosched()
		}
		w.mu.Lock()
		for w.queue.First() != nil {
			handOver()
		}
		w.mu.Unlock()
	}
	if len(had) != given {
		t.Errorf("%d were handed over, and %d had", given, len(had))
	}
	for v, n := range had {
		if n != 1 {
			t.Errorf("%q was had by %d", v, n)
		}
	}
}
