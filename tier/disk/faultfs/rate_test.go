package faultfs

import (
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

const mib = 1 << 20

// transfer transfers total bytes in requests, depth of them at a time, each of which takes the disk
// io by itself, and returns how long that took.
func (r *rate) transfer(total, request, depth int, io time.Duration) time.Duration {
	begin := time.Now()
	queue := make(chan int)
	var group sync.WaitGroup
	for range depth {
		group.Go(func() {
			for n := range queue {
				until := r.book(n)
				time.Sleep(io)
				r.wait(until)
			}
		})
	}
	for left := total; left > 0; left -= request {
		queue <- min(request, left)
	}
	close(queue)
	group.Wait()
	return time.Since(begin)
}

// TestRateIsKept checks that 32 MiB take the right time within 3 %, for different sizes and numbers
// of requests, speeds of the disk, and sleeps that are too long.
func TestRateIsKept(t *testing.T) {
	const total = 32 * mib
	for _, rateMiB := range []int{50, 200, 1000} {
		for _, request := range []int{4 << 10, 100_000, 2 * mib} {
			for _, depth := range []int{1, 4, 16} {
				for _, oversleep := range []time.Duration{0, 60 * time.Microsecond, 3 * time.Millisecond} {
					t.Run(fmt.Sprintf("%d MiB/s, %d × %d, %v", rateMiB, request, depth, oversleep), func(t *testing.T) {
						synctest.Test(t, func(t *testing.T) {
							r := newRate(int64(rateMiB) * mib)
							r.sleep = func(d time.Duration) { time.Sleep(d + oversleep) }
							// The disk is faster than the rate.
							io := time.Duration(request) * time.Second / time.Duration(rateMiB*mib) / 2
							got := r.transfer(total, request, depth, io)
							want := total / mib * time.Second / time.Duration(rateMiB)
							slack := want*3/100 + shortestSleep + oversleep // of the last request
							if got < want-slack || got > want+slack {
								t.Errorf("took %v, want %v", got, want)
							}
						})
					})
				}
			}
		}
	}
}

// TestRateSleepsLittle checks that small requests do not each sleep.
func TestRateSleepsLittle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRate(1000 * mib)
		sleeps := 0
		r.sleep = func(d time.Duration) {
			sleeps++
			if d <= shortestSleep {
				t.Errorf("slept %v", d)
			}
			time.Sleep(d)
		}
		took := r.transfer(64*mib, 4096, 1, 0)
		if most := int(took / shortestSleep); sleeps == 0 || sleeps > most {
			t.Errorf("16384 requests slept %d times in %v", sleeps, took)
		}
	})
}

// TestRateSavesNothing checks that idle time and a slow disk earn no credit: nothing is faster than
// the rate.
func TestRateSavesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRate(100 * mib)
		for range 3 {
			if d := r.transfer(100*mib, mib, 4, 0); d < 985*time.Millisecond || d > 1015*time.Millisecond {
				t.Errorf("100 MiB at 100 MiB/s took %v", d)
			}
			time.Sleep(time.Hour)
		}
		if d := r.transfer(100*mib, mib, 1, 50*time.Millisecond); d != 5*time.Second {
			t.Errorf("a disk that takes 5 s took %v", d)
		}
		if d := r.transfer(100*mib, mib, 1, 0); d < 985*time.Millisecond {
			t.Errorf("after a slow time 100 MiB took %v, faster than the rate", d)
		}
	})
}

// TestRateForgetsLateSleeps checks that a new transfer gets no credit for an earlier sleep that was
// too long.
func TestRateForgetsLateSleeps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRate(100 * mib)
		r.sleep = func(d time.Duration) { time.Sleep(d + 20*time.Millisecond) }
		r.transfer(mib, mib, 1, 0)
		r.sleep = time.Sleep
		time.Sleep(time.Second)
		if d := r.transfer(100*mib, mib, 1, 0); d < time.Second-shortestSleep {
			t.Errorf("100 MiB took %v", d)
		}
	})
}

// TestOneLongSleepIsNotMadeUpFor checks that a sleep that is longer than on a busy machine earns
// only maxLate of credit.
func TestOneLongSleepIsNotMadeUpFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRate(100 * mib)
		r.sleep = func(d time.Duration) { time.Sleep(d + time.Minute) }
		r.transfer(mib, mib, 1, 0)
		r.sleep = time.Sleep
		if d := r.transfer(100*mib, mib, 1, 0); d < time.Second-maxLate-shortestSleep {
			t.Errorf("100 MiB took %v", d)
		}
	})
}

func TestNoRateIsNoLimit(t *testing.T) {
	for _, n := range []int64{0, -1} {
		if e := Throttle(n); e.rate != nil {
			t.Errorf("Throttle(%d) limits", n)
		}
	}
}
