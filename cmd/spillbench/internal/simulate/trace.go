// Package simulate records the events of an engine as a trace, and feeds a trace to the decisions of
// the monitor, package decide, with another policy, other memories and other bandwidths.
//
//	Config.Events ─▶ Recorder ─▶ file ─▶ Read ─▶ Trace ─▶ Run ─▶ Result
//
// A trace is a text file: a line with a Header and a line for each event, as JSON.
package simulate

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/tier"
)

// version is in the first line of each trace.
const version = "spillway.trace/2"

// Header describes the engine that was recorded.
type Header struct {
	Version string  `json:"trace"`
	Policy  string  `json:"policy"`
	Start   int64   `json:"start"` // of the recording, in unix nanoseconds: hints have such times
	Spaces  []Space `json:"spaces"`
}

// Space is a space of the engine. Sizes are in bytes.
type Space struct {
	ID       tier.ID `json:"space"`
	Capacity int64   `json:"capacity"`
	Limit    int64   `json:"limit"`
	Trigger  int64   `json:"trigger"`
	Stop     int64   `json:"stop"`
	Held     int64   `json:"held"` // by the engine itself, from the beginning
}

// Event is an event of the engine; package events says which kind has which fields.
type Event struct {
	At     int64   `json:"at"`   // in nanoseconds since Header.Start
	Kind   string  `json:"kind"` // as events.Kind has it in words
	Batch  uint64  `json:"batch,omitzero"`
	From   tier.ID `json:"from,omitzero"`
	To     tier.ID `json:"to,omitzero"`
	Bytes  int64   `json:"bytes,omitzero"`
	Took   int64   `json:"took,omitzero"` // in nanoseconds
	Reason string  `json:"reason,omitzero"`
	Copy   bool    `json:"copy,omitzero"`
	Ahead  bool    `json:"ahead,omitzero"`
	Hint   int64   `json:"hint,omitzero"`
	Origin
	Error string `json:"error,omitzero"`
}

// Origin has the fields of events.Origin, so that one converts to the other.
type Origin struct {
	Plan      string `json:"plan,omitzero"`
	Operator  string `json:"operator,omitzero"`
	Port      int    `json:"port,omitzero"`
	Partition int    `json:"partition,omitzero"`
	Task      string `json:"task,omitzero"`
	TaskID    uint64 `json:"task_id,omitzero"`
}

// Recorder writes a trace. It writes whole lines only, so an interrupted trace is readable up to its
// last line. It is safe for concurrent use.
type Recorder struct {
	start time.Time

	// mu is a leaf.
	mu     sync.Mutex
	w      io.Writer
	header bool         // it was written
	lines  bytes.Buffer // lines to write
	err    error        // of the first write that failed: nothing is written after it
}

// full is how many bytes of lines a Recorder collects for one write.
const full = 64 << 10

// NewRecorder returns a Recorder that writes to w. The caller must Close it, and keep w until then.
func NewRecorder(w io.Writer) *Recorder { return &Recorder{w: w, start: time.Now()} }

// Event is for Config.Events. Events that come before Begin are kept for it.
func (r *Recorder) Event(e events.Event) {
	line := Event{
		At: e.At.Sub(r.start).Nanoseconds(), Kind: e.Kind.String(), Batch: e.Batch, From: e.From, To: e.To,
		Bytes: e.Bytes, Took: e.Took.Nanoseconds(), Reason: e.Reason, Copy: e.Copy, Ahead: e.Ahead, Hint: e.Hint,
		Origin: Origin(e.Origin),
	}
	if e.Err != nil {
		line.Error = e.Err.Error()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.err = cmp.Or(r.err, json.NewEncoder(&r.lines).Encode(line))
	if r.lines.Len() >= full {
		r.flushLocked()
	}
}

// Begin writes the header, for an engine that was just opened.
func (r *Recorder) Begin(policy string, spaces []spillway.SpaceStats) {
	h := Header{Version: version, Policy: policy, Start: r.start.UnixNano()}
	for _, s := range spaces {
		h.Spaces = append(h.Spaces, Space{s.ID, s.Capacity, s.Limit, s.Trigger, s.Stop, s.Used()})
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.header, r.err = true, cmp.Or(r.err, json.NewEncoder(r.w).Encode(h)) // an Encoder makes one write of it
}

// Close writes what is left and returns the first error.
func (r *Recorder) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.flushLocked()
	if r.err != nil {
		return fmt.Errorf("writing the trace: %w", r.err)
	}
	return nil
}

// flushLocked writes the lines, unless the header is still to come.
func (r *Recorder) flushLocked() {
	if !r.header {
		return
	}
	if r.err == nil {
		_, r.err = r.w.Write(r.lines.Bytes())
	}
	r.lines.Reset()
}

// Trace is a recording.
type Trace struct {
	Header
	Events []Event // by time
	CutOff bool    // the last line is not whole
}

// ErrFormat is matched by errors about text that is not a trace of this version.
var ErrFormat = errors.New("not a trace that this version can read")

// maxLine bounds the memory for a line of text that is not a trace.
const maxLine = 1 << 20

// Read reads a trace to its end. Errors other than those of ErrFormat are the reader's.
func Read(from io.Reader) (*Trace, error) {
	lines, t := bufio.NewScanner(from), new(Trace)
	lines.Buffer(nil, maxLine)
	var broken error // of the line before
	n := 0
	for ; lines.Scan(); n++ {
		if broken != nil {
			return nil, fmt.Errorf("%w: line %d: %w", ErrFormat, n, broken)
		}
		var e Event
		switch {
		case n > 0:
			if broken = json.Unmarshal(lines.Bytes(), &e); broken != nil {
				continue
			}
			if e.Bytes < 0 || e.Took < 0 {
				return nil, fmt.Errorf("%w: line %d: a size or a time below 0", ErrFormat, n+1)
			}
			t.Events = append(t.Events, e)
		case json.Unmarshal(lines.Bytes(), &t.Header) != nil || t.Version != version:
			return nil, fmt.Errorf("%w: the first line is not that of %q", ErrFormat, version)
		}
	}
	switch err := lines.Err(); {
	case err == bufio.ErrTooLong:
		return nil, fmt.Errorf("%w: line %d is longer than %d bytes", ErrFormat, n+1, maxLine)
	case err != nil:
		return nil, err
	case n == 0:
		return nil, fmt.Errorf("%w: it is empty", ErrFormat)
	}
	t.CutOff = broken != nil
	slices.SortStableFunc(t.Events, func(a, b Event) int { return cmp.Compare(a.At, b.At) })
	return t, nil
}
