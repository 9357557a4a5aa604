package sim_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/internal/sim"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/tiertest"
)

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func stream(t testing.TB, d *sim.Device) tier.Stream {
	t.Helper()
	s, err := d.NewStream()
	ok(t, err)
	return s
}

func alloc(t testing.TB, d *sim.Device, s tier.Stream, size int64) tier.Addr {
	t.Helper()
	a, err := d.Alloc(s, size)
	ok(t, err)
	return a
}

// finish waits for the work on s and returns its error.
func finish(t testing.TB, d *sim.Device, s tier.Stream) error {
	t.Helper()
	e, err := d.Record(s)
	ok(t, err)
	return tier.Wait(context.Background(), e)
}

func TestConfigValidate(t *testing.T) {
	for _, c := range []struct {
		name string
		cfg  sim.Config
		want string // part of the error; "" for none
	}{
		{"least", sim.Config{Memory: 256}, ""},
		{"all", sim.Config{Memory: 1 << 20, Node: -1, BytesPerSecondToDevice: 1, BytesPerSecondFromDevice: 1, Latency: 1}, ""},
		{"no memory", sim.Config{}, "at least 256"},
		{"negative", sim.Config{Memory: -1 << 20}, "at least 256"},
		{"too much", sim.Config{Memory: math.MaxInt64}, "at most"},
		{"node", sim.Config{Memory: 256, Node: -2}, "NUMA node -2"},
		{"bandwidth to", sim.Config{Memory: 256, BytesPerSecondToDevice: -1}, "bandwidths"},
		{"bandwidth from", sim.Config{Memory: 256, BytesPerSecondFromDevice: -1}, "bandwidths"},
		{"latency", sim.Config{Memory: 256, Latency: -time.Second}, "latency"},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := c.cfg.Validate()
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Fatalf("Validate: %v; want %q", err, c.want)
			}
			d, err := sim.Open(c.cfg)
			if (err == nil) != (c.want == "") {
				t.Fatalf("New: %v; want %q", err, c.want)
			}
			if d != nil {
				ok(t, d.Close())
			}
		})
	}
}

func TestInfo(t *testing.T) {
	d := open(t, sim.Config{Memory: 1000})
	if got, want := d.Info(), (tier.DeviceInfo{Name: "simulated GPU", Backend: "sim"}); got != want {
		t.Errorf("Info is %+v, want %+v", got, want)
	}
	d = open(t, sim.Config{Memory: 1000, Name: "toy", Node: 3})
	if i := d.Info(); i.Name != "toy" || i.Node != 3 {
		t.Errorf("Info is %+v", i)
	}
	if free, total, _ := d.MemInfo(); free != 768 || total != 768 {
		t.Errorf("1000 bytes of memory, which is 3 granules: %d of %d free", free, total)
	}
}

func TestLargestChargeDoesNotOverflow(t *testing.T) {
	d := open(t, sim.Config{Memory: 1000})
	for _, size := range []int64{math.MaxInt64, math.MaxInt64 - 255, math.MaxInt64 - 256} {
		if c := d.Charge(size); c < math.MaxInt64-256 || c%256 != 0 {
			t.Errorf("Charge(%d) = %d", size, c)
		}
	}
	_, err := d.Alloc(stream(t, d), math.MaxInt64)
	if !errors.Is(err, tier.ErrNoSpace) {
		t.Errorf("allocating everything there is: %v", err)
	}
}

// TestModelledLink: transfers in one direction share its bandwidth, whatever
// stream they are on; latency passes beside them; the directions, and copies on
// the device, have nothing to do with each other.
func TestModelledLink(t *testing.T) {
	const n = 1 << 20
	cfg := sim.Config{Memory: 8 * n, BytesPerSecondToDevice: n, BytesPerSecondFromDevice: n / 4, Latency: 100 * time.Millisecond}
	type move func(d *sim.Device, s tier.Stream, a tier.Addr) error
	in := func(d *sim.Device, s tier.Stream, a tier.Addr) error { return d.CopyToDevice(s, a, make([]byte, n)) }
	out := func(d *sim.Device, s tier.Stream, a tier.Addr) error { return d.CopyToHost(s, make([]byte, n), a) }
	on := func(d *sim.Device, s tier.Stream, a tier.Addr) error {
		return d.CopyRegions(s, []tier.Region{{Dst: a + n, Src: a, Size: n}})
	}
	both := func(d *sim.Device, s tier.Stream, a tier.Addr) error {
		return d.CopyRegions(s, []tier.Region{{Dst: a, HostSrc: make([]byte, n)}, {HostDst: make([]byte, n/4), Src: a + n}})
	}
	for _, c := range []struct {
		name    string
		streams [][]move
		want    time.Duration
	}{
		{"in", [][]move{{in}}, 1100 * time.Millisecond},
		{"in twice", [][]move{{in, in}}, 2200 * time.Millisecond},
		{"in on two streams", [][]move{{in}, {in}}, 2100 * time.Millisecond},
		{"out", [][]move{{out}}, 4100 * time.Millisecond},
		{"in and out", [][]move{{in, in, in}, {out}}, 4100 * time.Millisecond},
		{"regions", [][]move{{both}}, 1100 * time.Millisecond},
		{"on the device", [][]move{{on, on}}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d, err := sim.Open(cfg)
				ok(t, err)
				start := time.Now()
				var events []tier.Event
				for _, moves := range c.streams {
					s := stream(t, d)
					a := alloc(t, d, s, 2*n)
					for _, m := range moves {
						ok(t, m(d, s, a))
					}
					e, err := d.Record(s)
					ok(t, err)
					events = append(events, e)
				}
				for _, e := range events {
					ok(t, tier.Wait(t.Context(), e))
				}
				if got := time.Since(start).Round(time.Microsecond); got != c.want {
					t.Errorf("took %v of modelled time, want %v", got, c.want)
				}
				ok(t, d.Close())
			})
		})
	}
}

// TestModelledLinkRests: what the link did not use while it was idle is lost.
func TestModelledLinkRests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 1 << 20
		d, err := sim.Open(sim.Config{Memory: n, BytesPerSecondToDevice: n})
		ok(t, err)
		s := stream(t, d)
		a := alloc(t, d, s, n)
		for range 3 {
			time.Sleep(10 * time.Second)
			start := time.Now()
			ok(t, d.CopyToDevice(s, a, make([]byte, n)))
			ok(t, finish(t, d, s))
			if got := time.Since(start); got != time.Second {
				t.Errorf("took %v of modelled time, want 1s", got)
			}
		}
		ok(t, d.Close())
	})
}

// hook records what the fault hook is asked.
type hook struct {
	mu   sync.Mutex
	asks []string
	fail func(sim.Op) error
}

func (h *hook) ask(op sim.Op) error {
	h.mu.Lock()
	stage := "submit"
	if op.Stage == sim.Run {
		stage = "run"
	}
	h.asks = append(h.asks, fmt.Sprintf("%d %s %s %d", op.Index, stage, op.Kind, op.Bytes))
	h.mu.Unlock()
	if h.fail != nil {
		return h.fail(op)
	}
	return nil
}

func TestFaultHookIsAsked(t *testing.T) {
	h := &hook{}
	d := open(t, sim.Config{Memory: 1 << 20}, h.ask)
	s := stream(t, d)
	a := alloc(t, d, s, 1000)
	if d.Fill(s, a, 1, 1001) == nil || d.Free(s, a+1) == nil {
		t.Error("a mistake passed")
	}
	// One piece of work at a time: the order of what two goroutines ask is not
	// fixed.
	for _, err := range []error{
		d.Fill(s, a, 1, 1000), s.Sync(),
		d.CopyToDevice(s, a, make([]byte, 10)), s.Sync(),
		d.CopyToHost(s, make([]byte, 20), a), s.Sync(),
		d.CopyRegions(s, []tier.Region{{Dst: a, Src: a + 500, Size: 30}}), s.Sync(),
		d.CopyPeer(s, a, d, a+500, 40), s.Sync(),
		d.CopyRegions(s, []tier.Region{{Dst: a, HostSrc: make([]byte, 2)}, {Dst: a + 10, Src: a, Size: 3}}), s.Sync(),
		d.CopyToDevice(s, a, nil), s.Sync(),
	} {
		ok(t, err)
	}
	ok(t, finish(t, d, s))
	e, err := d.Record(s)
	ok(t, err)
	ok(t, d.WaitEvent(s, e))
	ok(t, d.Free(s, a))
	want := []string{
		"0 submit new stream 0",
		"1 submit alloc 1000",
		"2 submit fill 1000", "2 run fill 1000",
		"3 submit copy to device 10", "3 run copy to device 10",
		"4 submit copy to host 20", "4 run copy to host 20",
		"5 submit copy regions 30", "5 run copy regions 30",
		"6 submit copy regions 40", "6 run copy regions 40", // to itself
		"7 submit copy regions 5", "7 run copy regions 5",
		"8 submit copy regions 0",
		"9 submit record 0",
		"10 submit record 0",
		"11 submit wait event 0",
		"12 submit free 1000",
	}
	if !slices.Equal(h.asks, want) {
		t.Errorf("the hook was asked\n%s\nwant\n%s", strings.Join(h.asks, "\n"), strings.Join(want, "\n"))
	}
}

// TestFaultHookMayBlock: a hook that blocks holds up the work, and nothing
// else.
func TestFaultHookMayBlock(t *testing.T) {
	let := make(chan struct{})
	h := &hook{fail: func(op sim.Op) error {
		if op.Kind == sim.OpFill && op.Stage == sim.Run {
			<-let
		}
		return nil
	}}
	d := open(t, sim.Config{Memory: 1 << 20}, h.ask)
	s, other := stream(t, d), stream(t, d)
	a := alloc(t, d, s, 1000)
	ok(t, d.Fill(s, a, 1, 1000))
	e, err := d.Record(s)
	ok(t, err)
	ok(t, d.CopyToDevice(other, alloc(t, d, other, 10), make([]byte, 10)))
	ok(t, finish(t, d, other))
	select {
	case <-e.Done():
		t.Error("work is done that the hook holds up")
	default:
	}
	close(let)
	ok(t, tier.Wait(t.Context(), e))
}

// TestUseAfterFreeOnAnotherStream: a free that does not wait for another
// stream's work is the program's mistake, and is found out when that work runs.
func TestUseAfterFreeOnAnotherStream(t *testing.T) {
	let := make(chan struct{})
	d := open(t, sim.Config{Memory: 1 << 20}, func(op sim.Op) error {
		if op.Kind == sim.OpFill && op.Stage == sim.Run {
			<-let
		}
		return nil
	})
	for name, use := range map[string]func(s tier.Stream, a tier.Addr) error{
		"copy": func(s tier.Stream, a tier.Addr) error { return d.CopyToHost(s, make([]byte, 10), a) },
		"regions": func(s tier.Stream, a tier.Addr) error {
			return d.CopyRegions(s, []tier.Region{{Dst: a, HostSrc: make([]byte, 10)}})
		},
	} {
		t.Run(name, func(t *testing.T) {
			let = make(chan struct{})
			s, other := stream(t, d), stream(t, d)
			keep, a := alloc(t, d, s, 100), alloc(t, d, s, 100)
			ok(t, d.Fill(s, keep, 0, 8)) // held up
			ok(t, use(s, a))
			ok(t, d.Free(other, a))
			close(let)
			if err := finish(t, d, s); err == nil || !strings.Contains(err.Error(), "freed") {
				t.Errorf("work on memory that was given back meanwhile: %v", err)
			}
			ok(t, finish(t, d, other))
		})
	}
}

// TestPeerCloses: copies to a device that closes are done before, or fail.
func TestPeerCloses(t *testing.T) {
	const n = 1 << 20
	d := open(t, sim.Config{Memory: n})
	s := stream(t, d)
	a := alloc(t, d, s, n)
	for range 20 {
		peer := open(t, sim.Config{Memory: n})
		ps := stream(t, peer)
		b := alloc(t, peer, ps, n)
		work := stream(t, d)
		for range 20 {
			ok(t, d.CopyPeer(work, b, peer, a, n))
		}
		ok(t, peer.Close())
		if err := finish(t, d, work); err != nil && !errors.Is(err, tier.ErrClosed) {
			t.Errorf("copies to a peer that closes: %v", err)
		}
		if err := d.CopyPeer(s, b, peer, a, n); !errors.Is(err, tier.ErrClosed) {
			t.Errorf("a copy to a closed peer: %v", err)
		}
		ok(t, work.Close())
	}
}

func TestEventsOfOthers(t *testing.T) {
	d := open(t, sim.Config{Memory: 1 << 20})
	s := stream(t, d)
	bad := errors.New("a failure elsewhere")
	ok(t, d.WaitEvent(s, foreignEvent{nil}))
	ok(t, finish(t, d, s))
	ok(t, d.WaitEvent(s, foreignEvent{bad}))
	if err := finish(t, d, s); !errors.Is(err, bad) {
		t.Errorf("after waiting for an event that failed: %v", err)
	}
}

type foreignEvent struct{ err error }

func (e foreignEvent) Done() <-chan struct{} { c := make(chan struct{}); close(c); return c }
func (e foreignEvent) Err() error            { return e.err }

// TestTouch: touching in the background leaves the contents alone and ends with
// Close, done or not.
func TestTouch(t *testing.T) {
	tiertest.NoLeaks(t)
	const n = 64 << 20
	d, err := sim.Open(sim.Config{Memory: n, Touch: true})
	ok(t, err)
	s := stream(t, d)
	a := alloc(t, d, s, n)
	in, out := make([]byte, 1<<16), make([]byte, 1<<16)
	for i := range in {
		in[i] = byte(i * 7)
	}
	for off := tier.Addr(0); off < n; off += n / 16 {
		ok(t, d.CopyToDevice(s, a+off, in))
	}
	for off := tier.Addr(0); off < n; off += n / 16 {
		ok(t, d.CopyToHost(s, out, a+off))
		ok(t, finish(t, d, s))
		if !slices.Equal(in, out) {
			t.Fatalf("at %d: other bytes came back", off)
		}
	}
	ok(t, d.Close())
	d, err = sim.Open(sim.Config{Memory: 1 << 30, Touch: true})
	ok(t, err)
	ok(t, d.Close())
}

// TestLent: lent memory is there when the device is closed, until the last has given it back.
func TestLent(t *testing.T) {
	d, err := sim.Open(sim.Config{Memory: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	a, err := d.Alloc(s, 100)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(d.Fill(s, a, 7, 100), s.Sync()); err != nil {
		t.Fatal(err)
	}
	where, err := d.Pointer(a, 100)
	if err != nil {
		t.Fatal(err)
	}
	one, err1 := d.Lend()
	other, err2 := d.Lend()
	if err := errors.Join(err1, err2, one(), one(), d.Close()); err != nil {
		t.Fatal(err)
	}
	if b := sim.ByteAt(where + 99); b != 7 {
		t.Errorf("the lent memory holds %d, want 7", b)
	}
	if err := other(); err != nil {
		t.Error(err)
	}
	if !d.Gone() {
		t.Error("the memory is there after the last has given it back")
	}
	if _, err := d.Lend(); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("lending by a closed device: %v", err)
	}
}
