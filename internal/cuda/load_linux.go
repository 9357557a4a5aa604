//go:build linux && (amd64 || arm64)

package cuda

import (
	"time"

	"github.com/ebitengine/purego"
	"golang.org/x/sys/unix"
)

// loader opens a library of the system. purego does that without cgo; other
// packages that could have been used need a C compiler for each target.
type loader struct{ handle uintptr }

func openLibrary(path string) (loader, error) {
	h, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	return loader{h}, err
}

// find returns a function's address, 0 if there is none.
func (l loader) find(name string) uintptr {
	fn, err := purego.Dlsym(l.handle, name)
	if err != nil {
		return 0
	}
	return fn
}

// close gives a library up of which nothing was called.
func (l loader) close() { _ = purego.Dlclose(l.handle) }

// invoke calls fn and returns its int.
func invoke(fn uintptr, args []uintptr) Code {
	r, _, _ := purego.SyscallN(fn, args...)
	return Code(int32(r))
}

// nap has the thread sleep, not just the goroutine.
func nap(d time.Duration) {
	t := unix.NsecToTimespec(d.Nanoseconds())
	_ = unix.Nanosleep(&t, nil) // a signal may end it early
}

// wakePromptly says whether naps of this thread should end when they should, and not
// up to 50 µs later, which is what the kernel allows itself to wake several threads at once.
func wakePromptly(yes bool) {
	slack := uintptr(0) // what the thread had at first
	if yes {
		slack = 1 // ns
	}
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, slack, 0, 0, 0)
}
