// Package metrics has the table of an engine's metrics. A row has a name, a unit, a help text and
// labels, and names the field of spillway.Stats that has the value.
//
//	spillway.Stats ── Each ──▶ Sample ──┬──▶ module spillwayprom
//	                                    └──▶ module spillwayotel
//
// Both modules, the table of docs/operating.md and the dashboard take their metrics from here. A new
// figure of Stats needs one row in table.go; a test of module spillwayprom fails without it. The
// package has no state, and all its functions are safe for concurrent use.
package metrics

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/spillway-db/spillway"
)

// Kind is the type of a metric.
type Kind uint8

// A Gauge goes up and down. A Counter only grows while its engine lives. A Histogram counts
// durations.
const (
	Gauge Kind = iota
	Counter
	Histogram
)

// Unit is a unit in the notation of UCUM: "By", "s", "By/s", "1", or the counted thing in braces.
type Unit string

// The units that Prometheus has in the names of metrics.
const (
	Bytes          Unit = "By"
	Seconds        Unit = "s"
	BytesPerSecond Unit = "By/s"
)

// words are these units in words.
var words = map[Unit]string{Bytes: "bytes", Seconds: "seconds", BytesPerSecond: "bytes per second"}

// String returns the unit in words: "bytes", "seconds", "batch", or "0 or 1".
func (u Unit) String() string {
	switch {
	case u == "1":
		return "0 or 1"
	case words[u] != "":
		return words[u]
	}
	return strings.Trim(string(u), "{}")
}

// Measure describes one metric. Group and Name make up its name, as in "space" and "capacity".
type Measure struct {
	Group, Name string
	Kind        Kind
	Unit        Unit
	Help        string // one sentence that names the unit
	Labels      []string
}

// Prometheus returns the metric's name in Prometheus, such as "spillway_edge_moved_bytes_total".
func (m *Measure) Prometheus() string {
	name := "spillway_" + m.Group
	for _, part := range []string{m.Name, strings.ReplaceAll(words[m.Unit], " ", "_")} {
		if part != "" {
			name += "_" + part
		}
	}
	if m.Kind == Counter {
		name += "_total"
	}
	return name
}

// OpenTelemetry returns the metric's name in OpenTelemetry, such as "spillway.edge.moved".
func (m *Measure) OpenTelemetry() string {
	return strings.TrimSuffix("spillway."+m.Group+"."+m.Name, ".")
}

// Sample is the value of a metric for one set of labels.
type Sample struct {
	*Measure
	Values []string // of Labels, in their order; valid UTF-8
	Value  float64  // of a histogram: the sum
	Count  uint64   // of a histogram
	// Within has the number of durations below each bound of a histogram, in seconds.
	Within map[float64]uint64
	// P50 and P99 are percentiles of a histogram since the start, in seconds.
	P50, P99 float64
}

// Filter selects metrics. Its zero value selects all.
type Filter struct {
	// WithoutWork and WithoutBlocked exclude the metrics of operators and of blocked tasks: engines
	// distinguish up to 1,024 of each, while the number of all other samples is fixed.
	WithoutWork, WithoutBlocked bool
}

func (f Filter) excludes(group string) bool {
	return f.WithoutWork && group == "work" || f.WithoutBlocked && group == "blocked"
}

// All returns the selected metrics in the order of the table.
func All(f Filter) (all []*Measure) {
	for _, g := range table {
		for i := range g.rows {
			if !f.excludes(g.name) {
				all = append(all, &g.rows[i].Measure)
			}
		}
	}
	return all
}

// Each calls yield with all samples of the selected metrics: those of one metric in sequence, and
// each set of labels once.
func Each(s *spillway.Stats, f Filter, yield func(Sample)) {
	for _, g := range table {
		if f.excludes(g.name) {
			continue
		}
		parts := elements(reflect.ValueOf(s).Elem(), g.of)
		for i := range g.rows {
			row := &g.rows[i]
			var all []Sample
			for _, part := range parts {
				var labels []string
				for _, field := range g.fields {
					value, _ := lookup(part, field)
					labels = append(labels, text(value))
				}
				for _, sample := range row.value.samples(part) {
					sample.Measure, sample.Values = &row.Measure, slices.Concat(labels, sample.Values)
					all = append(all, sample)
				}
			}
			for _, sample := range merged(all) {
				yield(sample)
			}
		}
	}
}

// merged adds up samples with the same labels: two plans may have the same name, and two names may
// become equal when invalid UTF-8 is replaced.
func merged(all []Sample) []Sample {
	slices.SortStableFunc(all, func(a, b Sample) int { return slices.Compare(a.Values, b.Values) })
	out := all[:0]
	for _, s := range all {
		last := len(out) - 1
		switch {
		case last < 0 || !slices.Equal(out[last].Values, s.Values):
			out = append(out, s)
		case s.Name == "longest":
			out[last].Value = max(out[last].Value, s.Value)
		default:
			out[last].Value += s.Value
		}
	}
	return out
}

// group is a part of the table: metrics of the same part of Stats, such as each of its spaces.
type group struct {
	name   string
	of     string   // the field of Stats, which may be a slice; "" for Stats itself
	labels []string // of all rows, before their own
	fields []string // the fields of the part that have the values of labels
	rows   []row
}

type row struct {
	Measure
	value value
}

// value produces the samples of a row from one part. Its samples have the values of labels.
type value struct {
	labels  []string
	samples func(part reflect.Value) []Sample
}

// field takes a field of the part. If it is a map, each key is a value of the label by.
func field(path string, by ...string) value {
	return value{by, func(part reflect.Value) (all []Sample) {
		v, ok := lookup(part, path)
		if !ok {
			return nil
		}
		if v.Kind() != reflect.Map {
			return []Sample{{Value: number(v)}}
		}
		for _, key := range v.MapKeys() {
			all = append(all, Sample{Values: []string{text(key)}, Value: number(v.MapIndex(key))})
		}
		return all
	}}
}

// split takes several fields of the part, each with its own value of a label. Values and fields are
// separated by blanks.
func split(label, values, fields string) value {
	names := strings.Fields(values)
	return value{[]string{label}, func(part reflect.Value) (all []Sample) {
		for i, path := range strings.Fields(fields) {
			if v, ok := lookup(part, path); ok {
				all = append(all, Sample{Values: names[i : i+1], Value: number(v)})
			}
		}
		return all
	}}
}

// info produces 1, with fields of the part as labels.
func info(labels, fields string) value {
	return value{strings.Fields(labels), func(part reflect.Value) []Sample {
		s := Sample{Value: 1}
		for path := range strings.FieldsSeq(fields) {
			v, ok := lookup(part, path)
			if !ok {
				return nil
			}
			s.Values = append(s.Values, text(v))
		}
		return []Sample{s}
	}}
}

// computed produces the sample that f returns.
func computed[T any](f func(part T) Sample) value {
	return value{nil, func(part reflect.Value) []Sample { return []Sample{f(part.Interface().(T))} }}
}

// elements returns the elements of the field of v at path, or the field if it is not a slice.
func elements(v reflect.Value, path string) (all []reflect.Value) {
	v, ok := lookup(v, path)
	if !ok {
		return nil
	}
	if v.Kind() != reflect.Slice {
		return []reflect.Value{v}
	}
	for i := range v.Len() {
		all = append(all, v.Index(i))
	}
	return all
}

// lookup follows path, such as "Host.Used", from v. It returns false if a pointer on the way is nil.
func lookup(v reflect.Value, path string) (reflect.Value, bool) {
	if path == "" {
		return v, true
	}
	for name := range strings.SplitSeq(path, ".") {
		if v = v.FieldByName(name); v.Kind() == reflect.Pointer {
			if v.IsNil() {
				return v, false
			}
			v = v.Elem()
		}
	}
	return v, true
}

// number returns a field's value: durations in seconds, and 1 for true.
func number(v reflect.Value) float64 {
	switch x := v.Interface().(type) {
	case time.Duration:
		return x.Seconds()
	case bool:
		if x {
			return 1
		}
		return 0
	}
	return float64(v.Int())
}

// text returns a field's value as a label: exporters accept only valid UTF-8.
func text(v reflect.Value) string { return strings.ToValidUTF8(fmt.Sprint(v.Interface()), "\uFFFD") }
