//go:build linux && (amd64 || arm64)

package cuda

import (
	"time"

	"golang.org/x/sys/unix"
)

// nap has the thread sleep, not just the goroutine.
func nap(d time.Duration) {
	t := unix.NsecToTimespec(d.Nanoseconds())
	_ = unix.Nanosleep(&t, nil) // a signal may end it early
}

// wakePromptly sets whether naps of this thread end on time, or up to 50 µs later. The kernel takes
// that delay by default to wake several threads at once.
func wakePromptly(yes bool) {
	slack := uintptr(0) // what the thread had at first
	if yes {
		slack = 1 // ns
	}
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, slack, 0, 0, 0)
}
