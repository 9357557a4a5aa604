package report

// Trace is the document of trace replay and trace compare.
type Trace struct {
	Header
	Traces []Replayed `json:"traces"`
}

// Replayed is one trace.
type Replayed struct {
	File     string    `json:"file"`
	Events   int       `json:"events"`
	Lost     int64     `json:"lost_events"` // always 0: traces lose no events
	CutOff   bool      `json:"cut_off"`     // the last line is incomplete
	Recorded Outcome   `json:"recorded"`
	Replays  []Outcome `json:"replays"`
}

// Outcome is what became of a workload.
type Outcome struct {
	Policy         string  `json:"policy"`
	Error          string  `json:"error"` // why a replay could not go on; the rest is 0 then
	Edges          []Edge  `json:"edges"`
	Bytes          int64   `json:"bytes"`         // of all moves
	FetchedBytes   int64   `json:"fetched_bytes"` // of the moves to faster tiers
	Seconds        float64 `json:"seconds"`
	StalledSeconds float64 `json:"stalled_seconds"` // how long callers waited for batches, and for room, together
	Accesses       int64   `json:"accesses"`
	Found          int64   `json:"found"` // of the accesses, those whose batch was where it was wanted
}

// Page shows the outcomes: with one replay of a trace by edge, else side by side.
func (t *Trace) Page(notes []string) *Page {
	p := new(Page)
	for i, r := range t.Traces {
		if i > 0 {
			p.linef("")
		}
		state := ""
		if r.CutOff {
			state = ", the end is missing"
		}
		p.linef("%s: %d events%s", r.File, r.Events, state)
		p.linef("")
		all := &sheet{columns: []column{
			{key: "file", only: programs}, {key: "outcome"}, {head: "policy", key: "policy"},
			{head: "moved", key: "bytes"}, {head: "fetched", key: "fetched_bytes"},
			{head: "seconds", key: "seconds"},
			{head: "stalled", key: "stalled_seconds"}, {head: "accesses", key: "accesses"}, {head: "found", key: "found"},
			{key: "error", only: programs},
		}}
		r.Recorded.add(all, r.File, "recorded")
		for _, o := range r.Replays {
			o.add(all, r.File, "replayed")
		}
		p.table(all)
		for _, o := range r.Replays {
			if o.Error != "" {
				p.linef("%s: %s", o.Policy, o.Error)
			}
		}
		if len(r.Replays) == 1 && r.Replays[0].Error == "" {
			p.linef("")
			p.table(edgeSheet(r.Replays[0].Edges))
			p.linef("")
			p.linef("recorded:")
			p.table(edgeSheet(r.Recorded.Edges))
		}
	}
	p.notes(notes)
	return p
}

// add adds the outcome to a table of them.
func (o *Outcome) add(to *sheet, file, name string) {
	if o.Error != "" {
		to.add(file, name, o.Policy, "stuck", nil, nil, nil, nil, nil, o.Error)
		return
	}
	to.add(
		file, name, o.Policy, approx(o.Bytes), approx(o.FetchedBytes),
		three(o.Seconds), three(o.StalledSeconds), o.Accesses, o.Found,
	)
}
