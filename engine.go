package spillway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/host"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/internal/persist"
	"github.com/spillway-db/spillway/internal/transfer"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/reservation/arrowmem"
	"github.com/spillway-db/spillway/reservation/permit"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/topology"
)

// Engine keeps batches in the machine's memories. It is safe for concurrent
// use. It must be closed.
type Engine struct {
	cfg     Config
	topo    *topology.Topology
	machine machine

	spaces  []*tier.Space
	tasks   atomic.Uint64 // attempts of tasks that have events
	streams map[tier.ID]*devpool.Streams
	staging map[int]*host.Staging // by NUMA node
	driver  *driver               // nil: nothing has asked for it
	gpus    []*topology.GPU       // of the driver, by GPU space; nil: it has none
	devices []tier.Device         // the engine's own, to be closed
	bare    []tier.Device         // of the GPU spaces, as GPUConfig.Wrap returned them
	wrapped []tier.Device         // those under the budgets
	limits  limits

	// The warnings. Except for logged, they do not change once the engine is open.
	warnings []diag.Warning // of the machine
	warners  []warner
	logged   sync.Map // of true, by warning

	stripe volumes.Stripe // of all volumes

	reservations *reservation.Manager
	permits      *permit.Pool // closed with the engine unless it is Limits.PermitPool
	registry     convert.Registry
	mover        *convert.Mover
	monitor      *monitor.Monitor
	admitter     *admission.Admitter
	ids          batch.IDs
	builtin      *transfer.Builtin
	recorder     *persist.Recorder // of what comes to disks with DiskConfig.Persist
	found        *persist.Found    // what was recorded there before
	ahead        aheadOfTasks
	overflow     arrowmem.HeapCounter // of all Works

	panics guard.Log // of functions of the configuration, and of the batches' payloads and observers

	stop    context.CancelCauseFunc
	running sync.WaitGroup // the goroutines of Open

	calls guard.Gate // those that have memory in their hands, which Close must not take for a leak

	// mu is never held while anything else is called.
	mu     sync.Mutex
	plans  map[string]*Plan
	plan   uint64 // number of the last plan
	closed bool
}

// Open makes an engine of cfg: it opens the devices, arenas and volumes, and starts the monitor,
// which runs until Close. Open fills in the settings that cfg leaves to the machine, as Configure
// does for cfg.Topology, or for the machine that it finds if that is nil; but the GPUs are those of
// the driver. ctx bounds only the opening.
func Open(ctx context.Context, cfg Config) (_ *Engine, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	e := &Engine{
		cfg:     cfg,
		topo:    cfg.Topology,
		streams: make(map[tier.ID]*devpool.Streams),
		staging: make(map[int]*host.Staging),
		plans:   make(map[string]*Plan),
	}
	e.ahead = aheadOfTasks{e: e, poke: make(chan struct{}, 1)}
	e.cfg.Logger = guard.Logger(cfg.Logger) // it is called from everywhere
	e.panics.Logger = e.cfg.Logger
	if cfg.Events != nil { // all parts of the engine call it
		e.cfg.Events = func(ev Event) {
			if ev.At.IsZero() {
				ev.At = time.Now()
			}
			if ev.Context == nil {
				ev.Context = context.Background()
			}
			e.panics.Do("Config.Events", func() { cfg.Events(ev) })
		}
	}
	e.recorder, e.found = persist.NewRecorder(e.cfg.Logger), persist.NewFound()
	defer func() {
		if err != nil {
			err = errors.Join(err, e.found.Close(), e.release())
		}
	}()
	if e.topo == nil {
		if e.topo, err = topology.Discover(ctx, topology.Options{}); err != nil {
			return nil, err
		}
	}
	e.warnOfMachine()
	if err := e.openSpaces(ctx); err != nil {
		return nil, err
	}
	if e.reservations, err = reservation.NewManager(reservation.Config{
		Spaces:   e.spaces,
		Distance: e.topo.Distance,
		Paired:   e.paired,
		// No wait begins before there is a monitor.
		Evict: func(ctx context.Context, id tier.ID, bytes int64) reservation.Eviction {
			return e.monitor.Evict(ctx, id, bytes)
		},
		Headroom: func(id tier.ID, need int64) int64 {
			n, spare := e.monitor.Headroom(id)
			return max(0, min(n, spare-need))
		},
		StallTimeout: e.cfg.StallTimeout,
		Clear: func(id tier.ID, enough func() bool) {
			if e.monitor != nil { // there are no batches before
				e.monitor.Clear(context.Background(), id, enough)
			}
		},
		LongWait: e.warnOfWait,
		Holders:  e.Holders,
		Events:   e.cfg.Events,
		Logger:   e.cfg.Logger,
	}); err != nil {
		return nil, err
	}
	if err := e.openStaging(); err != nil {
		return nil, err
	}
	if e.permits = e.cfg.Limits.PermitPool; e.permits == nil {
		if e.permits, err = permit.New(e.cfg.Limits.Permits); err != nil {
			return nil, err
		}
	}
	e.builtin = &transfer.Builtin{
		Streams: func(id tier.ID) (*devpool.Streams, error) {
			if p := e.streams[id]; p != nil {
				return p, nil
			}
			return nil, fmt.Errorf("spillway: %s has no streams: %w", id, tier.ErrNotSupported)
		},
		Staging: e.stagingNear, Permits: e.permits, Codec: e.cfg.Codec,
	}
	if e.cfg.Events != nil {
		e.builtin.Choose.Chosen = func(disk tier.ID, k convert.Codec, cost float64) {
			text := fmt.Sprintf("%s, which should cost %.2f of what bytes cost as they are", k, cost)
			e.cfg.Events(Event{Kind: events.CodecChosen, To: disk, Text: text})
		}
	}
	e.mover, err = convert.NewMover(convert.MoverConfig{
		Reservations: e.reservations,
		Registry:     &e.registry,
		Builtin:      e.builtin,
		IDs:          &e.ids,
		Observer:     e.Observer(),
		Events:       e.cfg.Events,
		Persists:     e.recorder.Records,
		PersistAhead: e.cfg.WriteAhead > 0,
		Logger:       e.cfg.Logger,
	})
	if err != nil {
		return nil, err
	}
	e.monitor, err = monitor.New(monitor.Config{
		Reservations: e.reservations,
		Mover:        e.mover,
		Policy:       e.cfg.Policy,
		Period:       e.cfg.MonitorPeriod,
		MovesPerEdge: e.cfg.MovesPerEdge,
		Logger:       e.cfg.Logger,
		Events: func(ev Event) {
			if ev.Kind == events.Lost {
				e.logWarnings() // at once
			}
			if e.cfg.Events != nil {
				e.cfg.Events(ev)
			}
		},
		Speed:      e.mover.Speed,
		Changes:    e.registry.Changes,
		WriteAhead: e.mover.WriteAhead,
		AheadRate:  cmp.Or(e.cfg.WriteAhead, defaultWriteAhead),
	})
	if err != nil {
		return nil, err
	}
	if e.admitter, err = admission.New(
		admission.Config{Reservations: e.reservations, Rules: e.cfg.Limits.Admission, Logger: e.cfg.Logger},
	); err != nil {
		return nil, err
	}

	// Start the monitor, what watches GPUs and disks, and what prefetches for tasks, each by itself: a
	// driver or a file system that does not answer must not keep the others waiting.
	watch, stop := context.WithCancelCause(context.Background())
	e.stop = stop
	if len(e.cfg.GPUs) > 0 {
		e.running.Go(func() {
			labels.WatchGPUs.Set()
			every(watch, e.lookAtGPUs)
		})
	}
	if e.cfg.Events != nil {
		e.running.Go(func() {
			labels.WatchDisks.Set()
			every(watch, e.lookAtDisks)
		})
	}
	e.running.Go(func() {
		labels.TaskAhead.Set()
		e.ahead.run(watch)
	})
	e.running.Go(func() {
		labels.Monitor.Set()
		if err := e.monitor.Run(watch); err != nil && !errors.Is(err, tier.ErrClosed) {
			e.cfg.Logger.Error("spillway: the monitor ended", "error", err)
		}
	})
	return e, nil
}

// NewBatch returns an idle batch that owns p, a payload in a space of this engine, such
// as Mover.Ingest, Mover.AdoptTable and cdevice.Import return. The batch has an id of
// the engine's, the monitor moves it, and a disk with DiskConfig.Persist records it, as if it had
// been put as a record. The caller owns it: it puts it into a repository, or drops it. On
// an error p stays the caller's; a payload of another engine's is tier.ErrNotSupported.
func (e *Engine) NewBatch(p batch.Payload) (*batch.Batch, error) {
	if p != nil && !slices.Contains(e.spaces, p.Space()) {
		return nil, fmt.Errorf("spillway: a batch of a payload in another engine's %s: %w", p.Space().ID(),
			tier.ErrNotSupported)
	}
	return e.newBatch(p, nil)
}

// newBatch is NewBatch of a payload whose record on disk, if it is not nil, is known.
func (e *Engine) newBatch(p batch.Payload, record *persist.Record) (*batch.Batch, error) {
	return batch.New(batch.Options{IDs: &e.ids, Payload: p, Observer: observer{e, record}})
}

// Observer returns the observer for batches that are made neither by NewBatch nor by a repository,
// so that the monitor evicts them, too. It is a batch.Registrar: an id that a batch of the engine
// has is batch.ErrDuplicateID. A program's own observer of such batches must call it. It should be
// a Registrar that passes registrations on, and have a method Unwrap() batch.Observer that returns
// the engine's: then panics of the batches' payloads are in the engine's log.
func (e *Engine) Observer() batch.Observer { return observer{e: e} }

type observer struct {
	e      *Engine
	record *persist.Record // of what a new batch is made of
}

func (o observer) BatchChanged(b *batch.Batch, now batch.Info) {
	_ = o.e.monitor.Register(b, now)
	o.e.recorder.BatchChanged(b)
	if now.State == batch.Released {
		o.e.mover.BatchChanged(b, now)
	}
}

// Engine returns what gets the events of batches, and the log of panics of their observers and
// payloads.
func (o observer) Engine() (emit func(Event), panics *guard.Log) {
	return o.e.cfg.Events, &o.e.panics
}

func (o observer) Knows(b *batch.Batch) bool { return o.e.monitor.Knows(b) }

func (o observer) Register(b *batch.Batch, now batch.Info) error {
	if o.record != nil {
		o.e.recorder.Know(b, o.record)
	}
	if err := o.e.monitor.Register(b, now); err != nil {
		o.e.recorder.Know(b, nil)
		return err
	}
	o.e.recorder.BatchChanged(b)
	return nil
}

// stagingNear returns the pinned chunks on a node, or those of the nearest node that has some.
func (e *Engine) stagingNear(node int) (transfer.Staging, error) {
	nodes := slices.Sorted(maps.Keys(e.staging))
	if len(nodes) == 0 {
		return nil, fmt.Errorf("spillway: moving between device and disk needs host memory: %w", tier.ErrNotSupported)
	}
	nearest := slices.MinFunc(nodes, func(a, b int) int { return e.topo.Distance(node, a) - e.topo.Distance(node, b) })
	return e.staging[nearest], nil
}

// Reserve waits for a promise of bytes in a space of the strategy. The caller must Release it. For
// requests with options, see Reservations.
func (e *Engine) Reserve(
	ctx context.Context, s reservation.Strategy, bytes int64,
) (*reservation.Reservation, error) {
	return e.reservations.Reserve(ctx, s, bytes, nil)
}

// Reservations returns the manager of all promises.
func (e *Engine) Reservations() *reservation.Manager { return e.reservations }

// Permits returns the pool that limits transfers with disks. A program may take permits of it for
// transfers of its own, and change its limits. Permits that a program holds do not stop the
// monitor. But the program's own moves from and to a disk, and reads from one, wait for permits
// too. So the holder of a permit must not wait for those.
func (e *Engine) Permits() *permit.Pool { return e.permits }

// Mover returns what moves batches.
func (e *Engine) Mover() *convert.Mover { return e.mover }

// Registry returns the converters; users may add theirs.
func (e *Engine) Registry() *convert.Registry { return &e.registry }

// Topology returns the topology of the machine that the engine was opened with.
func (e *Engine) Topology() *topology.Topology { return e.topo }

// Trim returns unused room to the system: free pages of the host spaces, unless a GPU's driver has
// pinned them, and free room of the spill volumes. Copies of batches are unused room, except where
// batches persist. Trim returns how many bytes that were. The spaces keep their sizes, and take the
// room again when they need it, which then costs more time. Calling Trim is optional. It is for a
// program that keeps an idle engine open. It ends early with ctx's error. A failing volume does not
// keep the others from being trimmed.
func (e *Engine) Trim(ctx context.Context) (bytes int64, err error) {
	if !e.calls.Enter() {
		return 0, fmt.Errorf("spillway: %w", tier.ErrClosed)
	}
	defer e.calls.Leave()
	for _, s := range e.spaces {
		e.dropCopies(s)
		if pool, ok := s.Pool.(interface {
			Trim(context.Context) (int64, error)
		}); ok && ctx.Err() == nil {
			n, failed := pool.Trim(ctx)
			bytes, err = bytes+n, errors.Join(err, failed)
		}
	}
	return bytes, cmp.Or(err, context.Cause(ctx))
}

// dropCopies frees the copies in a space, unless the next process may want them.
func (e *Engine) dropCopies(s *tier.Space) {
	if !e.recorder.Records(s.ID()) {
		s.DropAllClean()
	}
}

// Close ends the monitor, wakes all waiters with tier.ErrClosed, drops all batches, and closes
// devices, arenas and volumes. No goroutine and no file of the engine is left. Buffers that are
// still held, by handles, a program's transits, reservations or records opened in place, are
// reported as a *LeakError. Their memory stays until they are released; a batch in transit is then
// the program's, which must drop it. A GPU's memory goes with the device, unless batches there are
// exported (package convert/cdevice): then all held memory stays until the last of those is
// released. Held permits of the engine's own pool are a *permit.LeakError. A second Close returns
// tier.ErrClosed. Stats still works. Close waits for calls that are under way, so what the engine
// calls, such as an event, must not call it; except for the functions that RunTask calls.
func (e *Engine) Close() error {
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		return fmt.Errorf("spillway: %w", tier.ErrClosed)
	}
	e.closed = true
	plans := slices.Collect(maps.Values(e.plans))
	e.mu.Unlock()

	e.calls.Shut()
	e.stop(tier.ErrClosed)
	// First wake the waiters for room and end the moves, before their objects are closed. That
	// comes before waiting for the monitor, because an event or a policy of the program's may be
	// such a waiter.
	errs := []error{e.admitter.Close(), e.reservations.Close(), e.mover.Close()}
	e.running.Wait()
	for _, p := range plans {
		_, err := p.Close()
		errs = append(errs, err)
	}
	e.calls.Wait()
	errs = append(errs, e.found.Close(), e.release())
	e.logWarnings() // those that came since
	return errors.Join(errs...)
}

// release gives back what Open has taken so far.
func (e *Engine) release() error {
	var errs []error
	if e.permits != nil && e.permits != e.cfg.Limits.PermitPool {
		errs = append(errs, e.permits.Close())
	}
	for _, s := range e.staging {
		errs = append(errs, s.Close())
	}
	for _, p := range e.streams {
		errs = append(errs, p.Close())
	}
	var leaks []tier.Leak
	for _, s := range e.spaces {
		e.dropCopies(s) // of batches that were not dropped
		leaks = append(leaks, s.Leaks()...)
		errs = append(errs, s.Close())
	}
	for _, d := range e.devices {
		errs = append(errs, d.Close())
	}
	if e.limits.unwatch != nil {
		e.limits.unwatch()
	}
	for _, l := range e.limits.leases {
		errs = append(errs, l.Close())
	}
	if len(leaks) > 0 {
		errs = append(errs, &LeakError{Leaks: leaks})
	}
	return errors.Join(errs...)
}
