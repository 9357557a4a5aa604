// Package tiertest holds the suites that every backend passes: RunDevice for a
// device, RunPool for what hands out the memory of a space. Both say in their
// failures which line of the contract in package tier is broken.
package tiertest

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/spillway-db/spillway/tier"
)

// FaultFunc reports whether an operation fails that a device under test is about to do, and how.
// index distinguishes the operations of a device: no two have the same. running is false while the
// call is being made, on the caller's goroutine and after its arguments were found right: an error
// then refuses the call. It is true when work comes to be done that moves or computes bytes: an
// error then fails the work. Both times the index is the same. A FaultFunc is safe for concurrent
// use.
type FaultFunc func(index int64, running bool) error

type openFunc = func(t *testing.T, memory int64, faults FaultFunc) tier.Device

// RunDevice checks that a device keeps the contract of tier.Device and, if it
// has it, of tier.Computer. open opens a device with so much memory in bytes, a multiple of 1 MiB,
// all of which can be allocated. The device asks faults about every operation; nil means that
// nothing is to fail. A backend that cannot fail on purpose skips the test when faults is not nil.
// RunDevice closes the device.
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
		{"Digest", testDigest},
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

// device is a device under test whose methods end the test when they fail.
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
		d.t.Fatalf("Alloc(%d) gave address %#x: want a multiple of 256 above 0", size, uint64(a))
	}
	return a
}

func (d *device) record(s tier.Stream) tier.Event {
	d.t.Helper()
	e, err := d.Record(s)
	d.ok(err)
	return e
}

// hangPatience is when work is given up that should take milliseconds: so that a
// backend that hangs fails with a name, and not with the whole test binary.
const hangPatience = time.Minute

// wait waits for all work on s, which must not have failed.
func (d *device) wait(s tier.Stream) {
	d.t.Helper()
	ctx, cancel := context.WithTimeoutCause(context.Background(), hangPatience, errors.New("it hangs"))
	defer cancel()
	if err := tier.Wait(ctx, d.record(s)); err != nil {
		d.t.Fatalf("work on the stream: %v", err)
	}
}

// write puts b at dst and waits; read reads it back.
func (d *device) write(s tier.Stream, dst tier.Addr, b []byte) {
	d.t.Helper()
	d.ok(d.CopyToDevice(s, dst, b))
	d.wait(s)
}

func (d *device) read(s tier.Stream, src tier.Addr, n int64) []byte {
	d.t.Helper()
	b := make([]byte, n)
	d.ok(d.CopyToHost(s, b, src))
	d.wait(s)
	return b
}

// works checks that s and the device do what they should, after something was
// done to them that must not matter.
func (d *device) works(s tier.Stream) {
	d.t.Helper()
	const n = 1000
	a := d.alloc(s, n)
	want := pattern(n, 99)
	d.write(s, a, want)
	equal(d.t, d.read(s, a, n), want, "after a copy to the device and back")
	d.ok(d.Free(s, a))
	if err := s.Err(); err != nil {
		d.t.Fatalf("Stream.Err: %v", err)
	}
}

// outstanding checks what is live and retired once all work on s is done.
func (d *device) outstanding(s tier.Stream, want int64) {
	d.t.Helper()
	d.wait(s)
	d.Reap()
	if got := d.Outstanding(); got != want {
		d.t.Fatalf("Outstanding is %d, want %d", got, want)
	}
}

func equal(t *testing.T, got, want []byte, what string) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d bytes, want %d", what, len(got), len(want))
	}
	if !bytes.Equal(got, want) {
		i := firstDifference(got, want)
		t.Fatalf("%s: byte %d of %d is %#x, want %#x", what, i, len(got), got[i], want[i])
	}
}

// gate is an event that is done when the test says so.
type gate struct{ c chan struct{} }

func (g gate) Done() <-chan struct{} { return g.c }
func (g gate) Err() error            { return nil }

// block puts a wait on s that ends when the returned function is called, at the
// latest when the test ends. Where the backend cannot wait for the test's
// event, the test is skipped.
func (d *device) block(s tier.Stream) (unblock func()) {
	d.t.Helper()
	g := gate{make(chan struct{})}
	err := d.WaitEvent(s, g)
	if errors.Is(err, tier.ErrNotSupported) {
		d.t.Skipf("the test needs a stream that waits for it: %v", err)
	}
	d.ok(err)
	done := false
	unblock = func() {
		if !done {
			done = true
			close(g.c)
		}
	}
	d.t.Cleanup(unblock)
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
