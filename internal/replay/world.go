package replay

import (
	"cmp"
	"container/heap"
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/trace"
	"github.com/spillway-db/spillway/internal/transfer"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// world is an engine without memory, and the clock.
type world struct {
	program *program
	costs   map[Edge]*costs
	result  Result
	first   time.Duration // when the first call began
	ended   time.Duration // when the last ended
	begun   bool

	now    time.Duration
	coming events
	actors []*actor
	going  int      // streams that have not ended
	at     *actor   // that runs
	idle   []*actor // those that wait for something, in the order in which they began to

	spaces  []*tier.Space
	res     *reservation.Manager
	mon     *monitor.Monitor
	own     []reservation.Reservation
	paths   map[tier.ID]*path
	things  map[batch.ID]*thing
	opened  []time.Duration // when each epoch began, of those that have
	left    []int           // ops of each epoch that have not ended
	waiters []*waiter       // for room
	look    time.Duration   // when the monitor looks that was woken; 0 if it was not
	chosen  []*actor        // moves that it has chosen
	vain    int             // how often it has looked since something happened
	never   error           // what no replay of this setting can do

	scratch, mostScratch int64 // of host memory, that transfers have
}

// event is something that happens at a time; those of one time in the order in which they were
// made.
type event struct {
	at   time.Duration
	made int
	do   func()
}

type events struct {
	list []event
	made int
}

func (e *events) Len() int { return len(e.list) }
func (e *events) Less(i, j int) bool {
	return cmp.Or(cmp.Compare(e.list[i].at, e.list[j].at), cmp.Compare(e.list[i].made, e.list[j].made)) < 0
}
func (e *events) Swap(i, j int) { e.list[i], e.list[j] = e.list[j], e.list[i] }
func (e *events) Push(x any)    { e.list = append(e.list, x.(event)) }
func (e *events) Pop() any {
	last := e.list[len(e.list)-1]
	e.list = e.list[:len(e.list)-1]
	return last
}

// after has something happen some time from now.
func (w *world) after(d time.Duration, do func()) {
	w.coming.made++
	heap.Push(&w.coming, event{w.now + d, w.coming.made, do})
}

// actor is a coroutine: it runs until it pauses.
type actor struct {
	w     *world
	next  func() (struct{}, bool)
	stop  func()
	yield func(struct{}) bool
	ready func() bool // what it waits for
}

// errStopped unwinds an actor.
var errStopped = errors.New("the replay has ended")

// begin makes an actor, which the caller resumes.
func (w *world) begin(body func(*actor)) *actor {
	a := &actor{w: w}
	a.next, a.stop = iter.Pull(func(yield func(struct{}) bool) {
		defer func() {
			if p := recover(); p != nil && p != errStopped {
				panic(p)
			}
		}()
		a.yield = yield
		body(a)
	})
	w.actors = append(w.actors, a)
	return a
}

func (w *world) resume(a *actor) {
	before := w.at
	w.at = a
	a.next()
	w.at = before
}

func (a *actor) pause() {
	if !a.yield(struct{}{}) {
		panic(errStopped)
	}
}

func (a *actor) sleep(d time.Duration) {
	if d > 0 {
		a.w.after(d, func() { a.w.resume(a) })
		a.pause()
	}
}

// until waits for a condition. Actors that wait are asked in the order in which they began to.
func (a *actor) until(ready func() bool) {
	a.ready = ready
	a.w.idle = append(a.w.idle, a)
	a.pause()
}

// serve lets those go on that have what they wait for.
func (w *world) serve() {
	for i := 0; i < len(w.idle); i++ {
		if a := w.idle[i]; a.ready() {
			w.idle = slices.Delete(w.idle, i, i+1)
			w.resume(a)
			i = -1
			for _, o := range w.waiters {
				o.tried = false
			}
		}
	}
	for _, o := range w.waiters {
		o.tried = false
	}
}

// phantom is memory that has a size and no bytes.
type phantom int64

func (p phantom) Size() int64 { return int64(p) }

// phantoms is a pool that has whatever its space promises.
type phantoms struct{}

func (phantoms) Charge(n int64) int64                          { return n }
func (phantoms) Alloc(n int64, _ []int64) (tier.Memory, error) { return phantom(n), nil }
func (phantoms) Free(_ tier.Memory, reclaimed func())          { reclaimed() }
func (phantoms) Close() error                                  { return nil }

func newWorld(t *trace.Trace, s Setting) (*world, error) {
	p := programOf(t)
	w := &world{
		program: p, costs: costsOf(t), paths: make(map[tier.ID]*path), things: make(map[batch.ID]*thing), left: slices.Clone(p.epochs),
	}
	if err := s.fits(t); err != nil {
		return nil, err
	}
	for e, speed := range s.Speed {
		w.costs[e] = new(costs)
		w.costs[e].add(1, 1/speed)
	}
	held := make(map[tier.ID]int64)
	for _, of := range t.Spaces {
		share := func(n int64) float64 { return min(1, (float64(n)+0.5)/float64(of.Capacity)) }
		sp, err := tier.NewSpace(tier.SpaceConfig{
			ID: of.ID, Capacity: cmp.Or(s.Capacity[of.ID.Kind], of.Capacity), Node: of.Node, Backend: "replay", Pool: phantoms{},
			Fractions: tier.Fractions{Limit: share(of.Limit), Trigger: share(of.Trigger), Stop: share(of.Stop)},
		})
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrSetting, err)
		}
		if of.Held > sp.Limit() {
			return nil, fmt.Errorf("%w: %s of %d bytes has no room for the engine's own %d", ErrSetting, of.ID, sp.Capacity(), of.Held)
		}
		w.spaces = append(w.spaces, sp)
		held[of.ID] = of.Held
	}
	for _, s := range w.spaces {
		if s.Kind() == tier.Host {
			w.mostScratch += s.Limit() / transfer.ScratchShare
		}
	}
	var err error
	w.res, err = reservation.NewManager(reservation.Config{Spaces: w.spaces, Headroom: func(id tier.ID, need int64) int64 { return w.mon.Inside().Headroom(id, need) }})
	if err != nil {
		return nil, err
	}
	w.mon, err = monitor.New(monitor.Config{
		Reservations: w.res, Mover: w, Policy: s.Policy, Period: t.Period, MovesPerEdge: t.MovesPerEdge, StuckAfter: -1,
		Base: func(id tier.ID) int64 { return held[id] }, Clock: w.clock,
		Speed: func(from, to tier.ID) int64 { return w.costs[Edge{from, to}].speed() },
	})
	if err != nil {
		return nil, err
	}
	w.mon.Inside().Drive(func() time.Time { return time.Unix(0, int64(w.now)) }, func(f func()) {
		a := w.begin(func(*actor) { f() })
		w.chosen = append(w.chosen, a)
	}, w)
	for id, n := range held {
		r, err := w.res.TryReserve(reservation.Specific(id), n)
		if err != nil {
			return nil, err
		}
		w.own = append(w.own, r)
	}
	return w, nil
}

// clock is that of the batches. 0 would be no time.
func (w *world) clock() int64 { return int64(w.now) + 1 }

// patience is how often the monitor may look in vain before time jumps to what comes next; if nothing
// does, the replay is stuck. It tries moves that found no room again after up to 64 periods.
const patience = 1000

// run lets time pass until all streams have ended.
func (w *world) run(ctx context.Context) error {
	w.openEpochs()
	for _, ops := range w.program.streams {
		w.going++
		w.resume(w.begin(func(a *actor) {
			for i, o := range ops {
				a.do(o, i)
			}
			w.going--
		}))
	}
	for {
		w.serve()
		if w.going == 0 || w.never != nil {
			return w.never
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if w.look == 0 && w.mon.Inside().Woken() {
			w.look = w.now + w.program.looked.next()
		}
		look := max(w.now, time.Duration(w.mon.Inside().Due().UnixNano()))
		if w.look > 0 {
			look = min(look, w.look)
		}
		if len(w.coming.list) > 0 && (w.coming.list[0].at <= look || w.vain >= patience) {
			e := heap.Pop(&w.coming).(event)
			w.now, w.vain = e.at, 0
			e.do()
			continue
		}
		if w.vain++; w.vain > patience {
			return w.stuck()
		}
		w.now, w.look = look, 0
		w.mon.Inside().Look(ctx)
		for i, a := range slices.Backward(w.chosen) { // Go runs what was begun last first
			vain := w.vain
			w.after(w.program.late[len(w.chosen)-1-i].next(), func() {
				w.vain = vain // until it has moved something
				w.resume(a)
			})
		}
		w.chosen = w.chosen[:0]
	}
}

// stuck says what is waited for.
func (w *world) stuck() error {
	if len(w.waiters) == 0 {
		return fmt.Errorf("%w: %d goroutines wait for each other (the trace is incomplete)", ErrStuck, w.going)
	}
	o := w.waiters[0]
	return fmt.Errorf("%w after %v: %d calls wait for room, the first for %d bytes in %s", ErrStuck, w.now, len(w.waiters), o.thing.in(o.to[0].ID()), o.to[0].ID())
}

// close gives everything up.
func (w *world) close() error {
	for _, a := range w.actors {
		a.stop()
	}
	var errs []error
	for _, t := range w.things {
		for _, h := range t.handles {
			errs = append(errs, h.Close())
		}
		if t.b.Info().State != batch.Released {
			errs = append(errs, t.b.Drop())
		}
	}
	for _, r := range w.own {
		errs = append(errs, r.Release())
	}
	errs = append(errs, w.res.Close())
	for _, s := range w.spaces {
		if n := s.Used() + s.Inside().Cached(); n > 0 {
			errs = append(errs, fmt.Errorf("%d bytes of %s are in use in the end", n, s.ID()))
		}
		errs = append(errs, s.Close())
	}
	return errors.Join(errs...)
}

// openEpochs begins the epochs whose turn it is.
func (w *world) openEpochs() {
	for len(w.opened) == 0 || len(w.opened) < len(w.left) && w.left[len(w.opened)-1] == 0 {
		w.opened = append(w.opened, w.now)
	}
}

// Demand implements monitor's view of what waits.
func (w *world) Demand(dst []reservation.Demand) []reservation.Demand {
	for _, s := range w.spaces {
		d := reservation.Demand{Space: s.ID()}
		for _, o := range w.waiters {
			for _, c := range o.wants() {
				if c.Space == d.Space {
					d.Waiters++
					d.Bytes += c.Bytes + c.Headroom
				}
			}
		}
		if d.Waiters > 0 {
			dst = append(dst, d)
		}
	}
	return dst
}

// Waiting is Demand, with choices apart, as reservation.Manager has it.
func (w *world) Waiting(dst []reservation.Demand, any []reservation.Choice) ([]reservation.Demand, []reservation.Choice) {
	for _, o := range w.waiters {
		c := o.wants()
		if len(c) > 1 {
			any = append(any, c)
			continue
		}
		i := slices.IndexFunc(dst, func(d reservation.Demand) bool { return d.Space == c[0].Space })
		if i < 0 {
			dst = append(dst, c[0])
			continue
		}
		dst[i].Waiters++
		dst[i].Bytes += c[0].Bytes
		dst[i].Headroom = max(dst[i].Headroom, c[0].Headroom)
	}
	return dst, any
}
