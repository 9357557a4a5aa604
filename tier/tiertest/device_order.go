package tiertest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/spillway-db/spillway/tier"
)

// testOrderOnStream submits random work to one stream without waiting and compares the result with
// that of the same work on a slice.
func testOrderOnStream(t *testing.T, open openFunc) {
	d := openDevice(t, open, nil)
	s := d.stream()
	const size = 256 << 10
	a := d.alloc(s, size)
	model := make([]byte, size)
	d.ok(d.Fill(s, a, 0, size))
	type reading struct{ got, want []byte }
	var readings []reading
	r := rand.New(rand.NewPCG(5, 6))
	unblock, _ := d.tryBlock(s) // so that all of the work is queued together
	for i := range uint64(500) {
		n := 1 + r.Int64N(size/4)
		off := r.Int64N(size - n + 1)
		at := a + tier.Addr(off)
		switch r.IntN(6) {
		case 0:
			b := pattern(n, i)
			d.ok(d.CopyToDevice(s, at, b))
			copy(model[off:], b)
		case 1:
			got := make([]byte, n)
			d.ok(d.CopyToHost(s, got, at))
			readings = append(readings, reading{got, bytes.Clone(model[off : off+n])})
		case 2:
			d.ok(d.Fill(s, at, byte(i), n))
			copy(model[off:], framed(nil, 0, n, byte(i)))
		case 3:
			from := r.Int64N(size - n + 1)
			if from < off+n && off < from+n {
				continue // overlaps
			}
			d.ok(copyOnDevice(d, s, at, a+tier.Addr(from), n))
			copy(model[off:off+n], model[from:])
		case 4:
			got := make([]byte, n/2)
			b := pattern(n/2, i)
			d.ok(d.CopyRegions(s, []tier.Region{{Dst: at, HostSrc: b}, {HostDst: got, Src: at + tier.Addr(n/2)}}))
			readings = append(readings, reading{got, bytes.Clone(model[off+n/2 : off+n/2*2])})
			copy(model[off:], b)
		case 5: // an allocation that is freed as soon as its work is queued
			tmp, err := d.Alloc(s, n)
			if err != nil {
				continue
			}
			d.ok(copyOnDevice(d, s, tmp, at, n))
			d.ok(d.Fill(s, at, 0, n))
			d.ok(copyOnDevice(d, s, at, tmp, n))
			d.ok(d.Free(s, tmp))
		}
	}
	unblock()
	equal(t, d.read(s, a, size), model, "after work in order")
	for i, r := range readings {
		equal(t, r.got, r.want, fmt.Sprintf("read %d of %d among the work", i, len(readings)))
	}
	d.outstanding(s, d.Charge(size))
}

// testNoOrderAcrossStreams checks that a blocked stream does not block another.
func testNoOrderAcrossStreams(t *testing.T, open openFunc) {
	d := openDevice(t, open, nil)
	s, other := d.stream(), d.stream()
	a := d.alloc(s, 100)
	d.write(s, a, pattern(100, 1))
	unblock := d.block(s)
	d.ok(d.Fill(s, a, 9, 100))
	e := d.record(s)
	d.works(other)
	equal(t, d.read(other, a, 100), pattern(100, 1), "while the stream that overwrites it is blocked")
	if isDone(e) {
		t.Error("an event is done before the work that it was recorded after")
	}
	if err := e.Err(); err != nil {
		t.Errorf("an event that is not done has the error %v", err)
	}
	unblock()
	d.wait(s)
	if !isDone(e) || e.Err() != nil {
		t.Errorf("after the stream's work: event done %v, error %v", isDone(e), e.Err())
	}
	equal(t, d.read(other, a, 100), framed(nil, 0, 100, 9), "after the stream was unblocked")
}

// testEvents passes a piece of memory from stream to stream. Only events order the work on it.
func testEvents(t *testing.T, open openFunc) {
	d := openDevice(t, open, nil)
	const size, rounds = 128 << 10, 60
	streams := []tier.Stream{d.stream(), d.stream(), d.stream(), d.stream()}
	a := d.alloc(streams[0], size)
	out := make([][]byte, rounds)
	e := d.record(streams[0])
	for i := range out {
		s := streams[i%len(streams)]
		d.ok(d.WaitEvent(s, e))
		d.ok(d.Fill(s, a, byte(i), size))
		out[i] = make([]byte, size)
		d.ok(d.CopyToHost(s, out[i], a))
		e = d.record(s)
	}
	d.ok(tier.Wait(context.Background(), e))
	for i, b := range out {
		equal(t, b, framed(nil, 0, size, byte(i)), fmt.Sprintf("round %d", i))
	}
	if unblock, blocked := d.tryBlock(streams[0]); blocked { // otherwise only chance reveals a missing wait
		d.ok(d.WaitEvent(streams[1], d.record(streams[0])))
		e := d.record(streams[1])
		for range 40 { // time enough for the others, also on one processor
			d.works(streams[2])
		}
		if isDone(e) {
			t.Error("a stream does not wait for another's event")
		}
		unblock()
	}
	for _, s := range streams {
		d.ok(s.Close())
	}
}

// testNeverBlocks submits many pieces of work to a blocked stream.
func testNeverBlocks(t *testing.T, open openFunc) {
	d := openDevice(t, open, nil)
	s := d.stream()
	const n = 400 // of two copies each: fewer pieces of work than drivers queue
	a := d.alloc(s, n)
	unblock := d.block(s)
	in, out := pattern(n, 1), make([]byte, n)
	var events []tier.Event
	for i := range n {
		d.ok(d.CopyToDevice(s, a+tier.Addr(i), in[i:i+1]))
		d.ok(d.CopyToHost(s, out[i:i+1], a+tier.Addr(i)))
		if i%100 == 0 {
			events = append(events, d.record(s))
		}
	}
	d.ok(d.Free(s, a))
	for i, e := range events {
		if isDone(e) {
			t.Fatalf("event %d is done before the work", i)
		}
	}
	unblock()
	d.outstanding(s, 0)
	equal(t, out, in, "after all of the work")
	for i, e := range events {
		if !isDone(e) {
			t.Fatalf("event %d is not done after all work is", i)
		}
	}
}

const bulkSize = 1 << 20

// checkWaits checks that end, which is Sync or a Close, returns only after the work on s is done.
// The work uses bulkSize bytes at a. checkWaits returns an event of it.
func (d *device) checkWaits(s tier.Stream, a tier.Addr, name string, end func() error) tier.Event {
	d.t.Helper()
	want, got := pattern(bulkSize, 1), make([]byte, bulkSize)
	d.ok(d.CopyToDevice(s, a, want))
	d.ok(d.CopyToHost(s, got, a))
	e := d.record(s)
	d.ok(end())
	if !isDone(e) || e.Err() != nil {
		d.t.Errorf("after %s: the event is done: %v, error: %v", name, isDone(e), e.Err())
	}
	equal(d.t, got, want, "after "+name+", which waits")
	return e
}

func testStreamClose(t *testing.T, open openFunc) {
	d := openDevice(t, open, nil)
	s, other := d.stream(), d.stream()
	a := d.alloc(s, bulkSize)
	d.ok(s.Sync()) // without work
	d.checkWaits(s, a, "Stream.Sync", s.Sync)
	e := d.checkWaits(s, a, "Stream.Close", s.Close)
	mustFail(t, tier.ErrClosed, map[string]error{
		"Close":        s.Close(),
		"CopyToDevice": d.CopyToDevice(s, a, []byte{1}),
		"Free":         d.Free(s, a),
		"Record":       second(d.Record(s)),
		"WaitEvent":    d.WaitEvent(s, e),
	})
	equal(t, d.read(other, a, bulkSize), pattern(bulkSize, 1), "on another stream after the first was closed")
	d.ok(d.Free(other, a))
	d.outstanding(other, 0)
}

func testClose(t *testing.T, open openFunc) {
	d := openDevice(t, open, nil)
	s := d.stream()
	a := d.alloc(s, bulkSize)
	e := d.checkWaits(s, a, "Close", d.Close)
	mustFail(t, tier.ErrClosed, map[string]error{
		"Close":        d.Close(),
		"NewStream":    second(d.NewStream()),
		"Alloc":        second(d.Alloc(s, 1)),
		"Free":         d.Free(s, a),
		"CopyToDevice": d.CopyToDevice(s, a, []byte{1}),
		"CopyToHost":   d.CopyToHost(s, make([]byte, 1), a),
		"CopyRegions":  copyOnDevice(d, s, a, a+8, 8),
		"Fill":         d.Fill(s, a, 1, 1),
		"Record":       second(d.Record(s)),
		"WaitEvent":    d.WaitEvent(s, e),
	})
}

// testConcurrent uses the device from several goroutines, each with a stream of its own.
func testConcurrent(t *testing.T, open openFunc) {
	d := openDevice(t, open, nil)
	var wg sync.WaitGroup
	for g := range uint64(4) {
		s := d.stream()
		wg.Go(func() {
			r := rand.New(rand.NewPCG(g, 1))
			for i := range uint64(20) {
				size := 1 + r.Int64N(memory/6)
				a, err := d.Alloc(s, size)
				if errors.Is(err, tier.ErrNoSpace) {
					continue
				}
				if err == nil {
					err = roundTrip(d, s, a, size, g<<16|i)
				}
				if err != nil {
					t.Errorf("goroutine %d, round %d: %v", g, i, err)
					return
				}
			}
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	d.outstanding(d.stream(), 0)
}
