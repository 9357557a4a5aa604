package monitor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/decide"
	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

const kib = 1 << 10

var (
	gpu0  = tier.ID{Kind: tier.GPU}
	host0 = tier.ID{Kind: tier.Host}
	disk0 = tier.ID{Kind: tier.Disk}
	disk1 = tier.ID{Kind: tier.Disk, Ordinal: 1}
)

// phantom is memory that has a size and no bytes: the monitor never looks at any.
type phantom int64

func (p phantom) Size() int64 { return int64(p) }

// phantomPool hands out phantoms; what is freed is reclaimed after lag. It may be lost.
type phantomPool struct {
	together int64
	devpool.Loss
	lag    time.Duration
	freed  sync.WaitGroup
	refuse atomic.Int64 // if above 0, larger allocations find no room
	unsure atomic.Int64 // retired bytes that stay retired
}

func (p *phantomPool) Charge(n int64) int64 { return (n + kib - 1) / kib * kib }

func (p *phantomPool) Alloc(n int64, _ []int64) (tier.Memory, error) {
	if r := p.refuse.Load(); r > 0 && n > r {
		return nil, &tier.NoSpaceError{Requested: n, Largest: r}
	}
	return phantom(n), nil
}

func (p *phantomPool) Free(_ tier.Memory, reclaimed func()) {
	if p.lag == 0 {
		reclaimed()
		return
	}
	p.freed.Add(1)
	time.AfterFunc(p.lag, func() { defer p.freed.Done(); reclaimed() })
}

// Unsure is how a pool reports retired bytes that do not become free.
func (p *phantomPool) Unsure() int64 { return p.unsure.Load() }

// Together returns what the test has set: how many bytes of small batches are best moved at once.
func (p *phantomPool) Together() int64                          { return p.together }
func (p *phantomPool) Split(tier.Memory, []int64) []tier.Memory { return nil }

func (p *phantomPool) Close() error { p.freed.Wait(); return nil }

// world is an engine in small: spaces of phantoms, a reservation manager, a mover
// whose moves take virtual time, and a monitor. Build it inside a bubble.
type world struct {
	t      testing.TB
	spaces map[tier.ID]*tier.Space
	pools  map[tier.ID]*phantomPool
	res    *reservation.Manager
	mon    *Monitor
	ids    batch.IDs
	mover  *slowMover
	stop   func()

	mu     sync.Mutex
	begun  []Move
	ended  []Move
	failed []error
	stuck  []events.Event
	press  []events.Event
	gone   []string // of refused waiters
	stall  time.Duration

	now  map[[2]tier.ID]int // moves under way on an edge
	most map[[2]tier.ID]int
}

// fewer is a number of rounds, less in a build that checks every lock.
func fewer(n int) int {
	if invariants.Enabled {
		return n / 4
	}
	return n
}

type sizes map[tier.ID]int64

// Move is a move that a slowMover was asked for.
type Move struct {
	Batch    batch.ID
	From, To tier.ID
	Bytes    int64 // charged in From
	Reason   string
}

// slowMover does what convert.Mover does, without bytes. It records all moves.
type slowMover struct {
	w      *world
	bytesA time.Duration                                // time for a KiB
	fault  func(b *batch.Batch, from, to tier.ID) error // see heal
}

// heal ends the fault while the monitor runs.
func (m *slowMover) heal() {
	m.w.mu.Lock()
	defer m.w.mu.Unlock()
	m.fault = nil
}

func (m *slowMover) Evict(ctx context.Context, all []*batch.Batch, to tier.ID, reason string) []error {
	return []error{m.Relieve(ctx, all[0], to, reason)}
}

func (m *slowMover) Relieve(ctx context.Context, b *batch.Batch, to tier.ID, reason string) error {
	now, w := b.Info(), m.w
	move := Move{Batch: b.ID(), From: now.Space, To: to, Bytes: now.Bytes, Reason: reason}
	edge := [2]tier.ID{move.From, move.To}
	w.mu.Lock()
	w.begun = append(w.begun, move)
	w.now[edge]++
	w.most[edge] = max(w.most[edge], w.now[edge])
	w.mu.Unlock()
	err := m.evict(ctx, b, to, reason)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.now[edge]--
	if err != nil {
		w.failed = append(w.failed, err)
	} else {
		w.ended = append(w.ended, move)
	}
	return err
}

func (m *slowMover) evict(ctx context.Context, b *batch.Batch, to tier.ID, reason string) (err error) {
	if reason != decide.Trigger && reason != decide.Demand {
		return fmt.Errorf("the reason %q is unknown", reason)
	}
	info := b.Info()
	r, err := m.w.res.TryReserve(specific(to), info.Bytes, &reservation.Options{Moving: true})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Release()) }()
	t, err := b.TryTransit()
	if err != nil {
		return err
	}
	defer t.Abort()
	if d := m.bytesA * time.Duration(info.Bytes/kib); d > 0 {
		select {
		case <-time.After(d):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	m.w.mu.Lock()
	fault := m.fault
	m.w.mu.Unlock()
	if fault != nil {
		if err := fault(b, info.Space, r.Space().ID()); err != nil {
			return err
		}
	}
	buf, err := r.Alloc(info.Bytes)
	if err != nil {
		return err
	}
	return t.Commit(batch.NewImage(b.Info().Descriptor, buf, r.Space()), false)
}

// failures is how many moves have failed so far.
func (w *world) failures() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.failed)
}

// newWorld makes spaces with limit 1, trigger 0.8, stop 0.6. No request leaves headroom free.
func newWorld(t testing.TB, s sizes, change func(*Config, *world)) *world {
	t.Helper()
	w := worldOf(t, s)
	w.build(nil, change)
	return w
}

// newWorldWithHeadroom is newWorld, where requests leave the monitor's headroom free.
func newWorldWithHeadroom(t testing.TB, s sizes, change func(*Config, *world)) *world {
	t.Helper()
	w := worldOf(t, s)
	w.build(w.headroom, change)
	return w
}

func (w *world) headroom(id tier.ID, need int64) int64 {
	n, spare := w.mon.Headroom(id)
	return max(0, min(n, spare-need))
}

// entryLocked returns the entry of b, nil if it has none.
func (m *Monitor) entryLocked(b *batch.Batch) *entry {
	if e := m.mu.entries[b.ID()]; e != nil && e.b == b {
		return e
	}
	return nil
}

// noted notes the end of a move that returned err.
func (m *Monitor) noted(v Victim, from, to *space, err error) (kind outcome, retry bool) {
	kind = kindOf(err, to.ID())
	return kind, m.noteMove(v, from, to, kind, err)
}

// worldOf makes the spaces of a world.
func worldOf(t testing.TB, s sizes) *world {
	t.Helper()
	w := &world{
		t: t, spaces: make(map[tier.ID]*tier.Space), pools: make(map[tier.ID]*phantomPool),
		now: make(map[[2]tier.ID]int), most: make(map[[2]tier.ID]int), stall: reservation.StallTimeout,
	}
	for id, n := range s {
		w.pools[id] = &phantomPool{}
		sp, err := tier.NewSpace(tier.SpaceConfig{
			ID: id, Capacity: n, Node: -1, Backend: "phantom", Pool: w.pools[id],
			Marks: tier.Marks{Limit: 1, Trigger: 0.8, Stop: 0.6},
		})
		if err != nil {
			t.Fatal(err)
		}
		w.spaces[id] = sp
	}
	return w
}

// build makes the manager and the monitor of w's spaces.
func (w *world) build(headroom func(tier.ID, int64) int64, change func(*Config, *world)) {
	w.t.Helper()
	w.mover = &slowMover{w: w, bytesA: time.Microsecond}
	cfg := Config{Mover: w.mover, Events: w.note}
	if change != nil {
		change(&cfg, w)
	}
	var err error
	if w.res, err = reservation.NewManager(reservation.Config{
		Spaces: slices.Collect(maps.Values(w.spaces)), Headroom: headroom,
		Evict: func(ctx context.Context, id tier.ID, bytes int64) reservation.Eviction {
			return w.mon.Evict(ctx, id, bytes)
		},
		StallTimeout: w.stall,
		Events: func(e events.Event) {
			if e.Kind == events.Refused {
				w.mu.Lock()
				w.gone = append(w.gone, e.Text)
				w.mu.Unlock()
			}
		},
		Logger: slog.New(slog.DiscardHandler),
	}); err != nil {
		w.t.Fatal(err)
	}
	cfg.Reservations = w.res
	if w.mon, err = New(cfg); err != nil {
		w.t.Fatal(err)
	}
}

// note records the events of the monitor.
func (w *world) note(e events.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch e.Kind {
	case events.PressureRose, events.PressureFell:
		w.press = append(w.press, e)
	case events.Stuck:
		w.stuck = append(w.stuck, e)
	}
}

// count returns a function for Config.Events that counts events of a kind.
func count(kind events.Kind) (f func(events.Event), n *atomic.Int64) {
	n = new(atomic.Int64)
	return func(e events.Event) {
		if e.Kind == kind {
			n.Add(1)
		}
	}, n
}

// start runs the monitor; end stops it and closes everything.
func (w *world) start() {
	ctx, cancel := context.WithCancelCause(context.Background())
	over := errors.New("the test is over")
	done := make(chan error, 1)
	go func() { done <- w.mon.Run(ctx) }()
	w.stop = func() {
		cancel(over)
		if err := <-done; err != over {
			w.t.Errorf("Run returned %v, want the cause of its context's end", err)
		}
	}
}

func (w *world) end(batches ...*batch.Batch) {
	w.t.Helper()
	if w.stop != nil {
		w.stop()
	}
	for _, b := range batches {
		if err := b.Drop(); err != nil {
			w.t.Error(err)
		}
	}
	if err := w.res.Close(); err != nil {
		w.t.Error(err)
	}
	for id, s := range w.spaces {
		if err := s.Close(); err != nil {
			w.t.Error(err)
		}
		if u := s.State().Usage; u.Used() != 0 {
			w.t.Errorf("%s has %+v in the end", id, u)
		}
	}
	for _, s := range w.mon.spaces {
		if sum := w.mon.sums(s); sum.count != 0 || sum.bytes != 0 || sum.rest != 0 || s.victims.Len() != 0 {
			w.t.Errorf("the index still has %+v of %s", sum, s.ID())
		}
	}
	for e, n := range w.most {
		if n > w.mon.cfg.MovesPerEdge {
			w.t.Errorf("%d moves at once from %s to %s", n, e[0], e[1])
		}
	}
}

// put makes a batch of n bytes in a space, which must have room.
func (w *world) put(id tier.ID, n int64, place batch.Place) *batch.Batch {
	w.t.Helper()
	r, err := w.res.TryReserve(reservation.Specific(id), n, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	return w.fill(r, place)
}

// use opens and closes a batch where it is.
func (w *world) use(b *batch.Batch) {
	w.t.Helper()
	h, err := b.Open(w.t.Context(), b.Info().Space, false)
	if err == nil {
		err = h.Close()
	}
	if err != nil {
		w.t.Error(err)
	}
}

// fill makes a batch out of all that r promises, and releases r.
func (w *world) fill(r *reservation.Reservation, place batch.Place) *batch.Batch {
	w.t.Helper()
	n := r.Bytes()
	buf, err := r.Alloc(n)
	if err != nil {
		w.t.Fatal(err)
	}
	d := &batch.Descriptor{Rows: 1, Body: n}
	b, err := batch.New(batch.Options{
		ID: w.ids.Next(), Payload: batch.NewImage(d, buf, r.Space()), Observer: w.mon, Place: place,
	})
	if err != nil {
		w.t.Fatal(err)
	}
	if err := r.Release(); err != nil {
		w.t.Fatal(err)
	}
	return b
}

func (w *world) moved() (n int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range w.ended {
		n += m.Bytes
	}
	return n
}

// mustBeRelieved fails the test if a space's pressure is not between the stop mark and the trigger.
func (w *world) mustBeRelieved(id tier.ID) {
	w.t.Helper()
	s := w.spaces[id]
	if p := s.State().Pressure; p < s.State().Stop || p >= s.State().Trigger {
		w.t.Errorf("the pressure of %s is %d: want it from %d to below %d", id, p, s.State().Stop, s.State().Trigger)
	}
}

func seq(i int) batch.Place { return batch.Place{Plan: 1, Seq: uint64(i)} }

func specific(id tier.ID) reservation.Strategy { return reservation.Specific(id) }

// imageOf returns the image that b has.
func imageOf(t testing.TB, b *batch.Batch) *batch.Image {
	t.Helper()
	tr, err := b.TryTransit()
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Abort()
	return tr.Payload().(*batch.Image)
}
