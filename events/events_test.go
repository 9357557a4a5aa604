package events

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spillway-db/spillway/tier"
)

var (
	gpu  = tier.ID{Kind: tier.GPU}
	disk = tier.ID{Kind: tier.Disk, Ordinal: 1}
)

// Each kind has a name of its own, in words.
func TestKinds(t *testing.T) {
	seen := map[string]bool{}
	for _, k := range Kinds() {
		name := k.String()
		if name == "" || seen[name] || strings.Contains(name, "Kind(") {
			t.Errorf("kind %d is called %q", k, name)
		}
		seen[name] = true
	}
	if len(seen) != int(kinds)-1 || Kind(0).String() != "Kind(0)" || kinds.String() == "" {
		t.Errorf("%d names, %s, %s", len(seen), Kind(0), kinds)
	}
}

func TestString(t *testing.T) {
	e := Event{
		Kind: MoveEnded, Origin: Origin{Plan: "q\n", Operator: "join", Port: 1, Task: "probe"},
		Batch: 7, From: gpu, To: disk,
		Bytes: 4096, Limit: 5, Took: time.Millisecond, Reason: "demand", Copy: true, Err: errors.New("no"),
	}
	want := `move ended batch=7 from=gpu:0 to=disk:1 bytes=4096 limit=5 took=1ms reason=demand copy=true ` +
		`plan=q\n operator=join port=1 partition=0 task=probe error=no`
	if got := e.String(); got != want {
		t.Errorf("%s\nnot\n%s", got, want)
	}
}

// Tee calls those that are there, in their order, and is nil if none is.
func TestTee(t *testing.T) {
	if Tee() != nil || Tee(nil, nil) != nil {
		t.Error("a Tee of nothing is a function")
	}
	var got []int
	add := func(i int) func(Event) { return func(Event) { got = append(got, i) } }
	Tee(nil, add(1), nil, add(2), Tee(add(3), add(4)))(Event{})
	Tee(nil, add(5))(Event{})
	if !slices.Equal(got, []int{1, 2, 3, 4, 5}) {
		t.Error(got)
	}
}

// A function that panics takes no event from those after it, and the panic goes on.
func TestTeePanics(t *testing.T) {
	var got []int
	add := func(i int, panics bool) func(Event) {
		return func(Event) {
			if got = append(got, i); panics {
				panic(i)
			}
		}
	}
	func() {
		defer func() { got = append(got, recover().(int)) }()
		Tee(add(1, false), add(2, true), add(3, false), add(4, true), add(5, false))(Event{})
	}()
	if !slices.Equal(got, []int{1, 2, 3, 4, 5, 4}) {
		t.Error(got)
	}
}

// A context has the origin that it was given, and no other.
func TestContext(t *testing.T) {
	o := Origin{Plan: "p", Task: "t"}
	if From(context.Background()) != (Origin{}) || From(With(context.Background(), o)) != o {
		t.Error(From(With(context.Background(), o)))
	}
}

// traced is a handler that adds what the context has.
type traced struct{ slog.Handler }

func (h traced) Handle(ctx context.Context, r slog.Record) error {
	r.AddAttrs(slog.Any("trace", ctx.Value(traced{})))
	return h.Handler.Handle(ctx, r)
}

// A log's handler gets the context of the event, so that it can add the trace that it is in.
func TestLogContext(t *testing.T) {
	var b bytes.Buffer
	log := Log(slog.New(traced{slog.NewTextHandler(&b, nil)}))
	log(Event{Kind: Corrupt, Context: context.WithValue(t.Context(), traced{}, "of a query")})
	log(Event{Kind: Corrupt})
	if lines := strings.Split(b.String(), "\n"); len(lines) != 3 || !strings.Contains(lines[0], `trace="of a query"`) || !strings.Contains(lines[1], "trace=<nil>") {
		t.Errorf("%q", lines)
	}
}

// TestLog: events that need an action are logged as warnings.
func TestLog(t *testing.T) {
	for level, want := range map[slog.Level][]Kind{
		slog.LevelWarn: {Corrupt, DiskSlow, DiskNearlyFull, DiskFailing, Refused, Unmovable, Lost, QuotaExceeded, Oversized},
	} {
		var b bytes.Buffer
		log := Log(slog.New(slog.NewTextHandler(&b, &slog.HandlerOptions{Level: level})))
		for _, k := range Kinds() {
			b.Reset()
			log(Event{Kind: k, Origin: Origin{Plan: "p", Operator: "o", Partition: 5, TaskID: 9}, Batch: 3, To: disk, Err: errors.New("why")})
			if logged := b.Len() > 0; logged != slices.Contains(want, k) {
				t.Errorf("%s at %s: %q", k, level, &b)
			}
			for _, part := range []string{k.String(), "batch=3", "to=disk:1", "plan=p", "operator=o", "partition=5", "taskID=9", "error=why"} {
				if b.Len() > 0 && !strings.Contains(b.String(), part) {
					t.Errorf("%s: %q lacks %s", k, &b, part)
				}
			}
		}
	}
}
