// Package thread is what a system does for the thread that asks: it measures the processor's time
// and lets the thread sleep. Systems other than Linux do it less exactly.
//
//	Start ──▶ Stopwatch ── Stop ──▶ the processor's time for a goroutine
//	ProcessTime, CPUTimes           the processors' time for the process, and for all
//	WakePromptly, Sleep             short sleeps that end on time
//	Look                            none at all, where there are processors to spare
package thread

import (
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// Stopwatch measures for how long a processor works for the goroutine that starts it. What
// others do on the machine at the time lengthens the work, and says nothing about it.
type Stopwatch struct{ begin time.Duration }

// Start binds the goroutine to its thread until Stop.
func Start() Stopwatch {
	runtime.LockOSThread()
	return Stopwatch{threadTime()}
}

// Stop returns how long it took, at least a nanosecond.
func (s Stopwatch) Stop() time.Duration {
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

// ProcessTime returns for how long processors worked for this process, in user and system mode; 0 if
// that is not known.
func ProcessTime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &ts); err != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}

// Sleep has the thread sleep, not just the goroutine.
func Sleep(d time.Duration) {
	t := unix.NsecToTimespec(d.Nanoseconds())
	_ = unix.Nanosleep(&t, nil) // a signal may end it early
}

// WakePromptly sets whether naps of this thread end on time, or up to 50 µs later. The kernel takes
// that delay by default to wake several threads at once.
func WakePromptly(yes bool) {
	slack := uintptr(0) // what the thread had at first
	if yes {
		slack = 1 // ns
	}
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, slack, 0, 0, 0)
}
