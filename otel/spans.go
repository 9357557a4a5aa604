// Package otel shows what an engine does to OpenTelemetry: its work as spans, its figures as
// metrics. It is a module of its own, so that programs without OpenTelemetry need none of it. It
// uses the API of OpenTelemetry alone; the program brings the SDK and exporters.
//
//	Config.Events ──▶ Spans   ──▶ trace.Tracer   tasks, and their moves and waits below them
//	Engine.Stats  ──▶ Metrics ──▶ metric.Meter   observed whenever a reader asks
//
// # Spans
//
// A move, a wait for room and a task is a span each, with the times of the event. Spans of moves
// and waits are made when these are over, so they need no memory until then.
//
//	a span of the program's ──▶ task ──▶ admission, moves, waits
//	a span of the program's ──▶ moves and waits of a call, such as Put, outside of tasks
//	(root)                  ──▶ moves of the monitor
//
// They are in the program's own trace: below the span that the context of the program's call has.
// So a sampler that asks the parent keeps or drops them with their query. Moves and waits of a task
// are below the task's span. A span that a task's function makes itself is beside that span, because
// the function's context has the program's span. What takes no time, such as corruption or a disk
// that fails, is an event of the task's span where there is one, and else a span without length.
// Moves and waits that are over at once have none: see SpanOptions.
//
// # Metrics
//
// They are observed from Stats and not counted from events. So they cost nothing while nobody reads
// them, agree with Stats to the byte, and need no function for events. They are those of module
// prometheus: spillway_edge_moved_bytes_total is spillway.edge.moved here, in the unit By. A
// histogram becomes three instruments, because OpenTelemetry cannot observe one: …duration is a gauge
// with the attribute quantile, …duration.count and …duration.sum are counters.
package otel

import (
	"cmp"
	"context"
	"errors"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/events"
)

// scope is the name of the tracer and of the meter.
const scope = "github.com/spillway-db/spillway/otel"

// mostTasks bounds the tasks whose spans are open at once: more than an engine admits. Of those
// beyond, the spans are made at their end, and what they do is not below them.
const mostTasks = 4096

// shortest is Shortest by default. A span took 5 µs (2026-11-25, one of 2 hyperthreads of an Intel
// Xeon, with the SDK and a batching processor): so spans take a fiftieth of the time that they
// show, at most.
const shortest = 250 * time.Microsecond

// SpanOptions say which spans are made. The zero value is for engines at work.
type SpanOptions struct {
	// Shortest is how long a move or a wait takes at least that has a span. Shorter ones have none
	// unless they fail. 0 means 250 µs, because a span takes some 5 µs; below 0 all have one.
	Shortest time.Duration
}

// Spans returns a function for Config.Events that makes spans with a tracer of p. spillway.Tee
// joins it with others. It is one engine's alone, because tasks have the engine's numbers. It may
// be called by many goroutines at once, and holds a span for each task that runs, of 4,096 tasks at
// most. A tracer that does not record costs a call for each event.
//
// Spans have the attributes that their kind has of these: spillway.batch, spillway.space.from and
// spillway.space.to, spillway.reason, spillway.bytes, spillway.limit, spillway.copy, spillway.plan,
// spillway.operator, spillway.port, spillway.partition, spillway.task and spillway.task.id. Sizes
// are in bytes. A failure is recorded as an error with the status Error. Copies that are made and
// dropped make no spans.
func Spans(p trace.TracerProvider, o SpanOptions) func(spillway.Event) { return newSpans(p, o).hear }

func newSpans(p trace.TracerProvider, o SpanOptions) *spans {
	s := &spans{tracer: p.Tracer(scope), shortest: cmp.Or(o.Shortest, shortest)}
	s.mu.tasks = make(map[uint64]trace.Span)
	return s
}

// spans makes the spans of one engine.
type spans struct {
	tracer   trace.Tracer
	shortest time.Duration // below 0: all

	mu struct {
		sync.Mutex
		tasks map[uint64]trace.Span // by Origin.TaskID
	}
}

// hear makes of an event what belongs to it.
func (s *spans) hear(e spillway.Event) {
	switch e.Kind {
	case events.MoveBegun, events.WaitBegun: // their ends have all
	case events.CopyMade, events.CopyUsed, events.CopyDropped, events.AheadUsed, events.AheadWasted, events.CodecChosen, events.PressureFell, events.DiskWell,
		events.BatchPut, events.BatchUsed, events.BatchHinted, events.BatchDropped:
	case events.MoveEnded, events.WaitEnded:
		name := "spillway move"
		if e.Kind == events.WaitEnded {
			name = "spillway wait"
		}
		if e.Took >= s.shortest || e.Err != nil {
			s.ended(name, e)
		}
	case events.TaskBegun:
		s.taskBegun(e)
	case events.TaskEnded:
		s.taskEnded(e)
	default:
		s.happened(e)
	}
}

// of returns a context for what belongs below: the event's, with the span of its task if that is
// open, which is nil if it is not.
func (s *spans) of(e spillway.Event) (_ context.Context, task trace.Span) {
	ctx := e.Context
	if ctx == nil { // it is no engine's
		ctx = context.Background()
	}
	if e.TaskID != 0 {
		s.mu.Lock()
		defer s.mu.Unlock()
		if task = s.mu.tasks[e.TaskID]; task != nil {
			ctx = trace.ContextWithSpan(ctx, task)
		}
	}
	return ctx, task
}

// ended makes the span of what took time and is over.
func (s *spans) ended(name string, e spillway.Event) {
	ctx, _ := s.of(e)
	_, span := s.tracer.Start(ctx, name, trace.WithTimestamp(e.At.Add(-e.Took)))
	finish(span, e)
}

// finish ends a span with what is known at the end.
func finish(span trace.Span, e spillway.Event) {
	if span.IsRecording() {
		span.SetAttributes(attributes(e)...)
		fail(span, e)
	}
	span.End(trace.WithTimestamp(e.At))
}

func fail(span trace.Span, e spillway.Event) {
	if e.Err == nil {
		return
	}
	err := e.Err
	if text := err.Error(); !utf8.ValidString(text) {
		err = errors.New(valid(text))
	}
	span.RecordError(err, trace.WithTimestamp(e.At))
	span.SetStatus(codes.Error, err.Error())
}

// valid returns a text in which what is no UTF-8 is replaced: one such attribute makes a collector
// refuse all spans that are sent with it.
func valid(text string) string { return strings.ToValidUTF8(text, "\ufffd") }

// taskBegun begins a task's span, and makes that of its wait for admission.
func (s *spans) taskBegun(e spillway.Event) {
	s.mu.Lock()
	full := e.TaskID == 0 || len(s.mu.tasks) >= mostTasks
	s.mu.Unlock()
	if full {
		return
	}
	ctx, _ := s.of(e)
	ctx, span := s.tracer.Start(ctx, "spillway task", trace.WithTimestamp(e.At.Add(-e.Took)))
	if span.IsRecording() {
		span.SetAttributes(attributes(e)...)
	}
	if e.Took > 0 {
		_, waited := s.tracer.Start(ctx, "spillway admission", trace.WithTimestamp(e.At.Add(-e.Took)))
		waited.End(trace.WithTimestamp(e.At))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.tasks[e.TaskID] = span
}

// taskEnded ends it.
func (s *spans) taskEnded(e spillway.Event) {
	s.mu.Lock()
	span := s.mu.tasks[e.TaskID]
	delete(s.mu.tasks, e.TaskID)
	s.mu.Unlock()
	if span == nil {
		s.ended("spillway task", e)
		return
	}
	fail(span, e)
	span.End(trace.WithTimestamp(e.At))
}

// happened notes what takes no time.
func (s *spans) happened(e spillway.Event) {
	ctx, task := s.of(e)
	name := "spillway " + e.Kind.String()
	if task != nil && task.SpanContext().IsValid() {
		if task.IsRecording() {
			task.AddEvent(name, trace.WithTimestamp(e.At), trace.WithAttributes(attributes(e)...), trace.WithAttributes(said(e)...))
		}
		return
	}
	_, span := s.tracer.Start(ctx, name, trace.WithTimestamp(e.At.Add(-max(0, e.Took))))
	if span.IsRecording() {
		span.SetAttributes(said(e)...)
	}
	finish(span, e)
}

// said are the texts of an event that takes no time.
func said(e spillway.Event) (all []attribute.KeyValue) {
	if e.Text != "" {
		all = append(all, attribute.String("spillway.text", valid(e.Text)))
	}
	if e.Err != nil {
		all = append(all, attribute.String("spillway.error", valid(e.Err.Error())))
	}
	return all
}

// attributes returns the fields that the event has.
func attributes(e spillway.Event) []attribute.KeyValue {
	all := make([]attribute.KeyValue, 0, 12)
	add := func(is bool, a attribute.KeyValue) {
		if is {
			all = append(all, a)
		}
	}
	text := func(key, value string) { add(value != "", attribute.String(key, valid(value))) }
	add(e.Batch != 0, attribute.Int64("spillway.batch", int64(e.Batch)))
	if e.From.Valid() {
		text("spillway.space.from", e.From.String())
	}
	if e.To.Valid() {
		text("spillway.space.to", e.To.String())
	}
	text("spillway.reason", e.Reason)
	add(e.Bytes != 0 || e.Kind == events.MoveEnded, attribute.Int64("spillway.bytes", e.Bytes))
	add(e.Limit != 0, attribute.Int64("spillway.limit", e.Limit))
	add(e.Copy, attribute.Bool("spillway.copy", true))
	text("spillway.plan", e.Plan)
	text("spillway.operator", e.Operator)
	add(e.Operator != "", attribute.Int("spillway.port", e.Port))
	add(e.Operator != "", attribute.Int("spillway.partition", e.Partition))
	text("spillway.task", e.Task)
	add(e.TaskID != 0, attribute.Int64("spillway.task.id", int64(e.TaskID)))
	return all
}
