package tiertest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/spillway-db/spillway/tier"
)

var errInjected = errors.New("a fault on purpose")

// fault fails one operation of a device: the one that is submitted when n others
// have been.
type fault struct {
	running bool // fail it when it runs; else refuse it

	mu    sync.Mutex
	n     int64 // operations to let pass; negative to fail none
	index int64 // of the operation that is to fail when it runs
	ops   int64 // submitted so far
	hit   bool
}

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

// stop lets everything pass that is still to be submitted, and reports whether an
// operation was chosen to fail.
func (f *fault) stop() (hit bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.n = -1
	return f.hit
}

// script does one of each operation. Every call goes through step.
type script struct {
	d    *device
	step func(name string, call func() error)

	s, other tier.Stream
	a, b     tier.Addr
	digest   tier.Digest
	out      []byte
	regions  []byte
}

const scriptSize = 10_000

// run fills a and b, moves bytes over two streams, and frees both.
func (c *script) run() {
	d := c.d
	in := pattern(scriptSize, 1)
	c.out, c.regions = make([]byte, scriptSize), make([]byte, scriptSize/2)
	var e tier.Event
	c.step("new stream", func() (err error) { c.s, err = d.NewStream(); return err })
	c.step("new stream", func() (err error) { c.other, err = d.NewStream(); return err })
	c.step("alloc", func() (err error) { c.a, err = d.Alloc(c.s, scriptSize); return err })
	c.step("alloc", func() (err error) { c.b, err = d.Alloc(c.s, scriptSize); return err })
	c.step("fill", func() error { return d.Fill(c.s, c.b, 3, scriptSize) })
	c.step("copy to device", func() error { return d.CopyToDevice(c.s, c.a, in) })
	c.step("copy on device", func() error { return copyOnDevice(d, c.s, c.b, c.a, scriptSize/2) })
	c.step("record", func() (err error) { e, err = d.Record(c.s); return err })
	c.step("wait event", func() error { return d.WaitEvent(c.other, e) })
	c.step("regions", func() error {
		return d.CopyRegions(c.other, []tier.Region{
			{HostDst: c.regions, Src: c.a},
			{Dst: c.b + scriptSize/2, Src: c.a + scriptSize/2, Size: 100},
		})
	})
	if computer, ok := d.Device.(tier.Computer); ok {
		c.step("digest", func() error { return computer.Digest(c.other, c.b, scriptSize, 0, &c.digest) })
	}
	c.step("copy to host", func() error { return d.CopyToHost(c.other, c.out, c.b) })
	c.step("record", func() (err error) { e, err = d.Record(c.other); return err })
	c.step("wait event", func() error { return d.WaitEvent(c.s, e) })
	c.step("free", func() error { return d.Free(c.s, c.a) })
	c.step("free", func() error { return d.Free(c.s, c.b) })
}

// want is what out holds after all of it.
func (c *script) want() []byte {
	in := pattern(scriptSize, 1)
	b := framed(in[:scriptSize/2+100], 0, scriptSize, 3)
	return b
}

// finish waits for both streams, and checks that nothing is outstanding.
func (c *script) finish() (err error) {
	for _, s := range []tier.Stream{c.s, c.other} {
		e, rerr := c.d.Record(s)
		c.d.ok(rerr)
		err = errors.Join(err, tier.Wait(context.Background(), e))
	}
	c.d.Reap()
	if n := c.d.Outstanding(); n != 0 {
		c.d.t.Errorf("%d bytes are outstanding after all was freed", n)
	}
	return err
}

func (c *script) close() {
	c.d.ok(c.s.Close())
	c.d.ok(c.other.Close())
}

// testRefused refuses each operation of the script in turn. The caller gets an error, nothing has
// happened, and the same call made again passes. A device may hide that an operation of its own
// within a call was refused. But each call must report when its own operation was.
func testRefused(t *testing.T, open openFunc) {
	var calls []string // of the script, and whether each was refused once
	told := make(map[int]bool)
	for n := int64(0); ; n++ {
		f, hit := &fault{n: n}, false
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			d := openDevice(t, open, f.ask)
			refused := 0
			calls = nil
			c := &script{d: d, step: func(name string, call func() error) {
				calls = append(calls, name)
				outstanding := d.Outstanding()
				err := call()
				if errors.Is(err, errInjected) {
					refused++
					told[len(calls)-1] = true
					if now := d.Outstanding(); now > outstanding { // less: what was freed before
						t.Errorf("a refused %s raised Outstanding from %d to %d", name, outstanding, now)
					}
					err = call()
				}
				if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
			}}
			c.run()
			if hit = f.stop(); refused > 1 || refused == 1 && !hit {
				t.Errorf("an operation was refused: %v; errors that say so: %d", hit, refused)
			}
			if err := c.finish(); err != nil {
				t.Errorf("work failed after a call was refused: %v", err)
			}
			equal(t, c.out, c.want(), "after the refused call was made again")
			equal(t, c.regions, c.want()[:scriptSize/2], "regions after the refused call was made again")
			c.close()
		})
		if !hit {
			break // n is beyond the script
		}
		if t.Failed() {
			return
		}
	}
	for i, name := range calls {
		if !told[i] {
			t.Errorf("call %d of the script, %s, never says that it was refused: does the backend ask about it?", i, name)
		}
	}
}

// testFailed fails each piece of work in turn. Events report it, the stream that waited for the
// failed one fails too, all memory comes back, and the device goes on working.
func testFailed(t *testing.T, open openFunc) {
	failures, skipped := 0, false
	for n := int64(0); ; n++ {
		f, hit := &fault{n: n, running: true}, false
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			defer func() { skipped = t.Skipped() }()
			d := openDevice(t, open, f.ask)
			c := &script{d: d, step: func(name string, call func() error) {
				if err := call(); err != nil {
					t.Fatalf("%s: %v", name, err)
				}
			}}
			c.run()
			hit = f.stop()
			err := c.finish()
			if err != nil {
				failures++
				if !errors.Is(err, errInjected) {
					t.Errorf("the events' error is %v, which does not wrap what failed", err)
				}
				if c.s.Err() == nil { // it waited for the other, whichever failed
					t.Error("a stream does not tell that its work, or the event it waited for, failed")
				}
			}
			fresh := d.stream()
			d.works(fresh) // other streams are not affected
			c.close()
			if err == nil {
				equal(t, c.out, c.want(), "without a failure")
			}
		})
		if !hit {
			break
		}
		if t.Failed() {
			return
		}
	}
	if skipped {
		t.Skip("needs a backend that can fail on purpose")
	}
	if failures == 0 {
		t.Error("no work failed although faults were asked for: does the backend ask when work runs?")
	}
	testFailureIsTold(t, open)
}

// testFailureIsTold: events before the failed work succeed, those after it fail, and nothing else
// reports the failure.
func testFailureIsTold(t *testing.T, open openFunc) {
	const calls = 8
	for failing := range int64(calls) {
		f := &fault{n: -1, running: true}
		d := openDevice(t, open, f.ask)
		s, other := d.stream(), d.stream()
		a := d.alloc(s, calls)
		d.ok(d.Fill(s, a, 0, calls))
		var events []tier.Event
		for i := range int64(calls) {
			if i == failing {
				f.next()
			}
			d.ok(d.Fill(s, a+tier.Addr(i), byte(i+1), 1))
			events = append(events, d.record(s))
		}
		for i, e := range events {
			err := tier.Wait(context.Background(), e)
			if bad := int64(i) >= failing; bad != errors.Is(err, errInjected) {
				t.Errorf("work %d failed: the event after work %d has the error %v", failing, i, err)
			}
		}
		if err := s.Err(); !errors.Is(err, errInjected) {
			t.Errorf("work failed and Stream.Err is %v", err)
		}
		if err := s.Sync(); !errors.Is(err, errInjected) {
			t.Errorf("work failed and Stream.Sync returned %v", err)
		}
		d.works(other)
		got := d.read(other, a, calls)
		for i := range failing {
			if got[i] != byte(i+1) {
				t.Errorf("work %d failed and work %d before it was not done", failing, i)
			}
		}
		if got[failing] != 0 {
			t.Errorf("work %d failed and was done", failing)
		}
		d.ok(d.WaitEvent(other, events[calls-1]))
		if err := tier.Wait(context.Background(), d.record(other)); !errors.Is(err, errInjected) {
			t.Errorf("a stream that waited for a failed event: %v; want what failed", err)
		}
		third := d.stream()
		d.ok(d.Free(s, a)) // frees take place on streams that have failed
		_ = tier.Wait(context.Background(), d.record(s))
		d.outstanding(third, 0)
		d.ok(d.Close())
	}
}
