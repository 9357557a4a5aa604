package test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// freePanics is a decorated device, whose Free panics once, when it is armed, or refuses.
type freePanics struct {
	tier.Device
	armed   *atomic.Bool
	refuses bool
}

func (d freePanics) Unwrap() tier.Device { return d.Device }
func (d freePanics) Free(s tier.Stream, a tier.Addr) error {
	if d.armed.CompareAndSwap(true, false) {
		if d.refuses {
			return errors.New("refused")
		}
		panic("in Free")
	}
	return d.Device.Free(s, a)
}

// freeBadly frees 400 KiB on the GPU, and what is armed goes wrong.
func freeBadly(t *testing.T, eng *spillway.Engine, armed *atomic.Bool) {
	t.Helper()
	r, err := eng.Reserve(t.Context(), reservation.AnyInTier(tier.GPU), 400<<10)
	if err != nil {
		t.Fatal(err)
	}
	buf, err := r.Alloc(400 << 10)
	if err := errors.Join(err, r.Release()); err != nil {
		t.Fatal(err)
	}
	armed.Store(true)
	if err := buf.Release(); err != nil {
		t.Error(err)
	}
}

// closeTellingOf is closeClean after a free of a GPU panicked: Close says so.
func closeTellingOf(t *testing.T, eng *spillway.Engine) {
	t.Helper()
	if err := eng.Close(); err == nil || !strings.Contains(err.Error(), "its free panicked") {
		t.Errorf("Close: %v", err)
	}
	for _, s := range eng.Stats().Spaces {
		if s.Used() != 0 {
			t.Errorf("%s ends with %+v", s.ID, s.Usage)
		}
	}
}

// TestRoomAfterFreePanicked: bytes of a buffer whose Free panicked stay in use, and nobody waits
// for them. For a waiter for more than is available batches move, and Close tells of the free.
func TestRoomAfterFreePanicked(t *testing.T) {
	var armed atomic.Bool
	eng, err := callbackEngine(t, func(c *spillway.Config) {
		c.GPUs[0].Wrap = func(d tier.Device) (tier.Device, error) { return freePanics{d, &armed, false}, nil }
		c.MonitorPeriod = time.Millisecond
		c.HostMemory = spillway.Bytes(16 << 20)
	})
	if err != nil {
		t.Fatal(err)
	}
	gpu := reservation.AnyInTier(tier.GPU)
	freeBadly(t, eng, &armed)
	repo := scanOf(t, eng)
	rec := arrowgen.Ints(1, 10_000, 1) // 80 KB
	defer rec.Release()
	for range 4 { // 320 KB beside 400 KB, of 1 MiB
		if err := repo.Put(t.Context(), 0, rec, repository.WithPlacement(gpu)); err != nil {
			t.Fatal(err)
		}
	}
	s := gpuOf(t, eng)
	if n := s.State().Unsure; n < 400<<10 {
		t.Errorf("%d bytes are not expected back", n)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	got, err := eng.Reserve(ctx, gpu, s.State().Available+100<<10) // two batches must leave for it
	if err != nil {
		t.Errorf("a waiter is not served, though batches could move down: %v", err)
	} else if err := got.Release(); err != nil {
		t.Error(err)
	}
	closeTellingOf(t, eng)
}

// TestRoomOfARefusedFree: a waiter for these very bytes is served, though nothing is allocated
// meanwhile.
func TestRoomOfARefusedFree(t *testing.T) { testRoomOfAFree(t, true) }

// TestRoomOfAFreeThatPanicked: who wants these very bytes is refused at once, and not left to wait.
func TestRoomOfAFreeThatPanicked(t *testing.T) { testRoomOfAFree(t, false) }

func testRoomOfAFree(t *testing.T, refused bool) {
	var armed atomic.Bool
	eng, err := callbackEngine(t, func(c *spillway.Config) {
		c.GPUs[0].Wrap = func(d tier.Device) (tier.Device, error) { return freePanics{d, &armed, refused}, nil }
	})
	if err != nil {
		t.Fatal(err)
	}
	gpu := reservation.AnyInTier(tier.GPU)
	freeBadly(t, eng, &armed)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	all, err := eng.Reserve(ctx, gpu, gpuOf(t, eng).State().Limit/tier.Page*tier.Page)
	if err == nil {
		err = all.Release()
	}
	if refused && err != nil || !refused && !errors.Is(err, reservation.ErrExceeded) {
		t.Error(err)
	}
	if refused {
		closeClean(t, eng)
	} else {
		closeTellingOf(t, eng)
	}
}

// errPanics is a decorated device that refuses one Free, when it is armed. Then Err of the stream
// panics once. The stream is the device's first, which the frees are on.
type errPanics struct {
	tier.Device
	armed, panics, made *atomic.Bool
}

func (d errPanics) Unwrap() tier.Device { return d.Device }

func (d errPanics) NewStream() (tier.Stream, error) {
	s, err := d.Device.NewStream()
	if err != nil || !d.made.CompareAndSwap(false, true) {
		return s, err
	}
	return errPanicsStream{s, d.panics}, nil
}

// bare returns the stream that the device under d knows.
func (d errPanics) bare(s tier.Stream) tier.Stream {
	if w, ok := s.(errPanicsStream); ok {
		return w.Stream
	}
	return s
}

func (d errPanics) Alloc(s tier.Stream, size int64) (tier.Addr, error) {
	return d.Device.Alloc(d.bare(s), size)
}

func (d errPanics) Record(s tier.Stream) (tier.Event, error) { return d.Device.Record(d.bare(s)) }

func (d errPanics) Free(s tier.Stream, a tier.Addr) error {
	if d.armed.CompareAndSwap(true, false) {
		d.panics.Store(true)
		return errors.New("refused")
	}
	return d.Device.Free(d.bare(s), a)
}

type errPanicsStream struct {
	tier.Stream
	panics *atomic.Bool
}

func (s errPanicsStream) Err() error {
	if s.panics.CompareAndSwap(true, false) {
		panic("in Err")
	}
	return s.Stream.Err()
}

// TestRoomOfARefusedFreeOnABadStream: a panic of a stream when the free is tried again is logged, and a
// waiter for these very bytes is served.
func TestRoomOfARefusedFreeOnABadStream(t *testing.T) {
	var armed, panics, made atomic.Bool
	log := new(syncBuffer)
	eng, err := callbackEngine(t, func(c *spillway.Config) {
		c.Logger = slog.New(slog.NewTextHandler(log, nil))
		c.GPUs[0].Wrap = func(d tier.Device) (tier.Device, error) { return errPanics{d, &armed, &panics, &made}, nil }
	})
	if err != nil {
		t.Fatal(err)
	}
	gpu := reservation.AnyInTier(tier.GPU)
	freeBadly(t, eng, &armed)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	all, err := eng.Reserve(ctx, gpu, gpuOf(t, eng).State().Limit/tier.Page*tier.Page)
	if err := errors.Join(err, all.Release()); err != nil {
		t.Error(err)
	}
	closeClean(t, eng)
	if !strings.Contains(log.String(), `panic="in Err"`) {
		t.Errorf("the log has %q", log)
	}
}

// TestWaiterForAFreeThatPanics: who waits for bytes whose free panics then is refused at once, as
// one that comes later is.
func TestWaiterForAFreeThatPanics(t *testing.T) {
	var armed atomic.Bool
	eng, err := callbackEngine(t, func(c *spillway.Config) {
		c.GPUs[0].Wrap = func(d tier.Device) (tier.Device, error) { return freePanics{d, &armed, false}, nil }
	})
	if err != nil {
		t.Fatal(err)
	}
	gpu := reservation.AnyInTier(tier.GPU)
	r, err := eng.Reserve(t.Context(), gpu, 400<<10)
	if err != nil {
		t.Fatal(err)
	}
	buf, err := r.Alloc(400 << 10)
	if err := errors.Join(err, r.Release()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	got := make(chan error, 1)
	limit := gpuOf(t, eng).State().Limit / tier.Page * tier.Page
	go func() {
		all, err := eng.Reserve(ctx, gpu, limit)
		if err == nil {
			err = all.Release()
		}
		got <- err
	}()
	awaitDemand(eng)
	armed.Store(true)
	if err := buf.Release(); err != nil {
		t.Error(err)
	}
	if err := <-got; !errors.Is(err, reservation.ErrExceeded) {
		t.Error(err)
	}
	closeTellingOf(t, eng)
}

// TestRoomAfterReleaseOfATablePanicked: the Release of an adopted table panics when it has given
// its memory back. The space's books are exact then, and a waiter for room that can be made is
// served.
func TestRoomAfterReleaseOfATablePanicked(t *testing.T) {
	log := new(syncBuffer)
	eng, err := callbackEngine(t, func(c *spillway.Config) {
		c.Logger = slog.New(slog.NewTextHandler(log, nil))
		c.MonitorPeriod = time.Millisecond
		c.HostMemory = spillway.Bytes(16 << 20)
	})
	if err != nil {
		t.Fatal(err)
	}
	s := gpuOf(t, eng)
	dev := s.Pool.(interface{ Device() tier.Device }).Device()
	stream, err := dev.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	const bytes = 400 << 10
	addr, err := dev.Alloc(stream, bytes)
	if err := errors.Join(err, stream.Sync()); err != nil {
		t.Fatal(err)
	}
	p, err := eng.Mover().AdoptTable(t.Context(), convert.DeviceTable{
		Space: s, Schema: arrow.NewSchema([]arrow.Field{{Name: "n", Type: arrow.PrimitiveTypes.Int64}}, nil), Rows: bytes / 8,
		Columns: []*convert.DeviceArray{{Length: bytes / 8, Buffers: []convert.DeviceRange{{}, {Addr: addr, Length: bytes}}}},
		Release: func() {
			if err := errors.Join(dev.Free(stream, addr), stream.Close()); err != nil {
				t.Error(err)
			}
			panic("in Release")
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Release(); err != nil {
		t.Error(err)
	}
	if u := s.State().Usage; u.Used() != 0 {
		t.Errorf("the table is gone, and the books say %+v", u)
	}
	if want := `function=DeviceTable.Release panic="in Release"`; !strings.Contains(log.String(), want) {
		t.Errorf("the log has %q, and not %q", log, want)
	}
	repo := scanOf(t, eng)
	rec := arrowgen.Ints(1, 10_000, 1) // 80 KB
	defer rec.Release()
	gpu := reservation.AnyInTier(tier.GPU)
	for range 4 {
		if err := repo.Put(t.Context(), 0, rec, repository.WithPlacement(gpu)); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	got, err := eng.Reserve(ctx, gpu, s.State().Available+100<<10) // two batches must leave for it
	if err != nil {
		t.Errorf("a waiter is not served, though batches could move down: %v", err)
	} else if err := got.Release(); err != nil {
		t.Error(err)
	}
	closeClean(t, eng)
}

// badLoans is a decorated device that lends its memory. Borrow number panics panics, and the end of
// each loan.
type badLoans struct {
	tier.Device
	panics      int
	begun, over int
}

func (d *badLoans) Unwrap() tier.Device { return d.Device }

func (d *badLoans) Borrow(tier.Addr, int64) (giveBack func(), err error) {
	if d.begun+1 == d.panics {
		panic("in Borrow")
	}
	d.begun++
	return func() { d.over++; panic("in giveBack") }, nil
}

// TestPanickingLoans: a Borrow that panics fails the adoption, and loans that panic at their end
// are over all the same. The space's books are exact.
func TestPanickingLoans(t *testing.T) {
	dev := new(badLoans)
	eng, err := callbackEngine(t, func(c *spillway.Config) {
		c.GPUs[0].Wrap = func(d tier.Device) (tier.Device, error) { dev.Device = d; return dev, nil }
	})
	if err != nil {
		t.Fatal(err)
	}
	const rows = 1000
	stream, err := dev.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	addr, err := dev.Alloc(stream, 2*rows*8)
	if err := errors.Join(err, stream.Sync()); err != nil {
		t.Fatal(err)
	}
	s, released := gpuOf(t, eng), 0
	column := func(at tier.Addr) *convert.DeviceArray {
		return &convert.DeviceArray{Length: rows, Buffers: []convert.DeviceRange{{}, {Addr: at, Length: rows * 8}}}
	}
	ints := arrow.Field{Type: arrow.PrimitiveTypes.Int64}
	table := convert.DeviceTable{
		Space: s, Schema: arrow.NewSchema([]arrow.Field{ints, ints}, nil), Rows: rows,
		Columns: []*convert.DeviceArray{column(addr), column(addr + rows*8)}, Release: func() { released++ },
	}
	dev.panics = 2
	if _, err := eng.Mover().AdoptTable(t.Context(), table); err == nil || !strings.Contains(err.Error(), "in Borrow") {
		t.Errorf("a table whose second part cannot be borrowed: %v", err)
	}
	if u := s.State().Usage; u.Used() != 0 || dev.begun != 1 || dev.over != 1 || released != 0 {
		t.Errorf("no table was adopted, and the books say %+v, of %d loans %d are over, %d tables were released", u, dev.begun, dev.over, released)
	}
	dev.panics = 0
	p, err := eng.Mover().AdoptTable(t.Context(), table)
	if err == nil {
		err = p.Release()
	}
	if err != nil {
		t.Fatal(err)
	}
	if u := s.State().Usage; u.Used() != 0 || dev.begun != 3 || dev.over != 3 || released != 1 {
		t.Errorf("the table is gone, and the books say %+v, of %d loans %d are over, %d tables were released", u, dev.begun, dev.over, released)
	}
	if err := errors.Join(dev.Free(stream, addr), stream.Close()); err != nil {
		t.Error(err)
	}
	closeClean(t, eng)
}
