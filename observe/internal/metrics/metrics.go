// Package metrics is the one table of an engine's figures as metrics. Each row has a name, a unit,
// a help text and labels, and takes its value from spillway.Stats.
//
//	spillway.Stats ── Each ──▶ Sample ──┬──▶ module spillwayprom
//	                                    └──▶ module spillwayotel
//
// So both modules, the table of docs/operating.md and the dashboard have the same metrics. A new
// figure of Stats is one row in table.go; a test of module spillwayprom asks for it. The package has
// no state, and its functions may be called by many goroutines at once.
package metrics

import (
	"cmp"
	"slices"
	"strings"

	"github.com/spillway-db/spillway"
)

// Kind says how a metric behaves.
type Kind uint8

// A Gauge goes up and down. A Counter only grows while its engine lives. A Histogram counts
// durations.
const (
	Gauge Kind = iota + 1
	Counter
	Histogram
)

// String returns "gauge", "counter" or "histogram".
func (k Kind) String() string { return [...]string{"", "gauge", "counter", "histogram"}[k] }

// Unit is a unit as UCUM writes it: "By", "s", "By/s", "1", or a word in braces for what is
// counted.
type Unit string

// Units with a suffix in the names of Prometheus.
const (
	Bytes          Unit = "By"
	Seconds        Unit = "s"
	BytesPerSecond Unit = "By/s"
)

// suffix returns what a name ends with in Prometheus.
func (u Unit) suffix() string {
	return map[Unit]string{Bytes: "bytes", Seconds: "seconds", BytesPerSecond: "bytes_per_second"}[u]
}

// String returns the unit in words: "bytes", "seconds", "batch", or "0 or 1".
func (u Unit) String() string {
	switch {
	case u == "1":
		return "0 or 1"
	case u.suffix() != "":
		return strings.ReplaceAll(u.suffix(), "_", " ")
	}
	return strings.Trim(string(u), "{}")
}

// Part says which metrics belong together as to how many there are.
type Part uint8

// Main has a fixed number for each space and pair of spaces. Work has some for each operator, and
// Blocked for each task, of which there are at most 1,025 each.
const (
	Main Part = iota
	Work
	Blocked
)

// Measure describes one metric.
type Measure struct {
	Part   Part
	Group  string // what it is of, as "space"
	Name   string // without unit, as "capacity"
	Unit   Unit
	Kind   Kind
	Help   string // one sentence, with the unit
	Labels []string
}

// Prometheus returns the metric's name there, as "spillway_edge_moved_bytes_total".
func (m *Measure) Prometheus() string {
	parts := []string{"spillway", m.Group, m.Name, m.Unit.suffix()}
	if m.Kind == Counter {
		parts = append(parts, "total")
	}
	return strings.Join(slices.DeleteFunc(parts, func(s string) bool { return s == "" }), "_")
}

// OpenTelemetry returns the metric's name there, as "spillway.edge.moved".
func (m *Measure) OpenTelemetry() string {
	return strings.TrimSuffix("spillway."+m.Group+"."+m.Name, ".")
}

// Sample is a metric's value for one set of labels.
type Sample struct {
	*Measure
	Values []string // of Labels, in their order; valid UTF-8
	Value  float64  // of a histogram: the sum
	Count  uint64   // of a histogram
	// Within has a histogram's counts of what took less than so many seconds.
	Within map[float64]uint64
	// P50 and P99 are a histogram's percentiles since the start, in seconds.
	P50, P99 float64
}

// All returns all metrics, in their order. They must not be changed.
func All() []*Measure {
	var all []*Measure
	for _, g := range table {
		all = append(all, g.measures()...)
	}
	return all
}

// Each calls yield with the samples of all metrics that are wanted: those of a metric one after the
// other, and no two with the same labels.
func Each(s *spillway.Stats, wanted func(*Measure) bool, yield func(Sample)) {
	for _, g := range table {
		g.each(s, wanted, yield)
	}
}

// grouped is a group of any type.
type grouped interface {
	measures() []*Measure
	each(*spillway.Stats, func(*Measure) bool, func(Sample))
}

// group is the metrics that are made of one part of Stats.
type group[T any] struct {
	rows []row[T]
	of   func(*spillway.Stats, func(part *T, labels ...string)) // calls with each part and its labels
}

// row is a metric that is made of a T.
type row[T any] struct {
	Measure
	value func(*T, emit)
}

// emit takes a value, and those of the labels that the row has beside its group's.
type emit func(s Sample, labels ...string)

func (g *group[T]) measures() []*Measure {
	all := make([]*Measure, len(g.rows))
	for i := range g.rows {
		all[i] = &g.rows[i].Measure
	}
	return all
}

func (g *group[T]) each(s *spillway.Stats, wanted func(*Measure) bool, yield func(Sample)) {
	for i := range g.rows {
		row := &g.rows[i]
		if !wanted(&row.Measure) {
			continue
		}
		var all []Sample
		g.of(s, func(part *T, labels ...string) {
			row.value(part, func(s Sample, more ...string) {
				s.Measure, s.Values = &row.Measure, slices.Concat(labels, more)
				for i, v := range s.Values {
					s.Values[i] = strings.ToValidUTF8(v, "\uFFFD")
				}
				all = append(all, s)
			})
		})
		for _, s := range merged(all) {
			yield(s)
		}
	}
}

// merged adds up samples with the same labels: plans may have the same name, and names that are no
// UTF-8 may become the same.
func merged(all []Sample) []Sample {
	slices.SortStableFunc(all, func(a, b Sample) int { return slices.Compare(a.Values, b.Values) })
	out := all[:0]
	for _, s := range all {
		last := len(out) - 1
		if last < 0 || !slices.Equal(out[last].Values, s.Values) {
			out = append(out, s)
			continue
		}
		if s.Name == "longest" {
			out[last].Value = max(out[last].Value, s.Value)
		} else {
			out[last].Value += s.Value
		}
	}
	return out
}

// one is what a metric of one value emits.
func one[T any, N int | int64 | float64](of func(*T) N) func(*T, emit) {
	return func(t *T, to emit) { to(Sample{Value: float64(of(t))}) }
}

// whether emits 1 or 0.
func whether[T any](of func(*T) bool) func(*T, emit) {
	return func(t *T, to emit) { to(Sample{Value: truth(of(t))}) }
}

func truth(is bool) float64 {
	if is {
		return 1
	}
	return 0
}

// by emits the values of a map, each with its key.
func by[T any](of func(*T) map[string]int64) func(*T, emit) {
	return func(t *T, to emit) {
		for k, n := range of(t) {
			to(Sample{Value: float64(n)}, k)
		}
	}
}

// labelled returns a group whose metrics all have these labels, before their own.
func labelled[T any](part Part, name string, labels []string, of func(*spillway.Stats, func(*T, ...string)), rows ...row[T]) *group[T] {
	for i := range rows {
		m := &rows[i].Measure
		m.Part, m.Group, m.Labels = part, cmp.Or(m.Group, name), slices.Concat(labels, m.Labels)
	}
	return &group[T]{rows: rows, of: of}
}
