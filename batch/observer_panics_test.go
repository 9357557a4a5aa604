package batch

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/tier"
)

// panickyObserver panics at each change. It wraps the observer of an engine.
type panickyObserver struct{ of engineObserver }

func (panickyObserver) BatchChanged(*Batch, Info) { panic("in BatchChanged") }
func (o panickyObserver) Unwrap() Observer        { return o.of }

// engineObserver is the observer of an engine, as far as a batch uses it.
type engineObserver struct {
	emit   func(events.Event)
	panics *guard.Log
}

func (engineObserver) BatchChanged(*Batch, Info) {}
func (o engineObserver) Engine() (func(events.Event), *guard.Log) {
	return o.emit, o.panics
}

// TestObserversAndClocksPanic: a panic of an observer or a clock is in the log of the engine whose
// observer is wrapped. The change is made, waiters are woken, and the events are emitted.
func TestObserversAndClocksPanic(t *testing.T) {
	var log bytes.Buffer
	var got []events.Kind
	own := engineObserver{
		emit:   func(e events.Event) { got = append(got, e.Kind) },
		panics: &guard.Log{Logger: slog.New(slog.NewTextHandler(&log, nil))},
	}
	b, err := New(Options{
		ID: 1, Payload: &form{space: newSpace(t, "host:0")}, Observer: panickyObserver{own},
		Clock: func() int64 { panic("in the clock") },
	})
	if err != nil {
		t.Fatal(err)
	}
	changed := b.Changed()
	h, err := b.Open(t.Context(), tier.ID{}, false)
	if err != nil {
		t.Fatal(err)
	}
	select {
	case <-changed:
	default:
		t.Error("a waiter was not woken")
	}
	if b.Info().LastUse == 0 {
		t.Error("without its clock the batch does not know its last use")
	}
	if err := h.Close(); err != nil {
		t.Error(err)
	}
	if err := b.Drop(); err != nil {
		t.Error(err)
	}
	if len(got) != 2 || got[0] != events.BatchUsed || got[1] != events.BatchDropped {
		t.Errorf("the events are %v", got)
	}
	for _, what := range []string{"in BatchChanged", "in the clock"} {
		if !strings.Contains(log.String(), what) {
			t.Errorf("no line about %q:\n%s", what, log.String())
		}
	}
}
