// Package timeline records the work of an engine over time, in bounded memory.
//
//	Config.Events ──▶ Recorder.Event ──┐                          ┌──▶ a page
//	Engine.Spaces ──▶ Recorder.Watch ──┼──▶ intervals ──▶ Timeline ┤
//	phases ─────────▶ Recorder.Phase ──┘                          └──▶ JSON
//
// Time is divided into at most 512 intervals of equal length. When all are used, the recorder merges
// neighbours and doubles the length. So a recording of an hour takes as much memory as one of a second:
// it is coarser, and complete. An interval has the largest value of a level, such as the bytes in use,
// and the sum of a count.
//
// Only Recorder.Watch starts a goroutine. A Recorder is safe for concurrent use; its mutex is a leaf, held
// for a few additions.
package timeline

import "time"

// Timeline is a recording, as plain values. Each series has one value for each interval.
type Timeline struct {
	Began           time.Time `json:"began"`
	Seconds         float64   `json:"seconds"`          // the length of the recording
	IntervalSeconds float64   `json:"interval_seconds"` // of each value
	Spaces          []Space   `json:"spaces"`
	Edges           []Edge    `json:"edges"`
	Causes          []Cause   `json:"causes"`
	Waits           Waits     `json:"waits"`
	Tasks           Tasks     `json:"tasks"`
	Copies          Copies    `json:"copies"`
	Phases          []Phase   `json:"phases"`
	Notes           []Note    `json:"notes"`
	NotesLeftOut    int64     `json:"notes_left_out"` // events without a note, for lack of room
}

// Space is the use of a space: the maximum in each interval. The marks are the last ones.
type Space struct {
	ID       string  `json:"id"`
	Capacity int64   `json:"capacity_bytes"`
	Limit    int64   `json:"limit_bytes"`
	Trigger  int64   `json:"trigger_bytes"`
	Stop     int64   `json:"stop_bytes"`
	Used     []int64 `json:"used_bytes"`     // with what is reserved
	Reserved []int64 `json:"reserved_bytes"` // promised, and not yet drawn
	Copies   []int64 `json:"copies_bytes"`   // reclaimable at once; not in use
	Foreign  []int64 `json:"foreign_bytes"`  // held by others on the device
}

// Edge counts the moves between two spaces. The bytes of a move count in the intervals that it took.
type Edge struct {
	From  string  `json:"from"`
	To    string  `json:"to"`
	Bytes []int64 `json:"bytes"`
}

// Cause counts the moves for one reason. The moves of "copy" found a copy; their bytes are 0.
type Cause struct {
	Name  string  `json:"name"`
	Moves []int64 `json:"moves"` // that ended
	Bytes []int64 `json:"bytes"`
}

// Waits are the waits for room.
type Waits struct {
	Ended   []int64   `json:"ended"`           // how many
	Total   []float64 `json:"total_seconds"`   // spent in this interval by all that waited
	Longest []float64 `json:"longest_seconds"` // of those that ended
}

// Copies are the copies of batches that are current in another space, in bytes.
type Copies struct {
	Made    int64 `json:"made_bytes"`
	Ahead   int64 `json:"ahead_bytes"` // of them, those that were written before their room was needed
	Used    int64 `json:"used_bytes"`
	Dropped int64 `json:"dropped_bytes"`
}

// Tasks are the tasks that ran.
type Tasks struct {
	Running []int64 `json:"running"` // at most, at once
	Ended   []int64 `json:"ended"`
	Failed  []int64 `json:"failed"`
}

// Phase is a part of the work that has a name.
type Phase struct {
	Name  string  `json:"name"`
	Begin float64 `json:"begin_seconds"`
	End   float64 `json:"end_seconds"`
}

// Note is an event for people to read.
type Note struct {
	At    float64 `json:"at_seconds"`
	Kind  string  `json:"kind"`
	Space string  `json:"space"`
	Text  string  `json:"text"`
	Count int64   `json:"count"` // of such events since At; Text is of the first
}

// State is the present use of a space, for Recorder.Sample.
type State struct {
	ID                             string
	Capacity, Limit, Trigger, Stop int64
	Used, Reserved, Copies         int64
	Foreign                        int64
}
