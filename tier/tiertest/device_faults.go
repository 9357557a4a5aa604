package tiertest

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/spillway-db/spillway/tier"
)

var errInjected = errors.New("a fault on purpose")

// fault fails one operation of a device: the first that is submitted after n others.
type fault struct {
	running bool // fail the operation when it runs; otherwise refuse it

	mu    sync.Mutex
	n     int64 // operations to let pass; negative: fail none
	ops   int64 // operations submitted so far
	index int64 // of the operation that fails, once hit is true
	hit   bool
}

// ask is the device's FaultFunc.
func (f *fault) ask(index int64, running bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if running {
		if f.running && f.hit && index == f.index {
			return errInjected
		}
		return nil
	}
	f.ops++
	if f.ops-1 != f.n {
		return nil
	}
	f.hit, f.index = true, index
	if f.running {
		return nil
	}
	return errInjected
}

// next makes the next operation the one that fails.
func (f *fault) next() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.n = f.ops
}

// stop lets all later operations pass and reports whether one was chosen to fail.
func (f *fault) stop() (hit bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.n = -1
	return f.hit
}

// eachFault runs one subtest for each operation of the script, with a fault that hits it, and a
// last one without a hit. It ends the test after a subtest that failed.
func eachFault(t *testing.T, open openFunc, running bool, run func(t *testing.T, d *device, f *fault)) {
	t.Helper()
	for n, hit := int64(0), true; hit; n++ {
		f, skipped := &fault{n: n, running: running}, false
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			defer func() { skipped = t.Skipped() }()
			run(t, openDevice(t, open, f.ask), f)
		})
		if skipped {
			t.Skip("needs a device that can fail on purpose")
		}
		if t.Failed() {
			t.FailNow()
		}
		hit = f.stop()
	}
}

// script is one run of a program that makes each call of a device at least once.
type script struct {
	d            *device
	s, other     tier.Stream
	out, regions []byte // read back
}

const scriptSize = 10_000

// runScript fills two allocations, copies bytes over two streams and frees both. It makes every
// call through step.
func runScript(d *device, step func(name string, call func() error)) *script {
	c := &script{d: d, out: make([]byte, scriptSize), regions: make([]byte, scriptSize/2)}
	var a, b tier.Addr
	var e tier.Event
	step("new stream", func() (err error) { c.s, err = d.NewStream(); return err })
	step("new stream", func() (err error) { c.other, err = d.NewStream(); return err })
	step("alloc", func() (err error) { a, err = d.Alloc(c.s, scriptSize); return err })
	step("alloc", func() (err error) { b, err = d.Alloc(c.s, scriptSize); return err })
	step("fill", func() error { return d.Fill(c.s, b, 3, scriptSize) })
	step("copy to device", func() error { return d.CopyToDevice(c.s, a, pattern(scriptSize, 1)) })
	step("copy on device", func() error { return copyOnDevice(d, c.s, b, a, scriptSize/2) })
	step("record", func() (err error) { e, err = d.Record(c.s); return err })
	step("wait event", func() error { return d.WaitEvent(c.other, e) })
	step("regions", func() error {
		return d.CopyRegions(c.other, []tier.Region{
			{HostDst: c.regions, Src: a},
			{Dst: b + scriptSize/2, Src: a + scriptSize/2, Size: 100},
		})
	})
	step("copy to host", func() error { return d.CopyToHost(c.other, c.out, b) })
	step("record", func() (err error) { e, err = d.Record(c.other); return err })
	step("wait event", func() error { return d.WaitEvent(c.s, e) })
	step("free", func() error { return d.Free(c.s, a) })
	step("free", func() error { return d.Free(c.s, b) })
	return c
}

// finish waits for both streams, checks that no memory is outstanding, and returns the work's
// error.
func (c *script) finish() error {
	err := errors.Join(wait(c.d, c.s), wait(c.d, c.other))
	c.d.Reap()
	if n := c.d.Outstanding(); n != 0 {
		c.d.t.Errorf("%d bytes are outstanding after all memory was freed", n)
	}
	return err
}

// verify checks what the script has read back.
func (c *script) verify(when string) {
	c.d.t.Helper()
	want := framed(pattern(scriptSize, 1)[:scriptSize/2+100], 0, scriptSize, 3)
	equal(c.d.t, c.out, want, when)
	equal(c.d.t, c.regions, want[:scriptSize/2], "regions "+when)
}

func (c *script) close() { c.d.ok(errors.Join(c.s.Close(), c.other.Close())) }

// testRefused refuses each operation of the script in turn. The call returns the error and has no
// effect, and the same call made again succeeds. A device may hide that an operation of its own
// within a call was refused. But each call must report it at least once.
func testRefused(t *testing.T, open openFunc) {
	var calls []string // of the script, and which of them returned the error
	reported := make(map[int]bool)
	eachFault(t, open, false, func(t *testing.T, d *device, f *fault) {
		refused := 0
		calls = nil
		c := runScript(d, func(name string, call func() error) {
			outstanding := d.Outstanding()
			err := call()
			if errors.Is(err, errInjected) {
				refused++
				reported[len(calls)] = true
				if now := d.Outstanding(); now > outstanding { // it may fall: earlier frees take effect
					t.Errorf("a refused %s raised Outstanding from %d to %d", name, outstanding, now)
				}
				err = call()
			}
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			calls = append(calls, name)
		})
		if hit := f.stop(); refused > 1 || refused == 1 && !hit {
			t.Errorf("an operation was refused: %v; %d calls returned that error", hit, refused)
		}
		if err := c.finish(); err != nil {
			t.Errorf("work failed after a call was refused: %v", err)
		}
		c.verify("after the refused call was made again")
		c.close()
	})
	for i, name := range calls {
		if !reported[i] {
			t.Errorf("call %d of the script, %s, never reports a refusal: does the backend ask about it?", i, name)
		}
	}
}

// testFailed fails each piece of work in turn. Its events and the stream that waited for it fail,
// all memory is freed, and the device and other streams keep working.
func testFailed(t *testing.T, open openFunc) {
	failures := 0
	eachFault(t, open, true, func(t *testing.T, d *device, f *fault) {
		c := runScript(d, func(name string, call func() error) {
			if err := call(); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		})
		f.stop()
		err := c.finish()
		if err != nil {
			failures++
			if !errors.Is(err, errInjected) {
				t.Errorf("the events' error is %v, which does not wrap the injected one", err)
			}
			if c.s.Err() == nil { // it waits for the other stream, so it fails in either case
				t.Error("Stream.Err is nil after the stream's work, or an event that it waited for, failed")
			}
		}
		d.works(d.stream())
		c.close()
		if err == nil {
			c.verify("without a failure")
		}
	})
	if failures == 0 {
		t.Error("no work failed although faults returned errors: does the backend call it when work runs?")
	}
	for failing := range int64(failedCalls) {
		testFailedCall(t, open, failing)
	}
}

const failedCalls = 8

// testFailedCall fails one of several pieces of work on a stream. Events that were recorded before
// it succeed, later ones fail, and nothing else reports the failure.
func testFailedCall(t *testing.T, open openFunc, failing int64) {
	f := &fault{n: -1, running: true}
	d := openDevice(t, open, f.ask)
	s, other := d.stream(), d.stream()
	a := d.alloc(s, failedCalls)
	d.ok(d.Fill(s, a, 0, failedCalls))
	var events []tier.Event
	for i := range int64(failedCalls) {
		if i == failing {
			f.next()
		}
		d.ok(d.Fill(s, a+tier.Addr(i), byte(i+1), 1))
		events = append(events, d.record(s))
	}
	mustFail(t, errInjected, map[string]error{
		"Wait after work failed":   wait(d, s),
		"Stream.Err, work failed":  s.Err(),
		"Stream.Sync, work failed": s.Sync(),
	})
	for i, e := range events {
		if bad := int64(i) >= failing; bad != errors.Is(e.Err(), errInjected) || !isDone(e) {
			t.Errorf("work %d failed: the event after work %d is done: %v, error: %v", failing, i, isDone(e), e.Err())
		}
	}
	d.works(other)
	want := []byte{1, 2, 3, 4, 5, 6, 7, 8}[:failing+1]
	want[failing] = 0
	equal(t, d.read(other, a, failing+1), want, fmt.Sprintf("after work %d failed", failing))
	d.ok(d.WaitEvent(other, events[failedCalls-1]))
	mustFail(t, errInjected, map[string]error{"Wait for a stream that waited for a failed event": wait(d, other)})
	third := d.stream()
	d.ok(d.Free(s, a)) // frees take place on streams that have failed
	_ = wait(d, s)
	d.outstanding(third, 0)
	d.ok(d.Close())
}
