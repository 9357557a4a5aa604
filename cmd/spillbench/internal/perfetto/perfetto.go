// Package perfetto writes what happens in an engine as a trace in the JSON format of Chrome, which
// ui.perfetto.dev opens.
//
//	moves    a track for each edge, overlapping moves below each other     b, e
//	         those that found no room have a track for each space
//	waits    a track for each space                                        b, e
//	tasks    a track for each name, with the wait for admission            b, e
//	memory   how many bytes each space has in use, reserved and in copies  C
//	notes    what people should know of: slow disks, corruption            i
//
// What took time is written when it is over, its begin and its end together, so that none is without
// the other. The trace is written as it comes: of it 64 KiB or so are in memory. It has at most a
// number of bytes; what comes later is counted, and the end of the trace says how much it was.
package perfetto

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/timeline"
	"github.com/spillway-db/spillway/tier"
)

// Bounds: of the trace, of what waits to be written, and how often counters are written.
const (
	Most      = 256 << 20 // Perfetto opens some hundred MiB in a browser
	mostAhead = 8 << 20
	counted   = 10 * time.Millisecond
	tail      = 512 // for the end
)

// The processes of the trace, each with its name. Perfetto shows them in this order.
const (
	memory = iota + 1
	moves
	waits
	tasks
	notes
)

var processes = [...]string{memory: "memory", moves: "moves", waits: "waits for room", tasks: "tasks", notes: "notes"}

// Writer writes a trace. New makes one. Its methods may be called by several goroutines at once.
type Writer struct {
	began time.Time
	most  int64

	mu struct {
		sync.Mutex // a leaf
		text       bytes.Buffer
		bytes      int64 // in the trace, with what is not yet written
		left       int64 // events left out
		id         int64
		last       time.Time         // of a counter
		states     map[string]string // of each space, as written last
	}

	writing struct {
		sync.Mutex // held while w is written to
		w          io.Writer
		spare      bytes.Buffer
		err        error
	}
}

// New returns a Writer of a trace of at most so many bytes that begins now.
func New(w io.Writer, most int64) *Writer {
	t := &Writer{began: time.Now(), most: most}
	t.writing.w, t.mu.states = w, make(map[string]string)
	t.mu.text.WriteString(`{"displayTimeUnit":"ms","traceEvents":[`)
	for id, name := range processes {
		if name == "" {
			continue
		}
		t.addLocked(event{Phase: "M", Name: "process_name", Process: id, Args: map[string]any{"name": name}})
		t.addLocked(event{Phase: "M", Name: "process_sort_index", Process: id, Args: map[string]any{"sort_index": id}})
		t.addLocked(event{Phase: "M", Name: "thread_name", Process: id, Thread: id, Args: map[string]any{"name": name}})
	}
	return t
}

// event is one of the format. Times are in microseconds.
type event struct {
	Phase    string         `json:"ph"`
	Name     string         `json:"name"`
	Category string         `json:"cat,omitempty"`
	ID       string         `json:"id,omitempty"`
	Process  int            `json:"pid"`
	Thread   int            `json:"tid"`
	At       float64        `json:"ts"`
	Scope    string         `json:"s,omitempty"`
	Args     map[string]any `json:"args,omitempty"`
}

// addLocked writes events that belong together, or leaves all of them out. Only New calls it without
// the lock.
func (t *Writer) addLocked(all ...event) {
	var text []byte
	for _, e := range all {
		one, err := json.Marshal(e)
		if err != nil { // a number that is none
			t.mu.left++
			return
		}
		text = append(append(text, one...), ",\n"...)
	}
	if t.mu.bytes+int64(len(text)) > t.most-tail || t.mu.text.Len()+len(text) > mostAhead {
		t.mu.left += int64(len(all))
		return
	}
	t.mu.bytes += int64(len(text))
	t.mu.text.Write(text)
}

func (t *Writer) since(at time.Time) float64 {
	return float64(max(0, at.Sub(t.began)).Nanoseconds()) / 1e3
}

// pairLocked writes the begin and the end of what is over.
func (t *Writer) pairLocked(process int, category, name string, end time.Time, took time.Duration, args map[string]any) {
	t.mu.id++
	e := event{Phase: "b", Name: name, Category: category, ID: fmt.Sprintf("0x%x", t.mu.id), Process: process, Thread: process, At: t.since(end.Add(-took)), Args: args}
	over := e
	over.Phase, over.At, over.Args = "e", t.since(end), nil
	t.addLocked(e, over)
}

// Event writes an event.
func (t *Writer) Event(e events.Event) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch e.Kind {
	case events.MoveBegun, events.WaitBegun, events.CopyMade, events.CopyUsed, events.CopyDropped, events.AheadUsed, events.AheadWasted,
		events.PressureRose, events.PressureFell:
	case events.MoveEnded:
		category := "move"
		if e.Err != nil {
			category = "failed move"
		}
		t.pairLocked(moves, category, e.From.String()+" → "+e.To.String(), e.At, e.Took, args(e))
	case events.WaitEnded:
		where := "room" // in any of a tier
		if e.To.Valid() {
			where = e.To.String()
		}
		t.pairLocked(waits, "wait", "wait for "+where, e.At, e.Took, args(e))
	case events.TaskBegun:
		if e.Took > 0 {
			t.pairLocked(tasks, "admission", "admission of "+name(e), e.At, e.Took, args(e))
		}
	case events.TaskEnded:
		t.pairLocked(tasks, "task", name(e), e.At, e.Took, args(e))
	default:
		t.addLocked(event{Phase: "i", Name: e.Kind.String(), Category: "note", Process: notes, Thread: notes, At: t.since(e.At), Scope: "g", Args: args(e)})
	}
}

func name(e events.Event) string {
	if e.Task == "" {
		return "task"
	}
	return e.Task
}

// args are the fields of an event that it has.
func args(e events.Event) map[string]any {
	a := make(map[string]any)
	add := func(key, value string) {
		if value != "" {
			a[key] = value
		}
	}
	add("reason", e.Reason)
	add("plan", e.Plan)
	add("task", e.Task)
	add("text", e.Text)
	if e.Operator != "" {
		add("operator", fmt.Sprintf("%s:%d", e.Operator, e.Port))
	}
	if e.Batch != 0 {
		a["batch"] = e.Batch
	}
	if e.Bytes != 0 {
		a["bytes"] = e.Bytes
	}
	if e.Copy {
		a["copy"] = true
	}
	if e.Err != nil {
		a["error"] = e.Err.Error()
	}
	for key, id := range map[string]tier.ID{"from": e.From, "to": e.To} {
		if id.Valid() {
			a[key] = id.String()
		}
	}
	return a
}

// Sample writes how full the spaces are, if that has changed, and not too often.
func (t *Writer) Sample(at time.Time, spaces []timeline.State) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if at.Sub(t.mu.last) < counted {
		return
	}
	t.mu.last = at
	for _, s := range spaces {
		now := fmt.Sprint(s.Used, s.Reserved, s.Copies)
		if t.mu.states[s.ID] == now {
			continue
		}
		t.mu.states[s.ID] = now
		t.addLocked(event{Phase: "C", Name: s.ID + " bytes", Process: memory, Thread: memory, At: t.since(at), Args: map[string]any{
			"in use": s.Used - s.Reserved, "reserved": s.Reserved, "copies": s.Copies,
		}})
	}
}

// Flush writes what has been collected. The first error stays.
func (t *Writer) Flush() error {
	t.writing.Lock()
	defer t.writing.Unlock()
	t.mu.Lock()
	t.mu.text, t.writing.spare = t.writing.spare, t.mu.text
	t.mu.Unlock()
	if t.writing.err == nil {
		_, t.writing.err = t.writing.w.Write(t.writing.spare.Bytes())
	}
	t.writing.spare.Reset()
	return t.writing.err
}

// Close ends the trace, and returns how many events were left out. It does not close what is written
// to. No other method may be called after it.
func (t *Writer) Close() (left int64, err error) {
	t.mu.Lock()
	left = t.mu.left
	last := event{Phase: "i", Name: "the end: nothing was left out", Category: "note", Process: notes, Thread: notes, At: t.since(time.Now()), Scope: "g"}
	if left > 0 {
		last.Name = fmt.Sprintf("the end: %d events were left out, for the size of the trace", left)
	}
	text, err := json.Marshal(last)
	t.mu.text.Write(text)
	t.mu.text.WriteString("]}\n")
	t.mu.Unlock()
	return left, errors.Join(err, t.Flush())
}
