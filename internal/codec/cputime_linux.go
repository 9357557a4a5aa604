package codec

import (
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// stopwatch measures for how long a processor works for the goroutine that starts it. What
// others do on the machine at the time lengthens the work, and says nothing about it.
type stopwatch struct{ begin time.Duration }

// start binds the goroutine to its thread until stop.
func start() stopwatch {
	runtime.LockOSThread()
	return stopwatch{threadTime()}
}

func (s stopwatch) stop() time.Duration {
	took := threadTime() - s.begin
	runtime.UnlockOSThread()
	return max(took, 1)
}

func threadTime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts); err != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}

// processTime returns for how long processors worked for this process.
func processTime() (time.Duration, bool) {
	var ts unix.Timespec
	err := unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &ts)
	return time.Duration(ts.Nano()), err == nil
}
