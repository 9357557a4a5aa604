package replay

import (
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/trace"
	"github.com/spillway-db/spillway/tier"
)

// what is done by an op, beside what a trace calls so: trace.Put to trace.Consume.
type what uint8

const (
	put     = what(trace.Put)
	bring   = what(trace.Bring)
	open    = what(trace.Open) // where the batch is, if no space is named
	consume = what(trace.Consume)
)

const (
	appear    = iota + consume + 1 // a batch is there, as one that another process has left
	shut                           // handles are closed
	task                           // tasks are created, or cancelled
	subscribe                      // subscriptions begin, or end
	drop
	place
)

// op is a step of a stream: one call of a goroutine.
type op struct {
	what   what
	batch  batch.ID
	bytes  int64     // of a put
	to     []tier.ID // best first
	n      int       // tasks and subscriptions, below 0 of those that end; handles
	beside bool      // pending tasks stay pending
	place  batch.Place
	failed bool // nothing came of it

	epoch int
	fresh bool          // it comes after the epoch's beginning; else after the op before it in its stream
	think time.Duration // after that, and after its batch was put
}

// program is what the goroutines of a trace did, so that it can be done again at another speed.
//
// An op begins some time after the one before it of its goroutine. Where all goroutines are idle,
// with no handle open, an epoch begins: what comes then has waited for all that was done before. An
// op also waits for the put of its batch.
type program struct {
	streams [][]*op
	epochs  []int // how many ops each has
	sizes   map[batch.ID]*[tier.Disk + 1]int64
	bodies  map[batch.ID]int64
	looked  samples[time.Duration]          // how late the monitor looked that was woken
	late    map[int]*samples[time.Duration] // and how late moves began, with so many others that it had chosen after them
}

// samples were measured. They come one after the other and then again.
type samples[T time.Duration | float64] struct {
	all []T
	at  int
}

func (s *samples[T]) add(v T) { s.all = append(s.all, v) }

// next returns 0 if there are none.
func (s *samples[T]) next() (v T) {
	if s != nil && len(s.all) > 0 {
		v = s.all[s.at%len(s.all)]
		s.at++
	}
	return v
}

// seen is what the events said last of a batch.
type seen struct {
	put                          time.Duration
	pending, active, subscribers int
	released                     bool
}

// at is where a goroutine is.
type at struct {
	index   int // in streams
	epoch   int // of its last op
	ended   time.Duration
	call    *op // that has not ended
	unnamed *op // a put whose batch has not shown up yet
}

// builder makes a program.
type builder struct {
	program
	at      map[uint64]*at
	batches map[batch.ID]*seen
	busy    int           // calls and handles
	last    time.Duration // that something ended
	began   time.Duration // of the epoch
}

func programOf(t *trace.Trace) *program {
	p := &builder{at: make(map[uint64]*at), batches: make(map[batch.ID]*seen)}
	p.sizes, p.bodies, p.epochs, p.late = make(map[batch.ID]*[tier.Disk + 1]int64), make(map[batch.ID]int64), []int{0}, make(map[int]*samples[time.Duration])
	for i := range t.Events {
		p.event(&t.Events[i])
	}
	return &p.program
}

func (p *builder) event(e *trace.Event) {
	a := p.at[e.Stream]
	if a == nil {
		a = &at{index: len(p.streams), epoch: -1}
		p.at[e.Stream] = a
		p.streams = append(p.streams, nil)
	}
	switch e.Kind {
	case trace.Put, trace.Bring, trace.Open, trace.Consume:
		if a.call != nil { // the trace has lost its end
			p.busy--
		}
		a.call = p.add(a, e, op{what: what(e.Kind), bytes: e.Bytes, to: e.To})
		p.busy++
	case trace.End:
		if a.call != nil {
			a.call.failed = !e.OK
			if a.call.what == put {
				a.unnamed = a.call
			}
			a.call = nil
			p.busy--
			a.ended, p.last = e.At, e.At
		}
	case trace.State:
		p.state(a, e)
	case trace.Place:
		p.instant(a, e, op{what: place, place: e.Place})
	case trace.Began:
		d := p.late[e.Others]
		if d == nil {
			d = new(samples[time.Duration])
			p.late[e.Others] = d
		}
		d.add(e.Took)
	case trace.Looked:
		p.looked.add(e.Took)
	case trace.Gone:
		if b := p.batches[e.Batch]; b != nil && b.active > 0 {
			p.instant(a, e, op{what: shut, n: b.active})
			p.busy -= b.active
			b.active = 0
		}
	}
}

// add adds an op to a stream.
func (p *builder) add(a *at, e *trace.Event, o op) *op {
	if p.busy == 0 && p.epochs[len(p.epochs)-1] > 0 {
		p.epochs = append(p.epochs, 0)
		p.began = p.last
	}
	o.batch, o.epoch = e.Batch, len(p.epochs)-1
	o.fresh = a.epoch != o.epoch
	after := a.ended
	if o.fresh {
		after = p.began
	}
	if b := p.batches[e.Batch]; b != nil {
		after = max(after, b.put)
	}
	o.think = max(0, e.At-after)
	a.epoch = o.epoch
	p.epochs[o.epoch]++
	p.streams[a.index] = append(p.streams[a.index], &o)
	return &o
}

// instant adds an op that takes no time.
func (p *builder) instant(a *at, e *trace.Event, o op) {
	p.add(a, e, o)
	a.ended, p.last = e.At, e.At
}

// state adds the ops that made a batch what it is.
func (p *builder) state(a *at, e *trace.Event) {
	if e.Space.Valid() {
		if p.sizes[e.Batch] == nil {
			p.sizes[e.Batch] = new([tier.Disk + 1]int64)
		}
		p.sizes[e.Batch][e.Space.Kind] = e.Bytes
	}
	p.bodies[e.Batch] = max(p.bodies[e.Batch], e.Body)
	b := p.batches[e.Batch]
	if b == nil {
		p.batches[e.Batch] = &seen{put: e.At}
		if a.unnamed != nil {
			a.unnamed.batch, a.unnamed = e.Batch, nil
			a.ended, p.last = e.At, e.At
			return
		}
		p.instant(a, e, op{what: appear, to: []tier.ID{e.Space}})
		return
	}
	if b.released {
		return
	}
	expected := b.pending
	dropped := e.State == batch.Released
	if opened := e.Active - b.active; opened > 0 {
		call := a.call
		if call == nil || call.batch != e.Batch || call.what < open {
			p.instant(a, e, op{what: open})
			call = p.streams[a.index][len(p.streams[a.index])-1]
		}
		call.beside = e.Pending == expected && expected > 0
		if expected > 0 && !call.beside {
			expected--
		}
		b.released = dropped && call.what == consume
		p.busy += opened
	} else if opened < 0 {
		p.instant(a, e, op{what: shut, n: -opened})
		p.busy += opened
	}
	b.active = e.Active
	if n := e.Pending - expected; n != 0 && !dropped {
		p.instant(a, e, op{what: task, n: n})
	}
	if n := e.Subscribers - b.subscribers; n != 0 {
		p.instant(a, e, op{what: subscribe, n: n})
	}
	b.pending, b.subscribers = e.Pending, e.Subscribers
	if dropped && !b.released {
		b.released = true
		p.instant(a, e, op{what: drop})
	}
}
