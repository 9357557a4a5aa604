package report

import (
	"fmt"
	"io"

	"github.com/spillway-db/spillway/internal/size"
)

// Trace is the document of trace replay and trace compare.
type Trace struct {
	Header
	Traces []Replayed `json:"traces"`
}

// Replayed is one trace.
type Replayed struct {
	File     string    `json:"file"`
	Events   int       `json:"events"`
	Lost     int64     `json:"lost_events"` // that were not recorded: predictions are rough then
	CutOff   bool      `json:"cut_off"`     // the end is missing
	Recorded Outcome   `json:"recorded"`
	Replays  []Outcome `json:"replays"`
}

// Outcome is what became of a workload.
type Outcome struct {
	Policy         string  `json:"policy"`
	Error          string  `json:"error"` // why a replay could not go on; the rest is 0 then
	Edges          []Edge  `json:"edges"`
	Bytes          int64   `json:"bytes"` // moved in all
	Seconds        float64 `json:"seconds"`
	StalledSeconds float64 `json:"stalled_seconds"` // how long callers waited for batches, and for room, together
	Accesses       int64   `json:"accesses"`
	Found          int64   `json:"found"` // of the accesses, those whose batch was where it was wanted
}

// Print writes the outcomes for people: with one replay of a trace by edge, else side by side.
func (t *Trace) Print(w io.Writer) {
	for i, r := range t.Traces {
		if i > 0 {
			fmt.Fprintln(w)
		}
		fmt.Fprintf(w, "%s: %d events", r.File, r.Events)
		if r.Lost > 0 {
			fmt.Fprintf(w, ", %d were lost", r.Lost)
		}
		if r.CutOff {
			fmt.Fprint(w, ", the end is missing")
		}
		fmt.Fprint(w, "\n\n")
		rows := [][]string{{"", "policy", "moved", "seconds", "stalled", "accesses", "found"}, r.Recorded.row("recorded")}
		for _, o := range r.Replays {
			rows = append(rows, o.row("replayed"))
		}
		table(w, rows)
		for _, o := range r.Replays {
			if o.Error != "" {
				fmt.Fprintf(w, "%s: %s\n", o.Policy, o.Error)
			}
		}
		if len(r.Replays) == 1 && r.Replays[0].Error == "" {
			fmt.Fprintln(w)
			table(w, edgeRows(r.Replays[0].Edges))
			fmt.Fprint(w, "\nrecorded:\n")
			table(w, edgeRows(r.Recorded.Edges))
		}
	}
}

func (o *Outcome) row(name string) []string {
	if o.Error != "" {
		return []string{name, o.Policy, "stuck"}
	}
	return []string{name, o.Policy, size.Approx(o.Bytes), fmt.Sprintf("%.3f", o.Seconds), fmt.Sprintf("%.3f", o.StalledSeconds), fmt.Sprint(o.Accesses), fmt.Sprint(o.Found)}
}
