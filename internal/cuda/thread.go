package cuda

import (
	"errors"
	"runtime"
	"slices"
	"time"

	"github.com/spillway-db/spillway/internal/thread"
)

// The thread looks at events without a pause for as long as a small copy takes. Then it pauses for
// a 32nd of the time that it has waited. So a waiter wakes at most that much late. The longest
// pause bounds what a look costs others.
//
// A pause of the Go scheduler's may take a millisecond, however short it should be, because it
// waits in epoll. So the thread itself sleeps the short ones; marks that come meanwhile wait. Long
// ones are the scheduler's. (4 KiB on the emulator, two busy cores: a mark ended after 200 µs with
// the scheduler's pauses only, and after 50 µs with both.)
const (
	keenFor      = 10 * time.Microsecond
	pauseShare   = 32
	shortestRest = 5 * time.Microsecond
	longestNap   = 100 * time.Microsecond
	longestRest  = 500 * time.Microsecond
)

// thread is the goroutine of the device. It sends to ready whether it has its context.
func (d *Device) thread(ready chan<- error) {
	defer close(d.stopped)
	runtime.LockOSThread()
	var err error
	if d.primary {
		if d.ctx, err = d.lib.retain(d.handle); err != nil {
			ready <- err
			return
		}
	}
	if err = d.lib.setContext(d.ctx); err != nil {
		if d.primary {
			err = errors.Join(err, d.lib.release(d.handle))
		}
		ready <- err
		return // locked: the context that is current on the thread is unknown
	}
	// Refused, or not there: questions about events wait for the end of what others record.
	before, refused := d.lib.captureMode(relaxed)
	if refused != nil {
		before = 0
	}
	ready <- nil
	thread.WakePromptly(true)
	d.work()
	thread.WakePromptly(false)
	var errs []error
	for _, e := range d.queue.mu.free { // there is no other user any more
		errs = append(errs, d.calls.DestroyEvent(e))
	}
	_, _ = d.lib.captureMode(before)
	err = d.lib.setContext(0)
	d.result = errors.Join(append(errs, err)...)
	if err == nil { // the thread is as it was
		runtime.UnlockOSThread()
	}
}

// work looks at events until the queue is closed and nothing is left.
func (d *Device) work() {
	var marks []*Mark
	progress := time.Now() // when something was last done
	alarm := time.NewTimer(time.Hour)
	defer alarm.Stop()
	for pause := time.Duration(0); ; {
		clear(marks)
		var over, asleep bool
		marks, over, asleep = d.queue.take(marks[:0], pause < 0 || pause > longestNap)
		switch {
		case over && len(marks) == 0:
			return
		case asleep && pause < 0:
			<-d.queue.wake
		case asleep:
			alarm.Reset(pause)
			select {
			case <-d.queue.wake:
			case <-alarm.C:
			}
		case pause > 0 && len(marks) == 0:
			thread.Sleep(pause)
		}
		for _, m := range marks {
			i := slices.IndexFunc(d.watches, func(w watched) bool { return w.s == m.s })
			if i < 0 {
				i = len(d.watches)
				d.watches = append(d.watches, watched{s: m.s})
			}
			d.watches[i].marks = append(d.watches[i].marks, m)
		}
		if reached := d.poll(); reached || len(marks) > 0 {
			// It leaves the processor to a goroutine that it has just woken. As long as the thread
			// goes on working, another processor waits for some time before it takes the goroutine:
			// 55 µs on a virtual machine.
			if d.woken && thread.Spare() {
				runtime.Gosched()
			}
			d.woken = false
			progress = time.Now()
		}
		pause = d.pause(time.Since(progress))
	}
}

// pause returns how long the thread should wait before it looks at the events again, when nothing has
// happened for so long; below 0 if it has nothing to look at.
//
// At first it looks without a pause. With processors to spare it does so for as long as a copy of
// some 64 MiB takes, as a nap may take 60 µs, however short it should be. It then also looks out for
// marks to come, which may follow at once.
func (d *Device) pause(waited time.Duration) time.Duration {
	watching, keen := len(d.watches) > 0, time.Duration(0)
	switch {
	case watching && thread.Spare():
		keen = 2 * time.Millisecond
	case watching:
		keen = keenFor
	case thread.Spare():
		keen = 100 * time.Microsecond
	}
	switch {
	case waited < keen:
		return 0
	case !watching:
		return -1
	}
	return min(max(waited/pauseShare, shortestRest), longestRest)
}
