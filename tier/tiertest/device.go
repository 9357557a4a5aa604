// Package tiertest has the suites that every backend must pass: RunDevice for a device and RunPool
// for a pool, which hands out the memory of a space. A failure names the promise of package tier
// that the backend breaks.
package tiertest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/spillway-db/spillway/tier"
)

// FaultFunc decides whether an operation of a device under test fails, and returns its error. The
// device calls it up to twice for each operation, with an index that no other operation of that
// device has:
//
//   - While the call is made, on the caller's goroutine and after the arguments were checked,
//     running is false. An error refuses the call.
//   - When work that moves or computes bytes is about to run, running is true. An error fails the
//     work.
//
// A FaultFunc is safe for concurrent use.
type FaultFunc func(index int64, running bool) error

type openFunc = func(t *testing.T, memory int64, faults FaultFunc) tier.Device

// RunDevice checks that a device keeps the contract of tier.Device. open returns a device of memory
// bytes, a multiple of 1 MiB, all of which can be allocated. The device calls faults, unless it is
// nil, for every operation. A backend that cannot fail on purpose skips the test if faults is not
// nil. RunDevice closes the device.
func RunDevice(t *testing.T, open func(t *testing.T, memory int64, faults FaultFunc) tier.Device) {
	for _, c := range []struct {
		name string
		run  func(t *testing.T, open openFunc)
	}{
		{"Info", testInfo},
		{"Charge", testCharge},
		{"Alloc", testAlloc},
		{"OutOfMemory", testOutOfMemory},
		{"Retire", testRetire},
		{"Alignments", testAlignments},
		{"Regions", testRegions},
		{"Peer", testPeer},
		{"Mistakes", testMistakes},
		{"OrderOnStream", testOrderOnStream},
		{"NoOrderAcrossStreams", testNoOrderAcrossStreams},
		{"Events", testEvents},
		{"NeverBlocks", testNeverBlocks},
		{"StreamClose", testStreamClose},
		{"Close", testClose},
		{"Concurrent", testConcurrent},
		{"Refused", testRefused},
		{"Failed", testFailed},
	} {
		t.Run(c.name, func(t *testing.T) {
			NoLeaks(t)
			c.run(t, open)
		})
	}
}

const memory = 4 << 20

// device is a device under test. Its own methods end the test if they fail.
type device struct {
	tier.Device
	t *testing.T
}

func openDevice(t *testing.T, open openFunc, faults FaultFunc) *device {
	t.Helper()
	d := &device{open(t, memory, faults), t}
	t.Cleanup(func() {
		if err := d.Close(); err != nil && !errors.Is(err, tier.ErrClosed) {
			t.Errorf("Close: %v", err)
		}
	})
	return d
}

func (d *device) ok(err error) {
	d.t.Helper()
	if err != nil {
		d.t.Fatal(err)
	}
}

func (d *device) stream() tier.Stream {
	d.t.Helper()
	s, err := d.NewStream()
	d.ok(err)
	return s
}

func (d *device) alloc(s tier.Stream, size int64) tier.Addr {
	d.t.Helper()
	a, err := d.Alloc(s, size)
	if err != nil {
		d.t.Fatalf("Alloc(%d): %v", size, err)
	}
	if a == 0 || a%256 != 0 {
		d.t.Fatalf("Alloc(%d) returned address %#x: want a multiple of 256 above 0", size, uint64(a))
	}
	return a
}

func (d *device) record(s tier.Stream) tier.Event {
	d.t.Helper()
	e, err := d.Record(s)
	d.ok(err)
	return e
}

// hangTimeout bounds waits that should take milliseconds, so that a backend that hangs fails the
// test of that name instead of the whole test binary.
const hangTimeout = time.Minute

// wait waits for all work on s and returns the work's error.
func wait(d tier.Device, s tier.Stream) error {
	e, err := d.Record(s)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(context.Background(), hangTimeout, errors.New("it hangs"))
	defer cancel()
	return tier.Wait(ctx, e)
}

// wait waits for all work on s, which must succeed.
func (d *device) wait(s tier.Stream) {
	d.t.Helper()
	if err := wait(d, s); err != nil {
		d.t.Fatalf("work on the stream: %v", err)
	}
}

// write copies b to dst and waits.
func (d *device) write(s tier.Stream, dst tier.Addr, b []byte) {
	d.t.Helper()
	d.ok(d.CopyToDevice(s, dst, b))
	d.wait(s)
}

// read returns the n bytes at src.
func (d *device) read(s tier.Stream, src tier.Addr, n int64) []byte {
	d.t.Helper()
	b := make([]byte, n)
	d.ok(d.CopyToHost(s, b, src))
	d.wait(s)
	return b
}

// roundTrip copies size bytes to a and back, compares them, and frees a.
func roundTrip(d tier.Device, s tier.Stream, a tier.Addr, size int64, seed uint64) error {
	want, got := pattern(size, seed), make([]byte, size)
	to, back := []tier.Region{{Dst: a, HostSrc: want}}, []tier.Region{{HostDst: got, Src: a}}
	if err := errors.Join(d.CopyRegions(s, to), d.CopyRegions(s, back), d.Free(s, a)); err != nil {
		return err
	}
	if err := wait(d, s); err != nil {
		return err
	}
	return difference(got, want)
}

// works checks that s and the device still work after the test did something that must not affect
// them.
func (d *device) works(s tier.Stream) {
	d.t.Helper()
	const size = 1000
	if err := errors.Join(roundTrip(d, s, d.alloc(s, size), size, 99), s.Err()); err != nil {
		d.t.Fatalf("after a copy to the device and back: %v", err)
	}
}

// outstanding checks how many bytes are live or retired once all work on s is done.
func (d *device) outstanding(s tier.Stream, want int64) {
	d.t.Helper()
	d.wait(s)
	d.Reap()
	if got := d.Outstanding(); got != want {
		d.t.Fatalf("Outstanding is %d, want %d", got, want)
	}
}

// difference returns an error that names the first byte in which got differs from want, or nil.
func difference(got, want []byte) error {
	if len(got) != len(want) {
		return fmt.Errorf("%d bytes, want %d", len(got), len(want))
	}
	if bytes.Equal(got, want) {
		return nil
	}
	i := 0
	for got[i] == want[i] {
		i++
	}
	return fmt.Errorf("byte %d of %d is %#x, want %#x", i, len(got), got[i], want[i])
}

func equal(t *testing.T, got, want []byte, what string) {
	t.Helper()
	if err := difference(got, want); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// gate is an event that is done once the test closes it.
type gate chan struct{}

func (g gate) Done() <-chan struct{} { return g }
func (g gate) Err() error            { return nil }

// tryBlock makes s wait until unblock is called, at the latest when the test ends. It returns false
// if the backend cannot wait for the test's event.
func (d *device) tryBlock(s tier.Stream) (unblock func(), blocked bool) {
	d.t.Helper()
	g := make(gate)
	unblock = sync.OnceFunc(func() { close(g) })
	err := d.WaitEvent(s, g)
	if errors.Is(err, tier.ErrNotSupported) {
		return unblock, false
	}
	d.ok(err)
	d.t.Cleanup(unblock)
	return unblock, true
}

// block is tryBlock for a test that needs it. It skips the test if the backend cannot wait.
func (d *device) block(s tier.Stream) (unblock func()) {
	d.t.Helper()
	unblock, blocked := d.tryBlock(s)
	if !blocked {
		d.t.Skip("needs a stream that waits for an event of the test")
	}
	return unblock
}

func isDone(e tier.Event) bool {
	select {
	case <-e.Done():
		return true
	default:
		return false
	}
}

// mustFail checks that each call, by its description, returned an error that wraps want. If want is
// nil, any error will do.
func mustFail(t *testing.T, want error, calls map[string]error) {
	t.Helper()
	for name, err := range calls {
		if err == nil || want != nil && !errors.Is(err, want) {
			t.Errorf("%s: the error is %v, want %v (nil: any)", name, err, want)
		}
	}
}

// second returns the error of a call with two results.
func second[T any](_ T, err error) error { return err }

// CopyToDevice copies b to dst.
func (d *device) CopyToDevice(s tier.Stream, dst tier.Addr, b []byte) error {
	return d.CopyRegions(s, []tier.Region{{Dst: dst, HostSrc: b}})
}

// CopyToHost copies from src to b.
func (d *device) CopyToHost(s tier.Stream, b []byte, src tier.Addr) error {
	return d.CopyRegions(s, []tier.Region{{HostDst: b, Src: src}})
}
