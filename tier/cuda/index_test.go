package cuda_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"

	driver "github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/cuda"
)

// again calls f until it passes: each call of the driver fails once at most, and a call of the
// device makes a few.
func again(t *testing.T, f func() error) {
	t.Helper()
	var err error
	for range 5 {
		if err = f(); err == nil {
			return
		}
		var code *driver.Error
		if !errors.As(err, &code) && !errors.Is(err, tier.ErrNoSpace) {
			t.Fatalf("an error that is not the driver's: %v", err)
		}
	}
	t.Fatal(err)
}

// journey opens a device, sends bytes there, about there and back, by memory that is pinned and
// that is not, and gives everything up. Calls that are refused are made again. It returns whether
// the bytes came back.
func journey(t *testing.T, r *rig, cfg cuda.Config, pinned []byte) {
	t.Helper()
	var d *cuda.Device
	again(t, func() (err error) { d, err = r.driver.OpenDevice(cfg); return err })
	again(t, func() error { return d.Pin(pinned) })
	const n = 3000
	want := make([]byte, n)
	for i := range want {
		want[i] = byte(i * 7)
	}
	var s, other tier.Stream
	again(t, func() (err error) { s, err = d.NewStream(); return err })
	again(t, func() (err error) { other, err = d.NewStream(); return err })
	var a, b tier.Addr
	again(t, func() (err error) { a, err = d.Alloc(s, n); return err })
	again(t, func() (err error) { b, err = d.Alloc(s, n); return err })
	again(t, func() error { return d.CopyToDevice(s, a, want) })
	again(t, func() error { return d.CopyRegions(s, []tier.Region{{Dst: b, Src: a, Size: n}}) })
	wait := func(s tier.Stream) {
		t.Helper()
		var e tier.Event
		again(t, func() (err error) { e, err = d.Record(s); return err })
		if err := tier.Wait(context.Background(), e); err != nil {
			t.Fatalf("work that was accepted failed: %v", err)
		}
	}
	opened := make(chan struct{})
	again(t, func() error { return d.WaitEvent(other, foreign(opened)) })
	close(opened)
	wait(s)
	back := make([]byte, n)
	// Should a region be refused behind others its stream fails, which is another test's matter.
	again(t, func() error {
		return d.CopyRegions(other, []tier.Region{{HostDst: pinned[:n], Src: b}})
	})
	again(t, func() error { return d.CopyToHost(other, back, a) })
	wait(other)
	if !bytes.Equal(back, want) || !bytes.Equal(pinned[:n], want) {
		t.Error("the bytes did not come back as they went")
	}
	again(t, func() error { return d.Free(s, a) })
	again(t, func() error { return d.Free(s, b) })
	wait(s)
	if n := d.Outstanding(); n != 0 {
		t.Errorf("%d bytes are outstanding after all was freed", n)
	}
	d.MemInfo()
	_ = d.Unpin(pinned) // like what follows it takes place, whatever it tells
	_ = s.Close()
	_ = d.Close()
}

// foreign is an event of no backend.
type foreign chan struct{}

func (f foreign) Done() <-chan struct{} { return f }
func (f foreign) Err() error            { return nil }

// TestEveryCallOfTheDriverFailsOnce fails each in turn, in two ways: nothing is lost, and nothing
// is left.
func TestEveryCallOfTheDriverFailsOnce(t *testing.T) {
	for _, k := range kinds {
		if k.name == "slow" || k.name == "old" {
			continue // fails as others do, or cannot wait for an event of the test's
		}
		for _, code := range []driver.Code{driver.ErrOutOfMemory, driver.ErrInvalidValue} {
			for n := int64(0); ; n++ {
				calls := int64(0)
				ok := t.Run(fmt.Sprintf("%s/%d/%d", k.name, code, n), func(t *testing.T) {
					r := load(t, k.emulator)
					pinned := page(t)
					before := r.Calls("")
					r.Fail("", n, code, 1)
					journey(t, r, cuda.Config{Memory: 1 << 20, OnePiece: k.onePiece}, pinned)
					calls = r.Calls("") - before
				})
				if !ok {
					return
				}
				if n >= calls {
					break
				}
			}
		}
	}
}
