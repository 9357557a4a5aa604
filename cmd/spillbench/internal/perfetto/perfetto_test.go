package perfetto

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/timeline"
	"github.com/spillway-db/spillway/tier"
)

// read parses a trace, checks that each begin has its end, and counts events by phase and category.
func read(t *testing.T, text []byte) map[string]int {
	t.Helper()
	var trace struct{ TraceEvents []event }
	if err := json.Unmarshal(text, &trace); err != nil {
		t.Fatalf("%v in %.300s", err, text)
	}
	open, count := make(map[string]event), make(map[string]int)
	for _, e := range trace.TraceEvents {
		count[strings.TrimSuffix(e.Phase+" "+e.Category, " ")]++
		key := e.Category + e.ID
		switch e.Phase {
		case "b":
			if _, twice := open[key]; twice || e.ID == "" {
				t.Errorf("%+v has begun already", e)
			}
			open[key] = e
		case "e":
			if b, ok := open[key]; !ok || b.Name != e.Name || b.Process != e.Process || b.At > e.At {
				t.Errorf("%+v ends %+v", e, b)
			}
			delete(open, key)
		}
	}
	if len(open) > 0 {
		t.Errorf("without an end: %+v", open)
	}
	return count
}

func each(w *Writer, n int) {
	from, to := tier.ID{Kind: tier.GPU}, tier.ID{Kind: tier.Disk}
	for i := range n {
		for _, k := range events.Kinds() {
			w.Event(events.Event{
				Kind: k, At: time.Now(), Took: time.Millisecond, From: from, To: to, Bytes: 1, Batch: 3, Reason: "work", Text: "\"</script>\n",
				Origin: events.Origin{Plan: "p\x00\xff", Operator: "o", Task: "t"}, Err: errors.New("e"),
			})
		}
		w.Sample(time.Now().Add(time.Duration(i)*time.Second), []timeline.State{{ID: "gpu:0", Used: int64(i), Reserved: 1}})
	}
}

// The trace is JSON, has all that took time as pairs, counters, notes, and the names of processes.
func TestTrace(t *testing.T) {
	var b bytes.Buffer
	w := New(&b, Most)
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			each(w, 50)
			_ = w.Flush()
		})
	}
	all.Wait()
	left, err := w.Close()
	if left != 0 || err != nil {
		t.Fatal(left, err)
	}
	got := read(t, b.Bytes())
	for what, want := range map[string]int{"b failed move": 200, "e failed move": 200, "b wait": 200, "b task": 200, "b admission": 200, "M": 15} {
		if got[what] != want {
			t.Errorf("%d of %q, want %d of %v", got[what], what, want, got)
		}
	}
	if got["C"] < 50 || got["i note"] < 200 {
		t.Error(got)
	}
}

// TestFailedMoves: failed moves have a category of their own, and a wait without a space has a name.
func TestFailedMoves(t *testing.T) {
	var b bytes.Buffer
	w := New(&b, Most)
	from, to := tier.ID{Kind: tier.GPU}, tier.ID{Kind: tier.Host}
	w.Event(events.Event{Kind: events.MoveEnded, At: time.Now(), From: from, To: to, Err: errors.New("a fault")})
	w.Event(events.Event{Kind: events.MoveEnded, At: time.Now(), From: from, To: to})
	w.Event(events.Event{Kind: events.WaitEnded, At: time.Now()})
	if _, err := w.Close(); err != nil {
		t.Fatal(err)
	}
	got := read(t, b.Bytes())
	if got["b failed move"] != 1 || got["b move"] != 1 {
		t.Error(got)
	}
	if text := b.String(); strings.Contains(text, "invalid") || !strings.Contains(text, `"wait for room"`) {
		t.Error(text)
	}
}

// A trace that becomes too large stays JSON, keeps its pairs, and says what is missing.
func TestBounded(t *testing.T) {
	for _, most := range []int64{4 << 10, 20 << 10, 100 << 10} {
		var b bytes.Buffer
		w := New(&b, most)
		each(w, 200)
		left, err := w.Close()
		if err != nil || left == 0 || int64(b.Len()) > most {
			t.Errorf("%d bytes of %d, %d left out, %v", b.Len(), most, left, err)
		}
		read(t, b.Bytes())
		if !strings.Contains(b.String(), fmt.Sprintf("%d events were left out", left)) {
			t.Error("the trace does not say so")
		}
	}
}

// Nothing is kept in memory that cannot be written, and the first error is told at the end.
func TestWriteFails(t *testing.T) {
	why := errors.New("full")
	w := New(writerFunc(func([]byte) (int, error) { return 0, why }), Most)
	each(w, 10)
	if err := w.Flush(); !errors.Is(err, why) {
		t.Error(err)
	}
	if w.mu.text.Len() != 0 {
		t.Errorf("%d bytes are kept", w.mu.text.Len())
	}
	if _, err := w.Close(); !errors.Is(err, why) {
		t.Error(err)
	}
	slow := New(io.Discard, Most)
	each(slow, 3000)
	if slow.mu.text.Len() > mostAhead {
		t.Errorf("%d bytes wait to be written", slow.mu.text.Len())
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }
