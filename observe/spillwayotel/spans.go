// Package spillwayotel exports an engine's work as spans and its statistics as metrics to
// OpenTelemetry. It is a module of its own, so that other programs do not need that library. It uses
// only the API of OpenTelemetry; the program brings the SDK and the exporters.
//
//	Config.Events ──▶ Spans   ──▶ trace.Tracer   tasks, and their moves and waits below them
//	Engine.Stats  ──▶ Metrics ──▶ metric.Meter   observed when a reader collects
//
// # Spans
//
// Each move, wait for room and task is a span with the times of its event. Spans of moves and waits
// are made when these end, so they need no memory before.
//
//	a span of the program ──▶ task ──▶ admission, moves, waits
//	a span of the program ──▶ moves and waits of a call outside of tasks, such as Put
//	(root)                ──▶ moves of the monitor
//
// The parent is the span in the context of the program's call, so a parent-based sampler keeps or
// drops the spans of an engine with those of their query. Moves and waits of a task are children of the
// task's span. A span that the function of a task starts is a sibling of the task's span, because its
// context has the program's span. Events without a duration, such as corruption or a failing disk,
// become events of the task's span, or spans of length 0 outside of tasks. Short moves and waits have
// no span: see SpanOptions.
//
// # Metrics
//
// Metrics are read from Stats, not counted from events. So they cost nothing between collections,
// equal Stats exactly, and need no function for events. They are the metrics of module spillwayprom:
// spillway_edge_moved_bytes_total is spillway.edge.moved with the unit By. OpenTelemetry cannot observe
// a histogram, so it becomes three instruments: …duration is a gauge with the attribute quantile,
// …duration.count and …duration.sum are counters.
package spillwayotel

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
const scope = "github.com/spillway-db/spillway/observe/spillwayotel"

// maxTasks limits the number of tasks with open spans. It is more than an engine admits; the span of a
// task beyond is made when the task ends, and has no children.
const maxTasks = 4096

// defaultShortest is the default of SpanOptions.Shortest. A span took 5 µs (25 November 2026, one of
// two hyperthreads of an Intel Xeon, SDK with a batching processor), so spans add at most 2 %.
const defaultShortest = 250 * time.Microsecond

// SpanOptions select the spans.
type SpanOptions struct {
	// Shortest is the minimum duration of a move or a wait that gets a span; failed ones always get
	// one. 0 means 250 µs, because a span costs about 5 µs. A negative value means no minimum.
	Shortest time.Duration
}

// Spans returns a function for Config.Events that makes spans with a tracer of p. spillway.Tee joins
// it with others. It must serve only one engine, because its tasks are numbered by the engine. It is
// safe for concurrent use, and keeps the open spans of at most 4,096 tasks. A tracer that does not
// record costs a call per event.
//
// The attributes, of which a span has those that its kind has, are spillway.batch, spillway.space.from
// and spillway.space.to, spillway.reason, spillway.bytes, spillway.limit, spillway.copy,
// spillway.plan, spillway.operator, spillway.port, spillway.partition, spillway.task and
// spillway.task.id. Sizes are in bytes. A failure is recorded as an error with the status Error. Copies
// make no spans when the engine creates or drops them.
func Spans(p trace.TracerProvider, o SpanOptions) func(spillway.Event) { return newSpans(p, o).event }

func newSpans(p trace.TracerProvider, o SpanOptions) *spans {
	s := &spans{tracer: p.Tracer(scope), shortest: cmp.Or(o.Shortest, defaultShortest)}
	s.mu.tasks = make(map[uint64]trace.Span)
	return s
}

// spans makes the spans of one engine.
type spans struct {
	tracer   trace.Tracer
	shortest time.Duration

	mu struct {
		sync.Mutex
		tasks map[uint64]trace.Span // the open spans, by Origin.TaskID
	}
}

// event handles one event of the engine.
func (s *spans) event(e spillway.Event) {
	switch e.Kind {
	case events.MoveBegun, events.WaitBegun: // the events of their ends have all attributes
	case events.CopyMade, events.CopyUsed, events.CopyDropped, events.AheadUsed, events.AheadWasted,
		events.CodecChosen, events.PressureFell, events.DiskWell,
		events.BatchPut, events.BatchUsed, events.BatchHinted, events.BatchDropped:
	case events.MoveEnded:
		s.ended("spillway move", e)
	case events.WaitEnded:
		s.ended("spillway wait", e)
	case events.TaskBegun:
		s.taskBegun(e)
	case events.TaskEnded:
		s.taskEnded(e)
	default:
		s.happened(e)
	}
}

// start starts a span of length Took that ends at the event, below the open span of the event's task
// or, without one, below the span in the event's context.
func (s *spans) start(name string, e spillway.Event) (context.Context, trace.Span) {
	ctx := e.Context
	if ctx == nil { // a test's event
		ctx = context.Background()
	}
	if task := s.task(e); task != nil {
		ctx = trace.ContextWithSpan(ctx, task)
	}
	ctx, span := s.tracer.Start(ctx, name, trace.WithTimestamp(e.At.Add(-max(0, e.Took))))
	if span.IsRecording() {
		span.SetAttributes(attributes(e)...)
	}
	return ctx, span
}

// task returns the open span of the event's task, or nil.
func (s *spans) task(e spillway.Event) trace.Span {
	if e.TaskID == 0 {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.tasks[e.TaskID]
}

// end ends a span with the error of the event.
func end(span trace.Span, e spillway.Event) {
	if e.Err != nil && span.IsRecording() {
		err := e.Err
		if text := err.Error(); !utf8.ValidString(text) {
			err = errors.New(valid(text))
		}
		span.RecordError(err, trace.WithTimestamp(e.At))
		span.SetStatus(codes.Error, err.Error())
	}
	span.End(trace.WithTimestamp(e.At))
}

// valid replaces invalid UTF-8: one invalid attribute makes a collector refuse a whole batch of spans.
func valid(text string) string { return strings.ToValidUTF8(text, "\ufffd") }

// ended makes the span of a move or a wait.
func (s *spans) ended(name string, e spillway.Event) {
	if e.Took >= s.shortest || e.Err != nil {
		_, span := s.start(name, e)
		end(span, e)
	}
}

// taskBegun starts the span of a task, and makes the span of its wait for admission.
func (s *spans) taskBegun(e spillway.Event) {
	s.mu.Lock()
	full := e.TaskID == 0 || len(s.mu.tasks) >= maxTasks
	s.mu.Unlock()
	if full {
		return
	}
	ctx, span := s.start("spillway task", e)
	if e.Took > 0 {
		_, waited := s.tracer.Start(ctx, "spillway admission", trace.WithTimestamp(e.At.Add(-e.Took)))
		waited.End(trace.WithTimestamp(e.At))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.tasks[e.TaskID] = span
}

// taskEnded ends the span of a task.
func (s *spans) taskEnded(e spillway.Event) {
	s.mu.Lock()
	span := s.mu.tasks[e.TaskID]
	delete(s.mu.tasks, e.TaskID)
	s.mu.Unlock()
	if span == nil {
		_, span = s.start("spillway task", e)
	}
	end(span, e)
}

// happened records an event without a duration.
func (s *spans) happened(e spillway.Event) {
	name := "spillway " + e.Kind.String()
	var texts []attribute.KeyValue
	if e.Text != "" {
		texts = append(texts, attribute.String("spillway.text", valid(e.Text)))
	}
	if e.Err != nil {
		texts = append(texts, attribute.String("spillway.error", valid(e.Err.Error())))
	}
	if task := s.task(e); task != nil && task.SpanContext().IsValid() {
		if task.IsRecording() {
			all := append(attributes(e), texts...)
			task.AddEvent(name, trace.WithTimestamp(e.At), trace.WithAttributes(all...))
		}
		return
	}
	_, span := s.start(name, e)
	span.SetAttributes(texts...)
	end(span, e)
}

// attributes returns the fields of the event as attributes, without those that its kind does not have.
func attributes(e spillway.Event) []attribute.KeyValue {
	all := make([]attribute.KeyValue, 0, 13)
	text := func(key, value string) {
		if value != "" {
			all = append(all, attribute.String(key, valid(value)))
		}
	}
	number := func(key string, value int64, always bool) {
		if value != 0 || always {
			all = append(all, attribute.Int64(key, value))
		}
	}
	number("spillway.batch", int64(e.Batch), false)
	if e.From.Valid() {
		text("spillway.space.from", e.From.String())
	}
	if e.To.Valid() {
		text("spillway.space.to", e.To.String())
	}
	text("spillway.reason", e.Reason)
	number("spillway.bytes", e.Bytes, e.Kind == events.MoveEnded)
	number("spillway.limit", e.Limit, false)
	if e.Copy {
		all = append(all, attribute.Bool("spillway.copy", true))
	}
	text("spillway.plan", e.Plan)
	if e.Operator != "" {
		text("spillway.operator", e.Operator)
		number("spillway.port", int64(e.Port), true)
		number("spillway.partition", int64(e.Partition), true)
	}
	text("spillway.task", e.Task)
	number("spillway.task.id", int64(e.TaskID), false)
	return all
}
