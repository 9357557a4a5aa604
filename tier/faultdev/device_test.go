package faultdev_test

import (
	"bytes"
	"context"
	"errors"
	"math/bits"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/internal/sim"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/faultdev"
	"github.com/spillway-db/spillway/tier/tiertest"
)

var errFault = errors.New("a fault on purpose")

// open returns a simulated device that is wrapped with rules.
func open(t *testing.T, rules ...faultdev.Rule) *faultdev.Device {
	t.Helper()
	inner, err := sim.New(sim.Config{Memory: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	d := faultdev.New(inner, 1, rules...)
	t.Cleanup(func() { ok(t, d.Close()) })
	return d
}

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func stream(t *testing.T, d tier.Device) tier.Stream {
	t.Helper()
	s, err := d.NewStream()
	ok(t, err)
	return s
}

func alloc(t *testing.T, d tier.Device, s tier.Stream, n int64) tier.Addr {
	t.Helper()
	a, err := d.Alloc(s, n)
	ok(t, err)
	return a
}

func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i * 7)
	}
	return b
}

// TestConforms checks that a Device without an applicable rule behaves like the device that it
// wraps.
func TestConforms(t *testing.T) {
	tiertest.RunDevice(t, func(t *testing.T, memory int64, faults tiertest.FaultFunc) tier.Device {
		var hook func(sim.Op) error
		if faults != nil {
			hook = func(op sim.Op) error {
				return faults(op.Index, op.Stage == sim.Run)
			}
		}
		inner, err := sim.NewFaulty(sim.Config{Memory: memory}, hook)
		if err != nil {
			t.Fatal(err)
		}
		never := faultdev.Rule{Ops: []string{"alloc"}, Skip: 1 << 40, Effect: faultdev.OutOfMemory()}
		return faultdev.New(inner, 1, never)
	})
}

// calls are all operations, on 64 bytes each.
func calls(d *faultdev.Device, s tier.Stream, a, b tier.Addr) map[string]func() error {
	buf := make([]byte, 64)
	return map[string]func() error{
		"alloc":          func() error { _, err := d.Alloc(s, 64); return err },
		"free":           func() error { return d.Free(s, a) },
		"copy-to-device": func() error { return d.CopyRegions(s, []tier.Region{{Dst: a, HostSrc: buf}}) },
		"copy-to-host":   func() error { return d.CopyRegions(s, []tier.Region{{HostDst: buf, Src: a}}) },
		"copy-to-peer":   func() error { return d.CopyPeer(s, b, d, a, 64) },
		"copy-regions": func() error {
			return d.CopyRegions(s, []tier.Region{{Dst: a, HostSrc: buf[:32]}, {Dst: a + 32, HostSrc: buf[32:]}})
		},
		"fill":       func() error { return d.Fill(s, a, 1, 64) },
		"new-stream": func() error { _, err := d.NewStream(); return err },
		"record":     func() error { _, err := d.Record(s); return err },
		"wait-event": func() error { return d.WaitEvent(s, done{}) },
	}
}

// copies are the operations that the pattern copy-* matches.
var copies = []string{"copy-to-device", "copy-to-host", "copy-to-peer", "copy-regions"}

// moving are the operations whose work moves or writes bytes.
var moving = append(copies, "fill")

// done is an event of no device.
type done struct{}

func (done) Err() error { return nil }
func (done) Done() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}

// TestEveryOperationCanFail checks that each call returns the error, counts once and has no effect.
func TestEveryOperationCanFail(t *testing.T) {
	for inWork, effect := range map[bool]faultdev.Effect{
		false: faultdev.Fail(errFault), true: faultdev.FailWork(errFault),
	} {
		d := open(t)
		s := stream(t, d)
		a, b := alloc(t, d, s, 64), alloc(t, d, s, 64)
		d.Add(faultdev.Rule{Effect: effect})
		before := d.Outstanding()
		for op, call := range calls(d, s, a, b) {
			if inWork && slices.Contains(moving, op) {
				continue // the stream reports it: TestFailWork
			}
			n, hits := d.Count(op), d.Hits()
			if err := call(); !errors.Is(err, errFault) {
				t.Errorf("%s: %v", op, err)
			}
			if d.Count(op) != n+1 || d.Hits() != hits+1 {
				t.Errorf("%s: counted %d times, hit %d times", op, d.Count(op)-n, d.Hits()-hits)
			}
		}
		if d.Outstanding() != before {
			t.Errorf("refused calls changed what is outstanding from %d to %d", before, d.Outstanding())
		}
	}
}

// TestFailWork checks that the call succeeds, the work is not done, and only its stream fails.
func TestFailWork(t *testing.T) {
	for _, op := range moving {
		d := open(t)
		s, other := stream(t, d), stream(t, d)
		a, b := alloc(t, d, s, 64), alloc(t, d, s, 64)
		ok(t, errors.Join(d.Fill(s, a, 7, 64), d.Fill(s, b, 7, 64), s.Sync()))
		remove := d.Add(faultdev.Rule{Ops: []string{op}, Effect: faultdev.FailWork(errFault)})
		if err := calls(d, s, a, b)[op](); err != nil {
			t.Errorf("%s: the call returned %v", op, err)
		}
		e, err := d.Record(s)
		ok(t, err)
		if err := tier.Wait(context.Background(), e); !errors.Is(err, errFault) || !errors.Is(s.Err(), errFault) {
			t.Errorf("%s: the event reports %v, the stream %v", op, err, s.Err())
		}
		remove()
		got := make([]byte, 64)
		for _, addr := range []tier.Addr{a, b} {
			ok(t, errors.Join(d.CopyRegions(other, []tier.Region{{HostDst: got, Src: addr}}), other.Sync()))
			if !bytes.Equal(got, bytes.Repeat([]byte{7}, 64)) {
				t.Errorf("%s failed, and wrote", op)
			}
		}
	}
}

// choosy is a device that cannot wait for events of others.
type choosy struct{ tier.Device }

func (choosy) WaitEvent(tier.Stream, tier.Event) error { return tier.ErrNotSupported }

func TestFailWorkWhereItCannotBe(t *testing.T) {
	inner, err := sim.New(sim.Config{Memory: 1 << 20})
	ok(t, err)
	d := faultdev.New(choosy{inner}, 1)
	s := stream(t, d)
	a := alloc(t, d, s, 64)
	d.Add(faultdev.Rule{Effect: faultdev.FailWork(errFault)})
	if err := d.Fill(s, a, 1, 64); !errors.Is(err, errFault) {
		t.Errorf("the call returned %v", err)
	}
	ok(t, d.Close())
}

func TestOutOfMemory(t *testing.T) {
	d := open(t, faultdev.Rule{Skip: 2, Times: 1, Effect: faultdev.OutOfMemory()})
	s := stream(t, d) // operation 0
	alloc(t, d, s, 64)
	_, err := d.Alloc(s, 5000)
	var full *tier.NoSpaceError
	if !errors.As(err, &full) || full.Requested != 5000 || !errors.Is(err, tier.ErrNoSpace) {
		t.Errorf("the third operation: %v", err)
	}
	a := alloc(t, d, s, 5000)
	d.Add(faultdev.Rule{Effect: faultdev.OutOfMemory()}) // other operations are not affected
	stream(t, d)
	e, err := d.Record(s)
	ok(t, err)
	ok(t, errors.Join(d.WaitEvent(s, e), d.Fill(s, a, 1, 5000), d.Free(s, a), s.Sync()))
}

// TestBitFlip checks that each operation that writes bytes silently changes one bit of them, and
// does not change the bytes that it was given.
func TestBitFlip(t *testing.T) {
	for _, op := range append(copies, "fill") {
		d, peer := open(t), open(t)
		s, there := stream(t, d), stream(t, peer)
		const n = 4096
		want := pattern(n)
		given := bytes.Clone(want)
		a, b, far := alloc(t, d, s, n), alloc(t, d, s, n), alloc(t, peer, there, n)
		ok(t, errors.Join(d.CopyRegions(s, []tier.Region{{Dst: a, HostSrc: want}}), s.Sync()))
		d.Add(faultdev.Rule{Ops: []string{op}, Times: 1, Effect: faultdev.BitFlip()})
		got := make([]byte, n)
		switch op {
		case "copy-to-device":
			ok(t, errors.Join(d.CopyRegions(s, []tier.Region{{Dst: b, HostSrc: given}}), d.CopyRegions(s, []tier.Region{{HostDst: got, Src: b}}), s.Sync()))
		case "copy-to-host":
			ok(t, errors.Join(d.CopyRegions(s, []tier.Region{{HostDst: got, Src: a}}), s.Sync()))
		case "copy-to-peer":
			ok(t, errors.Join(d.CopyPeer(s, far, peer, a, n), s.Sync(), peer.CopyRegions(there, []tier.Region{{HostDst: got, Src: far}}), there.Sync()))
		case "copy-regions":
			ok(t, errors.Join(d.CopyRegions(s, []tier.Region{
				{Dst: b, HostSrc: given[:100]}, {HostDst: got[:2000], Src: a},
				{Dst: b + 2000, Src: a + 2000, Size: n - 2000},
			}), d.CopyRegions(s, []tier.Region{{HostDst: got[2000:], Src: b + 2000}}), s.Sync()))
			first := make([]byte, 100)
			ok(t, errors.Join(d.CopyRegions(s, []tier.Region{{HostDst: first, Src: b}}), s.Sync()))
			for i := range first { // bytes that were written twice count once
				got[i] ^= first[i] ^ want[i]
			}
		case "fill":
			want = bytes.Repeat([]byte{9}, n)
			ok(t, errors.Join(d.Fill(s, b, 9, n), d.CopyRegions(s, []tier.Region{{HostDst: got, Src: b}}), s.Sync()))
			given = want
		}
		wrong := 0
		for i := range got {
			wrong += bits.OnesCount8(got[i] ^ want[i])
		}
		if wrong != 1 || !bytes.Equal(given, want) || d.Hits() != 1 {
			t.Errorf("%s: %d bits are wrong after %d hits", op, wrong, d.Hits())
		}
		ok(t, s.Err())
	}
}

func TestNothingToFlip(t *testing.T) {
	d := open(t)
	s := stream(t, d)
	d.Add(faultdev.Rule{Effect: faultdev.BitFlip()})
	a := alloc(t, d, s, 64)
	ok(t, errors.Join(d.CopyRegions(s, []tier.Region{{HostDst: nil, Src: a}}), d.CopyRegions(s, nil), d.Free(s, a), s.Sync()))
}

func TestRulesChoose(t *testing.T) {
	var called []string
	d := open(t, faultdev.Rule{Ops: []string{"alloc"}, Times: 1, Effect: faultdev.Fail(errFault),
		Hit: func(op string, bytes int64) {
			if bytes != 64 {
				t.Errorf("called for %d bytes", bytes)
			}
			called = append(called, op)
		}})
	seen := 0
	remove := d.Add(faultdev.Rule{Effect: faultdev.Do(func(string, int64) { seen++ })})
	s := stream(t, d)
	if _, err := d.Alloc(s, 64); !errors.Is(err, errFault) {
		t.Errorf("the first rule is not applied: %v", err)
	}
	alloc(t, d, s, 64)
	remove()
	alloc(t, d, s, 64)
	if seen != 2 || len(called) != 1 || called[0] != "alloc" || d.Count() != 4 || d.Hits() != 1 {
		t.Errorf("seen %d, called for %v, count %d, hits %d", seen, called, d.Count(), d.Hits())
	}
}

func TestProbability(t *testing.T) {
	hits := func(seed uint64) int {
		inner, err := sim.New(sim.Config{Memory: 1 << 20})
		ok(t, err)
		d := faultdev.New(inner, seed, faultdev.Rule{
			Ops: []string{"new-stream"}, Probability: 0.25, Effect: faultdev.Fail(errFault),
		})
		for range 400 {
			if s, err := d.NewStream(); err == nil {
				ok(t, s.Close())
			}
		}
		ok(t, d.Close())
		return d.Hits()
	}
	if a, b := hits(5), hits(5); a != b || a < 60 || a > 140 {
		t.Errorf("%d and %d of 400 hit with the same seed; want the same, about 100", a, b)
	}
}

func TestSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := open(t, faultdev.Rule{Ops: []string{"alloc"}, Effect: faultdev.Slow(time.Second)})
		s := stream(t, d)
		begin := time.Now()
		alloc(t, d, s, 64)
		if took := time.Since(begin); took != time.Second {
			t.Errorf("took %v", took)
		}
	})
}
