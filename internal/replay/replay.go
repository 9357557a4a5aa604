// Package replay does what a trace tells again, on a virtual clock: with the policy, the memories
// and the speeds of a Setting. What is moved is decided by the monitor's own code, and the books
// are kept by the engine's own spaces, reservations and batches; only memory and time are not real.
//
//	trace.Trace ─▶ program ─▶ world ─▶ Result
//	                            │
//	                            ├─ actor       what a goroutine does, or what moves batches
//	                            ├─ way         an edge: moves share its speed
//	                            └─ monitor.Monitor, reservation.Manager, tier.Space, batch.Batch
//
// A replay is deterministic: one actor runs at a time, and none but by the order of events.
//
// What is not replayed: what is read or written ahead, hints, what a program reserves itself,
// dictionaries that batches share, calls that failed, marks and limits that were changed meanwhile,
// and what others took of a GPU. An order that goroutines agreed on during an epoch
// is not known either: see program.
package replay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/trace"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/tier"
)

// Setting says what is other than in the trace.
type Setting struct {
	Policy   monitor.Policy      // nil: the one of the trace's name
	Capacity map[tier.Kind]int64 // of each space of a tier, in bytes; the marks stay the same shares
	Speed    map[Edge]float64    // bytes a second that an edge passes, whatever number of moves it has
}

// ErrSetting is matched by the error of a setting that the trace's engine could not have been
// opened with.
var ErrSetting = errors.New("the engine cannot have this setting")

// fits returns an error if a setting is about spaces that the trace has not.
func (s *Setting) fits(t *trace.Trace) error {
	has := func(like func(tier.ID) bool) bool {
		return slices.ContainsFunc(t.Spaces, func(of trace.Space) bool { return like(of.ID) })
	}
	for _, k := range tier.Kinds() {
		if s.Capacity[k] != 0 && !has(func(id tier.ID) bool { return id.Kind == k }) {
			return fmt.Errorf("%w: it had no %s space", ErrSetting, k)
		}
	}
	for e := range s.Speed {
		for _, end := range [...]tier.ID{e.From, e.To} {
			if !has(func(id tier.ID) bool { return id == end }) {
				return fmt.Errorf("%w: it had no space %s", ErrSetting, end)
			}
		}
		if e.From == e.To {
			return fmt.Errorf("%w: nothing moves from %s to itself", ErrSetting, e.From)
		}
	}
	return nil
}

// Result is what became of a workload.
type Result struct {
	Moves    []convert.EdgeStats // fastest tiers first
	Took     time.Duration       // from the first call to the end of the last
	Accesses int64               // batches that were opened
	Found    int64               // of them, where they were wanted
	Stalled  time.Duration       // how long those calls took together, and puts before there was room
}

// Bytes returns what was moved in all.
func (r *Result) Bytes() (n int64) {
	for _, m := range r.Moves {
		n += m.Bytes
	}
	return n
}

// add counts a move of a body.
func (r *Result) add(k Edge, body int64, took time.Duration, copied bool, reason string) {
	i, found := slices.BinarySearchFunc(r.Moves, k, func(m convert.EdgeStats, k Edge) int { return compareEdges(Edge{m.From, m.To}, k) })
	if !found {
		r.Moves = slices.Insert(r.Moves, i, convert.EdgeStats{From: k.From, To: k.To, ByReason: make(map[string]int64)})
	}
	m := &r.Moves[i]
	m.Batches++
	m.Busy += took
	if copied {
		m.Copies++
		m.Unmoved += body
		return
	}
	m.Bytes += body
	m.ByReason[reason] += body
}

// Measured is what became of the workload when it was recorded.
func Measured(t *trace.Trace) *Result {
	r := new(Result)
	type call struct {
		event *trace.Event
		moved bool
		laid  time.Duration
	}
	calls := make(map[uint64]*call)
	active := make(map[batch.ID]int) // handles; those of calls, too
	first, last := time.Duration(-1), time.Duration(0)
	for i := range t.Events {
		e := &t.Events[i]
		c := calls[e.Stream]
		switch e.Kind {
		case trace.Put, trace.Bring, trace.Open, trace.Consume:
			calls[e.Stream] = &call{event: e}
			if first < 0 {
				first = e.At
			}
		case trace.Moved:
			if e.From.Valid() {
				r.add(Edge{e.From, e.Space}, e.Bytes, e.Took, e.Copy, e.Reason)
			}
			if c != nil && c.event.Kind == trace.Put {
				c.laid = e.Took
			} else if c != nil && e.Batch == c.event.Batch && e.Reason == "work" {
				c.moved = true
			}
		case trace.State:
			before, known := active[e.Batch]
			if active[e.Batch] = e.Active; known && e.Active > before && (c == nil || c.event.Batch != e.Batch || c.event.Kind < trace.Open) {
				r.Accesses++ // without a call: it was opened where it lay
				r.Found++
			}
		case trace.End:
			last = e.At
			delete(calls, e.Stream)
			if c == nil || !e.OK {
				continue
			}
			if took := e.At - c.event.At - c.laid; c.event.Kind != trace.Bring {
				r.Stalled += max(0, took)
			}
			if c.event.Kind == trace.Open || c.event.Kind == trace.Consume {
				r.Accesses++
				if !c.moved {
					r.Found++
				}
			}
		}
	}
	r.Took = last - max(0, first)
	return r
}

// ErrStuck is matched by the error of a replay that cannot go on: what waits for room will never
// get it.
var ErrStuck = errors.New("the workload cannot go on")

// Run replays a trace.
func Run(ctx context.Context, t *trace.Trace, s Setting) (*Result, error) {
	if s.Policy == nil {
		var err error
		if s.Policy, err = monitor.ByName(t.Policy); err != nil { // a program's own
			return nil, fmt.Errorf("replay: %w: %w", ErrSetting, err)
		}
	}
	w, err := newWorld(t, s)
	if err != nil {
		return nil, fmt.Errorf("replay: %w", err)
	}
	err = w.run(ctx)
	if err := errors.Join(err, w.close()); err != nil {
		return nil, fmt.Errorf("replay: %w", err)
	}
	w.result.Took = w.ended - w.first
	return &w.result, nil
}
