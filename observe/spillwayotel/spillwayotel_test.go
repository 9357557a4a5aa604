package spillwayotel

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/observe/internal/metrics"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/test/busyengine"
	"github.com/spillway-db/spillway/tier"
)

// recorded returns a function that makes spans, and what has those that have ended.
func recorded() (*spans, *tracetest.SpanRecorder) {
	r := tracetest.NewSpanRecorder()
	return newSpans(sdk.NewTracerProvider(sdk.WithSpanProcessor(r)), SpanOptions{Shortest: -1}), r
}

// attrs returns the attributes of a span.
func attrs(s sdk.ReadOnlySpan) map[string]string {
	all := map[string]string{}
	for _, a := range s.Attributes() {
		all[string(a.Key)] = a.Value.String()
	}
	return all
}

// The spans of a real run are what its events say: one for each move, wait and task that has ended,
// those of tasks below their tasks, and the bytes of Stats in them.
func TestSpansOfARun(t *testing.T) {
	s, r := recorded()
	var mu sync.Mutex
	var heard []spillway.Event
	eng := busyengine.Open(t, func(c *spillway.Config) {
		c.Events = spillway.Tee(s.event, func(e spillway.Event) {
			mu.Lock()
			defer mu.Unlock()
			heard = append(heard, e)
		})
	})
	if err := busyengine.Work(t.Context(), eng, testseed.One(t), testseed.Rounds(120, 50)); err != nil {
		t.Fatal(err)
	}
	if err := eng.Close(); err != nil {
		t.Error(err)
	}
	if len(s.mu.tasks) != 0 || len(r.Started()) != len(r.Ended()) {
		t.Errorf("%d tasks are kept; %d spans began, %d ended", len(s.mu.tasks), len(r.Started()), len(r.Ended()))
	}
	want := map[string]int{}
	for _, e := range heard {
		if (e.Task == "sort" || e.Task == "hash") != (e.TaskID != 0) { // those that RunTask runs
			t.Errorf("the task of %q has the id %d", e, e.TaskID)
		}
		switch e.Kind {
		case events.MoveEnded:
			want["spillway move"]++
		case events.WaitEnded:
			want["spillway wait"]++
		case events.TaskEnded:
			want["spillway task"]++
		}
	}
	got, byID := map[string]int{}, map[string]sdk.ReadOnlySpan{}
	for _, span := range r.Ended() {
		got[span.Name()]++
		byID[span.SpanContext().SpanID().String()] = span
	}
	for name, n := range want {
		if got[name] != n || n == 0 {
			t.Errorf("%d spans %q, %d events", got[name], name, n)
		}
	}
	bytes, children := map[string]int64{}, map[string]int{}
	for _, span := range r.Ended() {
		a := attrs(span)
		if span.EndTime().Before(span.StartTime()) {
			t.Errorf("%s begins after its end", span.Name())
		}
		if span.Parent().IsValid() {
			parent := byID[span.Parent().SpanID().String()]
			if parent == nil || parent.Name() != "spillway task" || span.Name() != "spillway admission" && attrs(parent)["spillway.task.id"] != a["spillway.task.id"] {
				t.Errorf("%s has another's parent", span.Name())
				continue
			}
			if span.StartTime().Before(parent.StartTime()) || span.EndTime().After(parent.EndTime()) {
				t.Errorf("%s is from %v to %v, its task from %v to %v", span.Name(), span.StartTime(), span.EndTime(), parent.StartTime(), parent.EndTime())
			}
			children[span.Name()]++
		} else if a["spillway.task.id"] != "" && span.Name() != "spillway task" {
			t.Errorf("%s of a task is not below it: %v", span.Name(), a)
		}
		if span.Name() == "spillway move" && span.Status().Code != codes.Error {
			var n int64
			if _, err := fmt.Sscan(a["spillway.bytes"], &n); err != nil {
				t.Errorf("a move has %v", a)
			}
			bytes[a["spillway.space.from"]+a["spillway.space.to"]] += n
		}
	}
	if children["spillway move"] == 0 || children["spillway wait"] == 0 || children["spillway admission"] == 0 {
		t.Errorf("below tasks are %v", children)
	}
	for _, e := range eng.Stats().Edges {
		if n := bytes[e.From.String()+e.To.String()]; n != e.Bytes {
			t.Errorf("from %s to %s: the spans have %d bytes, Stats %d", e.From, e.To, n, e.Bytes)
		}
	}
}

// What a query does is in the query's trace: its tasks, and its own moves and waits, are below its
// span, and what a task does is below the task's. The monitor's moves are roots. What the program put
// into the context is not kept. All texts are UTF-8, whatever plans are called.
func TestSpansOfAQuery(t *testing.T) {
	r := tracetest.NewSpanRecorder()
	provider := sdk.NewTracerProvider(sdk.WithSpanProcessor(r))
	s := newSpans(provider, SpanOptions{Shortest: -1})
	eng := busyengine.Open(t, func(c *spillway.Config) { c.Events = s.event })
	plan, err := eng.Plan("q\xff\xfe")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := plan.Repository("join\xff", 0)
	if err != nil {
		t.Fatal(err)
	}
	put := func(ctx context.Context, n int) error {
		rec := arrowgen.Ints(1, 10_000, 1)
		defer rec.Release()
		for range n {
			if err := repo.Put(ctx, 0, rec, repository.WithPlacement(reservation.AnyInTier(tier.GPU))); err != nil {
				return err
			}
		}
		return nil
	}
	ctx, query := provider.Tracer("a program").Start(t.Context(), "query")
	if err := eng.RunTask(ctx, spillway.Task{Operator: "sort\xff"}, func(ctx context.Context, _ *spillway.Grant, _ []*spillway.Handle) error { return put(ctx, 40) }); err != nil {
		t.Fatal(err)
	}
	if err := put(ctx, 40); err != nil {
		t.Fatal(err)
	}
	b, _ := repo.Peek(0)
	for _, to := range []tier.Kind{tier.Disk, tier.Host} {
		if err := eng.Mover().Move(ctx, b, reservation.AnyInTier(to)); err != nil {
			t.Fatal(err)
		}
	}
	query.End()
	if err := eng.Close(); err != nil {
		t.Error(err)
	}
	names := map[trace.SpanID]string{}
	for _, span := range r.Ended() {
		names[span.SpanContext().SpanID()] = span.Name()
	}
	below := map[string]int{}
	for _, span := range r.Ended() {
		parent := "no span"
		if span.Parent().IsValid() {
			parent = names[span.Parent().SpanID()]
			if span.SpanContext().TraceID() != query.SpanContext().TraceID() {
				t.Errorf("%s is in another trace", span.Name())
			}
		}
		below[span.Name()+" below "+parent]++
		for key, value := range attrs(span) {
			if !utf8.ValidString(value) {
				t.Errorf("%s: %s is %q", span.Name(), key, value)
			}
		}
	}
	for _, want := range []string{
		"spillway task below query", "spillway admission below spillway task", "spillway wait below spillway task", "spillway wait below query",
		"spillway move below query", "spillway move below no span",
	} {
		if below[want] == 0 {
			t.Errorf("no %s, but %v", want, below)
		}
	}
	if n := below["spillway task below no span"] + below["spillway wait below no span"]; n > 0 {
		t.Errorf("of the query are %v", below)
	}
}

// A sampler that asks the parent drops what belongs to a query that it dropped.
func TestSampledWithTheQuery(t *testing.T) {
	for _, sampled := range []bool{true, false} {
		r := tracetest.NewSpanRecorder()
		s := newSpans(sdk.NewTracerProvider(sdk.WithSpanProcessor(r), sdk.WithSampler(sdk.ParentBased(sdk.NeverSample()))), SpanOptions{Shortest: -1})
		of := trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}}
		if sampled {
			of.TraceFlags = trace.FlagsSampled
		}
		ctx := trace.ContextWithSpanContext(t.Context(), trace.NewSpanContext(of))
		task := events.Origin{Task: "sort", TaskID: 3}
		for _, k := range []events.Kind{events.TaskBegun, events.MoveEnded, events.Corrupt, events.TaskEnded} {
			s.event(spillway.Event{Kind: k, At: time.Unix(1, 0), Context: ctx, Origin: task})
		}
		want := 0
		if sampled {
			want = 2
		}
		if n := len(r.Ended()); n != want {
			t.Errorf("sampled %v: %d spans", sampled, n)
		}
	}
}

// What is no UTF-8 is replaced in all texts of a span.
func TestTextsAreUTF8(t *testing.T) {
	s, r := recorded()
	bad := "\xff"
	for _, k := range events.Kinds() {
		s.event(spillway.Event{Kind: k, At: time.Unix(1, 0), Origin: events.Origin{Plan: bad, Operator: bad, Task: bad, TaskID: 1}, Reason: bad, Text: bad, Err: errors.New(bad)})
	}
	texts := 0
	check := func(text string) {
		if texts++; !utf8.ValidString(text) {
			t.Errorf("%q", text)
		}
	}
	for _, span := range r.Ended() {
		check(span.Status().Description)
		all := span.Attributes()
		for _, e := range span.Events() {
			all = append(all, e.Attributes...)
		}
		for _, a := range all {
			check(a.Value.String())
		}
	}
	if texts < 100 {
		t.Errorf("%d texts: those are not all", texts)
	}
}

// What fails is an error; what takes no time is an event of its task, or a span of its own.
func TestErrorsAndMoments(t *testing.T) {
	s, r := recorded()
	at := time.Unix(1000, 0)
	task := events.Origin{Task: "sort", TaskID: 3, Plan: "q", Operator: "join", Port: 1, Partition: 2}
	disk := tier.ID{Kind: tier.Disk}
	why := errors.New("why")
	for _, e := range []spillway.Event{
		{Kind: events.TaskBegun, At: at.Add(time.Second), Origin: task, Took: time.Second},
		{Kind: events.Corrupt, At: at.Add(2 * time.Second), Origin: task, Batch: 7, To: disk, Err: why},
		{Kind: events.MoveEnded, At: at.Add(3 * time.Second), Origin: task, Batch: 7, From: disk, To: tier.ID{Kind: tier.GPU}, Took: time.Second, Reason: "work", Bytes: 5, Err: why},
		{Kind: events.DiskFailing, At: at.Add(3 * time.Second), To: disk, Err: why},
		{Kind: events.PressureRose, At: at.Add(3 * time.Second), To: disk, Bytes: 9, Text: "full"},
		{Kind: events.TaskEnded, At: at.Add(4 * time.Second), Origin: task, Took: 3 * time.Second, Err: why},
		{Kind: events.TaskEnded, At: at.Add(4 * time.Second), Origin: events.Origin{Task: "old", TaskID: 2}, Took: time.Second}, // which began before
	} {
		s.event(e)
	}
	var names []string
	for _, span := range r.Ended() {
		names = append(names, span.Name())
		failed := span.Status().Code == codes.Error && span.Status().Description == "why"
		a := attrs(span)
		switch span.Name() {
		case "spillway admission":
			if failed || span.EndTime().Sub(span.StartTime()) != time.Second || !span.Parent().IsValid() {
				t.Errorf("%v", span)
			}
		case "spillway move":
			want := map[string]string{
				"spillway.batch": "7", "spillway.space.from": "disk:0", "spillway.space.to": "gpu:0", "spillway.reason": "work", "spillway.bytes": "5", "spillway.plan": "q",
				"spillway.operator": "join", "spillway.port": "1", "spillway.partition": "2", "spillway.task": "sort", "spillway.task.id": "3",
			}
			if !failed || !maps.Equal(a, want) || !span.StartTime().Equal(at.Add(2*time.Second)) || len(span.Events()) != 1 || !span.Parent().IsValid() {
				t.Errorf("the move: %v, %v", a, span.Events())
			}
		case "spillway disk failing":
			if !failed || span.Parent().IsValid() || a["spillway.space.to"] != "disk:0" || !span.StartTime().Equal(span.EndTime()) {
				t.Errorf("the disk: %v", a)
			}
		case "spillway pressure rose":
			if failed || a["spillway.bytes"] != "9" || a["spillway.text"] != "full" {
				t.Errorf("the pressure: %v", a)
			}
		case "spillway task":
			if a["spillway.task"] == "old" {
				break
			}
			moments := span.Events()
			if !failed || !span.StartTime().Equal(at) || !span.EndTime().Equal(at.Add(4*time.Second)) || len(moments) != 2 || moments[0].Name != "spillway corruption found" {
				t.Errorf("the task: %v, %v", a, moments)
			}
		}
	}
	want := []string{"spillway admission", "spillway move", "spillway disk failing", "spillway pressure rose", "spillway task", "spillway task"}
	if !slices.Equal(names, want) || len(s.mu.tasks) != 0 {
		t.Errorf("%q, and %d tasks are kept", names, len(s.mu.tasks))
	}
}

// Moves and waits that are over at once have no span, unless they fail or all are asked for.
func TestShortest(t *testing.T) {
	for given, want := range map[time.Duration]int{0: 4, -1: 6, time.Second: 2} {
		r := tracetest.NewSpanRecorder()
		hear := Spans(sdk.NewTracerProvider(sdk.WithSpanProcessor(r)), SpanOptions{Shortest: given})
		for _, k := range []events.Kind{events.MoveEnded, events.WaitEnded} {
			hear(spillway.Event{Kind: k, At: time.Unix(1, 0), Took: defaultShortest})
			hear(spillway.Event{Kind: k, At: time.Unix(1, 0), Took: defaultShortest - 1})
			hear(spillway.Event{Kind: k, At: time.Unix(1, 0), Took: 1, Err: context.Canceled})
		}
		if n := len(r.Ended()); n != want {
			t.Errorf("%v: %d spans, want %d", given, n, want)
		}
	}
}

// However many tasks begin and never end, the memory is bounded, and each kind of event is taken.
func TestBounded(t *testing.T) {
	s, r := recorded()
	for id := range uint64(2 * maxTasks) {
		s.event(spillway.Event{Kind: events.TaskBegun, At: time.Unix(1, 0), Origin: events.Origin{TaskID: id + 1}})
	}
	if len(s.mu.tasks) != maxTasks {
		t.Errorf("%d tasks are kept", len(s.mu.tasks))
	}
	for id := range uint64(2 * maxTasks) {
		s.event(spillway.Event{Kind: events.TaskEnded, At: time.Unix(2, 0), Origin: events.Origin{TaskID: id + 1}})
	}
	if len(s.mu.tasks) != 0 || len(r.Ended()) != 2*maxTasks {
		t.Errorf("%d tasks are kept, %d spans have ended", len(s.mu.tasks), len(r.Ended()))
	}
	for _, k := range events.Kinds() {
		s.event(spillway.Event{Kind: k, At: time.Unix(3, 0)})
	}
	if len(r.Started()) != len(r.Ended()) {
		t.Errorf("%d spans began, %d ended", len(r.Started()), len(r.Ended()))
	}
}

// collect returns all values that a reader gets, by name and attributes.
func collect(t *testing.T, r *metric.ManualReader) map[string]float64 {
	t.Helper()
	var data metricdata.ResourceMetrics
	if err := r.Collect(context.Background(), &data); err != nil {
		t.Fatal(err)
	}
	all := map[string]float64{}
	put := func(m metricdata.Metrics, set attribute.Set, v float64) {
		key := m.Name
		for _, a := range set.ToSlice() {
			key += fmt.Sprintf(" %s=%s", a.Key, a.Value.String())
		}
		if _, ok := all[key]; ok || m.Description == "" || m.Unit == "" {
			t.Errorf("%s is there twice, or has no description or unit", key)
		}
		all[key] = v
	}
	for _, scope := range data.ScopeMetrics {
		for _, m := range scope.Metrics {
			switch d := m.Data.(type) {
			case metricdata.Gauge[int64]:
				for _, p := range d.DataPoints {
					put(m, p.Attributes, float64(p.Value))
				}
			case metricdata.Gauge[float64]:
				for _, p := range d.DataPoints {
					put(m, p.Attributes, p.Value)
				}
			case metricdata.Sum[int64]:
				for _, p := range d.DataPoints {
					put(m, p.Attributes, float64(p.Value))
				}
			case metricdata.Sum[float64]:
				for _, p := range d.DataPoints {
					put(m, p.Attributes, p.Value)
				}
			default:
				t.Fatalf("%s is a %T", m.Name, d)
			}
		}
	}
	return all
}

// The metrics of a real run agree with Stats to the byte, before and after Close, until they are
// taken out; readers may collect while the engine works.
func TestMetrics(t *testing.T) {
	reader := metric.NewManualReader()
	provider := metric.NewMeterProvider(metric.WithReader(reader))
	eng := busyengine.Open(t, nil)
	registered, err := Metrics(provider, eng.Stats, Options{Attributes: []attribute.KeyValue{attribute.String("engine", "a")}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var readers sync.WaitGroup
	readers.Go(func() {
		for n := 0; n < 2 || ctx.Err() == nil; n++ {
			collect(t, reader)
		}
	})
	if err := busyengine.Work(t.Context(), eng, testseed.One(t), testseed.Rounds(100, 40)); err != nil {
		t.Error(err)
	}
	stop()
	readers.Wait()
	if err := eng.Close(); err != nil {
		t.Error(err)
	}
	s, want := eng.Stats(), map[string]float64{}
	metrics.Each(&s, metrics.Filter{}, func(s metrics.Sample) {
		set := []attribute.KeyValue{attribute.String("engine", "a")}
		for i, l := range s.Labels {
			set = append(set, attribute.String("spillway."+l, s.Values[i]))
		}
		key := func(name string, more ...attribute.KeyValue) string {
			sorted := attribute.NewSet(append(slices.Clone(set), more...)...)
			for _, a := range sorted.ToSlice() {
				name += fmt.Sprintf(" %s=%s", a.Key, a.Value.String())
			}
			return name
		}
		if s.Kind != metrics.Histogram {
			want[key(s.OpenTelemetry())] = s.Value
			return
		}
		want[key(s.OpenTelemetry()+".count")], want[key(s.OpenTelemetry()+".sum")] = float64(s.Count), s.Value
		for q, v := range map[float64]float64{0.5: s.P50, 0.99: s.P99} {
			want[key(s.OpenTelemetry(), attribute.Float64("quantile", q))] = v
		}
	})
	got := collect(t, reader)
	if !maps.Equal(got, want) || len(got) < 150 {
		t.Errorf("%d values, want %d", len(got), len(want))
		for k, v := range want {
			if w, ok := got[k]; !ok || w != v {
				t.Errorf("%s: %v, want %v", k, w, v)
			}
		}
	}
	for _, e := range s.Edges { // not by the table
		if e.From.Kind == tier.GPU && e.To.Kind == tier.Host && got["spillway.edge.copies engine=a spillway.from=gpu:0 spillway.to=host:0"] != float64(e.Copies) {
			t.Errorf("%d copies", e.Copies)
		}
	}
	if got["spillway.space.capacity engine=a spillway.space=gpu:0 spillway.tier=gpu"] != 1<<20 {
		t.Error("the capacity of the GPU is another")
	}
	if err := registered.Unregister(); err != nil {
		t.Error(err)
	}
	if left := collect(t, reader); len(left) != 0 {
		t.Errorf("%d values are left", len(left))
	}
}

// What grows with a program can be left out.
func TestOptions(t *testing.T) {
	reader := metric.NewManualReader()
	eng := busyengine.Open(t, nil)
	defer eng.Close()
	if err := busyengine.Work(t.Context(), eng, 1, 60); err != nil {
		t.Error(err)
	}
	if _, err := Metrics(metric.NewMeterProvider(metric.WithReader(reader)), eng.Stats, Options{WithoutWork: true, WithoutBlocked: true}); err != nil {
		t.Fatal(err)
	}
	for name := range collect(t, reader) {
		if strings.HasPrefix(name, "spillway.work.") || strings.HasPrefix(name, "spillway.blocked") {
			t.Error(name)
		}
	}
	if _, err := Metrics(noop.NewMeterProvider(), eng.Stats, Options{}); err != nil {
		t.Error(err)
	}
}
