// Package diag describes what the machine refused or did not report, and what to do about it. Each
// package that meets such a case returns it as a [Warning]. Each Warning has a [Cause], which names
// its kind.
//
//	topology, internal/host, tier/disk, … ──▶ Warning{Cause, Space, What, Remedy, Info}
//	                                         │
//	Engine.Warnings(), the log, spillbench ◀─┘
//
// docs/machine.md has a table of all causes. The values are plain: they hold no locks, are safe to
// copy and compare, and belong to the caller.
package diag

// Warning is something that the machine refused or did not report. The engine works without it:
// slower, or less safely.
type Warning struct {
	Cause  Cause  `json:"cause"`
	Space  string `json:"space"`  // the space that it is about, such as "disk:0"; empty: the whole machine
	What   string `json:"what"`   // what was wanted, what came of it, and what that costs; one line
	Remedy string `json:"remedy"` // what to do; empty: nothing can be done, or need be
	Info   bool   `json:"info"`   // it costs nothing, or is meant to be so
}

// String returns all of it in one line.
func (w Warning) String() string {
	s := w.What
	if w.Space != "" {
		s = w.Space + ": " + s
	}
	if w.Remedy != "" {
		s += " (" + w.Remedy + ")"
	}
	return s
}

// Cause names the kind of a Warning, such as "lock-limit". docs/machine.md lists all names. They do
// not change. The zero value is invalid.
type Cause string
