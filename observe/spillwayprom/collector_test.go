package spillwayprom_test

import (
	"context"
	"fmt"
	"maps"
	"math"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/observe/internal/metrics"
	"github.com/spillway-db/spillway/observe/spillwayprom"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/permit"
	"github.com/spillway-db/spillway/test/busyengine"
)

// sample is one value of an exposition. Those of a histogram have the names that they have in the
// text.
type sample struct {
	name   string
	labels map[string]string
	value  float64
}

// serve returns what a program's handler for collectors answers with.
func serve(t *testing.T, collectors ...prometheus.Collector) string {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	for _, c := range collectors {
		if err := registry.Register(c); err != nil {
			t.Fatal(err)
		}
	}
	return scrape(t, registry)
}

func scrape(t *testing.T, registry *prometheus.Registry) string {
	t.Helper()
	answer := httptest.NewRecorder()
	promhttp.HandlerFor(registry, promhttp.HandlerOpts{}).ServeHTTP(answer, httptest.NewRequest("GET", "/metrics", nil))
	if answer.Code != 200 {
		t.Fatalf("status %d: %s", answer.Code, answer.Body)
	}
	return answer.Body.String()
}

// parse parses an exposition by Prometheus' own parser.
func parse(t *testing.T, text string) (all []sample) {
	t.Helper()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	for name, f := range families {
		for _, m := range f.Metric {
			labels := map[string]string{}
			for _, l := range m.Label {
				labels[l.GetName()] = l.GetValue()
			}
			switch {
			case m.Counter != nil:
				all = append(all, sample{name, labels, m.Counter.GetValue()})
			case m.Gauge != nil:
				all = append(all, sample{name, labels, m.Gauge.GetValue()})
			case m.Histogram != nil:
				all = append(all, sample{name + "_count", labels, float64(m.Histogram.GetSampleCount())}, sample{name + "_sum", labels, m.Histogram.GetSampleSum()})
				for _, b := range m.Histogram.Bucket {
					of := maps.Clone(labels)
					of["le"] = fmt.Sprint(b.GetUpperBound())
					if math.IsInf(b.GetUpperBound(), 1) {
						if b.GetCumulativeCount() != m.Histogram.GetSampleCount() {
							t.Errorf("%s: %d in all buckets, of %d", name, b.GetCumulativeCount(), m.Histogram.GetSampleCount())
						}
						continue
					}
					all = append(all, sample{name + "_bucket", of, float64(b.GetCumulativeCount())})
				}
			default:
				t.Fatalf("%s is neither a counter, a gauge nor a histogram", name)
			}
		}
	}
	return all
}

// leftOut are the fields of Stats that are in no metric, with the reason.
var leftOut = map[string]string{
	"Waits.Refused":           "Monitor.Refused is the same number",
	"Spaces[].ID.Kind":        "the label tier",
	"Spaces[].ID.Ordinal":     "in the label space",
	"Spaces[].Host.Capacity":  "the space's",
	"Spaces[].Disk.Capacity":  "the space's",
	"Spaces[].Disk.Direct":    "a label of spillway_disk_info",
	"Spaces[].Disk.Anonymous": "a label of spillway_disk_info",
	"Spaces[].Disk.Encrypted": "a label of spillway_disk_info",
	"Edges[].From.Kind":       "in the label from",
	"Edges[].From.Ordinal":    "in the label from",
	"Edges[].To.Kind":         "in the label to",
	"Edges[].To.Ordinal":      "in the label to",
	"Edges[].Bytes":           "the sum of ByReason, which is there",
	"Edges[].P50":             "in the histogram",
	"Edges[].P99":             "in the histogram",
	"Waits.P50":               "in the histogram",
	"Waits.P99":               "in the histogram",
	"Waits.P999":              "in the histogram",
	"Work[].Port":             "the label port",
	// Warnings are texts; spillway_space_warnings counts those that cost something.
	"Spaces[].Host.Warnings[].Info": "what costs nothing is not counted",
	"Spaces[].Disk.Warnings[].Info": "what costs nothing is not counted",
}

// leaf is a number in Stats, as it is exported.
type leaf struct {
	path  string // without indices, as "Spaces[].Usage.Live"
	value float64
}

// leaves returns all numbers of a value. With a counter it sets them first, each to a number of its
// own, and makes what is nil or empty.
func leaves(path string, v reflect.Value, next *int64) (all []leaf) {
	if v.Type() == reflect.TypeFor[time.Duration]() {
		if next != nil {
			*next++
			v.SetInt(*next * int64(time.Second))
		}
		return []leaf{{path, time.Duration(v.Int()).Seconds()}}
	}
	switch v.Kind() {
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		if next != nil {
			*next++
			v.SetInt(*next)
		}
		return []leaf{{path, float64(v.Int())}}
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		if next != nil {
			v.SetUint(3) // as a tier
		}
		return []leaf{{path, float64(v.Uint())}}
	case reflect.Bool:
		if next != nil {
			v.SetBool(true)
		}
		if v.Bool() {
			return []leaf{{path, 1}}
		}
		return []leaf{{path, 0}}
	case reflect.String:
		if next != nil {
			v.SetString("a " + path)
		}
	case reflect.Pointer:
		if next != nil {
			v.Set(reflect.New(v.Type().Elem()))
		}
		if !v.IsNil() {
			return leaves(path, v.Elem(), next)
		}
	case reflect.Slice:
		if next != nil {
			v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		}
		for i := range v.Len() {
			all = append(all, leaves(path+"[]", v.Index(i), next)...)
		}
	case reflect.Map:
		if next != nil {
			*next++
			v.Set(reflect.MakeMap(v.Type()))
			var key any = "a reason"
			if v.Type().Key() == reflect.TypeFor[time.Duration]() {
				key = time.Millisecond
			}
			v.SetMapIndex(reflect.ValueOf(key), reflect.ValueOf(*next))
		}
		for _, k := range v.MapKeys() {
			all = append(all, leaves(path+"[]", v.MapIndex(k), nil)...)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			all = append(all, leaves(strings.TrimPrefix(path+"."+v.Type().Field(i).Name, "."), v.Field(i), next)...)
		}
	default:
		panic(fmt.Sprintf("%s is a %s: neither a number nor what holds some", path, v.Kind()))
	}
	return all
}

// key is the metric, with the label that the group does not have, that a field is exported as.
func (s sample) key() string {
	key := s.name
	for _, l := range []string{"kind", "direction", "outcome", "state"} {
		if v, ok := s.labels[l]; ok {
			key += " " + v
		}
	}
	return key
}

// exported finds for each field of Stats the metric that has it, by giving each a number of its
// own. Fields that none has must be in leftOut.
func exported(t *testing.T) (metric map[string]string) {
	var s spillway.Stats
	next := int64(1000)
	all := leaves("", reflect.ValueOf(&s).Elem(), &next)
	const batches = 9000 // more than Copies, as they are some of them
	s.Edges[0].Batches = batches
	all[slices.IndexFunc(all, func(l leaf) bool { return l.path == "Edges[].Batches" })].value = batches
	metric = map[string]string{}
	missing := map[string]bool{}
	samples := parse(t, serve(t, spillwayprom.NewCollector(func() spillway.Stats { return s }, spillwayprom.Options{})))
	for _, l := range all {
		var found []string
		for _, have := range samples {
			if have.value == l.value && (l.value != 1 || strings.HasSuffix(have.name, "_"+strings.ToLower(l.path[strings.LastIndexByte(l.path, '.')+1:]))) {
				found = append(found, have.key())
			}
		}
		switch {
		case l.path == "Edges[].Batches" || l.path == "Edges[].Copies": // the count of a histogram is their difference
			found = slices.DeleteFunc(found, func(s string) bool { return strings.HasSuffix(s, "_count") })
		case leftOut[l.path] != "":
			missing[l.path] = true
			continue
		}
		if len(found) != 1 {
			t.Errorf("%s is in %d metrics: %q", l.path, len(found), found)
			continue
		}
		metric[l.path] = found[0]
	}
	for path := range leftOut {
		if !missing[path] {
			t.Errorf("%s is left out, and not in Stats", path)
		}
	}
	return metric
}

// Each number of Stats is in one metric, or is left out for a reason.
func TestAllOfStats(t *testing.T) {
	metric := exported(t)
	if len(metric) < 80 {
		t.Errorf("%d fields: that cannot be all", len(metric))
	}
	for path, want := range map[string]string{
		"Spaces[].Usage.Cached": "spillway_space_held_bytes cached", "Work[].Up.Busy": "spillway_work_busy_seconds_total up",
		"Waits.Max": "spillway_wait_longest_seconds", "Waits.Within[]": "spillway_wait_duration_seconds_bucket", "Spaces[].Disk.Ailing": "spillway_disk_ailing",
	} {
		if metric[path] != want {
			t.Errorf("%s is %q, not %q", path, metric[path], want)
		}
	}
}

// compare holds an exposition against Stats: each metric has the values that its fields have,
// exactly.
func compare(t *testing.T, s spillway.Stats, samples []sample) {
	t.Helper()
	want, have := map[string][]float64{}, map[string][]float64{}
	metric := exported(t)
	for _, l := range leaves("", reflect.ValueOf(&s).Elem(), nil) {
		if s.Permits.Slots == permit.Unlimited && (l.path == "Permits.Slots" || l.path == "Permits.FreeSlots") {
			continue
		}
		if key := metric[l.path]; key != "" {
			want[key] = append(want[key], l.value)
		}
	}
	for _, e := range s.Edges {
		want["spillway_edge_move_duration_seconds_count"] = append(want["spillway_edge_move_duration_seconds_count"], float64(e.Batches-e.Copies))
		var sum int64
		for _, n := range e.ByReason {
			sum += n
		}
		if sum != e.Bytes {
			t.Errorf("from %s to %s: %d bytes by reason, of %d", e.From, e.To, sum, e.Bytes)
		}
	}
	warnings := map[bool]float64{}
	for _, p := range s.Spaces {
		want["spillway_space_info"] = append(want["spillway_space_info"], 1)
		want["spillway_space_pressure_bytes"] = append(want["spillway_space_pressure_bytes"], float64(p.Used()+p.External))
		if p.Host != nil && p.Host.Capacity != p.Capacity || p.Disk != nil && p.Disk.Capacity != p.Capacity {
			t.Errorf("the capacity of %s is not its pool's", p.ID)
		}
		n := 0.0
		if p.Disk != nil {
			want["spillway_disk_info"] = append(want["spillway_disk_info"], 1)
			for _, w := range p.Disk.Warnings {
				warnings[w.Info]++
				if !w.Info {
					n++
				}
			}
		}
		if p.Host != nil {
			for _, w := range p.Host.Warnings {
				warnings[w.Info]++
				if !w.Info {
					n++
				}
			}
		}
		want["spillway_space_warnings"] = append(want["spillway_space_warnings"], n)
	}
	for _, have1 := range samples {
		have[have1.key()] = append(have[have1.key()], have1.value)
	}
	for key := range want {
		if !slices.Equal(slices.Sorted(slices.Values(want[key])), slices.Sorted(slices.Values(have[key]))) {
			t.Errorf("%s has %v, Stats %v", key, have[key], want[key])
		}
	}
	for key := range have {
		if want[key] == nil {
			t.Errorf("%s is in no field of Stats", key)
		}
	}
	// The labels belong to the values.
	value := func(name string, labels ...string) float64 {
		for _, s := range samples {
			is := s.name == name
			for i := 0; i < len(labels); i += 2 {
				is = is && s.labels[labels[i]] == labels[i+1]
			}
			if is {
				return s.value
			}
		}
		return math.NaN()
	}
	check := func(got float64, want int64, what ...any) {
		t.Helper()
		if got != float64(want) {
			t.Errorf("%v: %v, want %d", what, got, want)
		}
	}
	for _, p := range s.Spaces {
		check(value("spillway_space_held_bytes", "space", p.ID.String(), "tier", p.ID.Kind.String(), "kind", "live"), p.Live, p.ID)
		if p.Disk != nil {
			check(value("spillway_disk_written_bytes_total", "space", p.ID.String()), p.Disk.Written, p.ID)
			check(value("spillway_disk_info", "space", p.ID.String(), "dir", p.Disk.Dir), 1, p.ID)
		}
	}
	for _, e := range s.Edges {
		for reason, n := range e.ByReason {
			check(value("spillway_edge_moved_bytes_total", "from", e.From.String(), "to", e.To.String(), "reason", reason), n, e.From, e.To, reason)
		}
		for bound, n := range e.Within {
			check(value("spillway_edge_move_duration_seconds_bucket", "from", e.From.String(), "to", e.To.String(), "le", fmt.Sprint(bound.Seconds())), n, e.From, e.To, bound)
		}
	}
	for _, w := range s.Work {
		check(value("spillway_work_moved_bytes_total", "plan", w.Plan, "operator", w.Operator, "port", fmt.Sprint(w.Port), "direction", "up"), w.Up.Bytes, w)
	}
	for _, b := range s.Blocked {
		check(value("spillway_blocked_waits_total", "task", b.Owner), b.Waits, b)
	}
}

// After a random run each metric agrees with Stats to the byte, and still does when the engine is
// closed.
func TestAgreesWithStats(t *testing.T) {
	for seed := range testseed.Each(t, testseed.Rounds(3, 1)) {
		eng := busyengine.Open(t, nil)
		collector := spillwayprom.NewCollector(eng.Stats, spillwayprom.Options{})
		if err := busyengine.Work(t.Context(), eng, seed, 100); err != nil {
			t.Fatal(err)
		}
		if s := eng.Stats(); len(s.Edges) < 3 || len(s.Work) != 4 || len(s.Blocked) == 0 || s.Waits.Count == 0 || s.Admission.Admitted == 0 || s.Quota == nil {
			t.Fatalf("the run shows little:\n%s", s)
		}
		if err := eng.Close(); err != nil {
			t.Error(err)
		}
		s := eng.Stats() // which do not change any more
		compare(t, s, parse(t, serve(t, collector)))
		compare(t, s, parse(t, serve(t, collector)))
	}
}

// Scrapes while the engine works are whole, and no counter falls.
func TestScrapesAtWork(t *testing.T) {
	eng := busyengine.Open(t, nil)
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(spillwayprom.NewCollector(eng.Stats, spillwayprom.Options{}))
	ctx, stop := context.WithCancel(t.Context())
	var scrapers sync.WaitGroup
	for range 3 {
		scrapers.Go(func() {
			last := map[string]float64{}
			for n := 0; n < 2 || ctx.Err() == nil; n++ {
				for _, s := range parse(t, scrape(t, registry)) {
					if !strings.HasSuffix(s.name, "_total") && !strings.HasSuffix(s.name, "_count") {
						continue
					}
					key := fmt.Sprint(s.name, s.labels)
					if s.value < last[key] {
						t.Errorf("%s fell from %v to %v", key, last[key], s.value)
					}
					last[key] = s.value
				}
			}
		})
	}
	err := busyengine.Work(t.Context(), eng, testseed.One(t), 100)
	if e := eng.Close(); err == nil {
		err = e
	}
	stop()
	scrapers.Wait()
	if err != nil {
		t.Error(err)
	}
}

// The names and help texts are as Prometheus wants them, and each help text names the unit.
func TestLint(t *testing.T) {
	var s spillway.Stats
	next := int64(1000)
	leaves("", reflect.ValueOf(&s).Elem(), &next)
	problems, err := testutil.CollectAndLint(spillwayprom.NewCollector(func() spillway.Stats { return s }, spillwayprom.Options{}))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	seen := map[string]bool{}
	for _, m := range metrics.All(metrics.Filter{}) {
		name, help := m.Prometheus(), strings.ToLower(m.Help)
		if seen[name] || seen[m.OpenTelemetry()] || !strings.HasSuffix(m.Help, ".") {
			t.Errorf("%s: the name is not its own, or the help text no sentence", name)
		}
		seen[name], seen[m.OpenTelemetry()] = true, true
		unit, _, _ := strings.Cut(m.Unit.String(), " ")
		if unit == "0" {
			unit = "1"
		}
		if unit != "look" && !strings.Contains(help, unit) && !strings.Contains(help, unit+"es") && !(unit == "bytes" && strings.Contains(help, "byte")) {
			t.Errorf("%s: %q does not say that it is in %s", name, m.Help, m.Unit)
		}
	}
}

// Engines of one registry are told apart by their labels.
func TestSeveralEngines(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	for _, name := range []string{"a", "b"} {
		eng := busyengine.Open(t, nil)
		defer eng.Close()
		labels := prometheus.Labels{"engine": name}
		collector := spillwayprom.NewCollector(eng.Stats, spillwayprom.Options{Labels: labels})
		if err := registry.Register(collector); err != nil {
			t.Fatal(err)
		}
		labels["engine"] = "changed" // it is the caller's
		if err := registry.Register(collector); err == nil {
			t.Error("it is registered twice")
		}
	}
	n := 0
	for _, s := range parse(t, scrape(t, registry)) {
		if s.name == "spillway_space_capacity_bytes" {
			n++
		}
		if e := s.labels["engine"]; e != "a" && e != "b" {
			t.Errorf("%+v", s)
		}
	}
	if n != 6 {
		t.Errorf("%d spaces", n)
	}
	for _, own := range []string{"space", "reason", "plan", "le"} {
		registry := prometheus.NewPedanticRegistry()
		if err := registry.Register(spillwayprom.NewCollector(nil, spillwayprom.Options{Labels: prometheus.Labels{own: "mine"}})); err == nil {
			t.Errorf("%s, a label of the metrics', can be replaced", own)
		}
	}
}

// What grows with a program can be left out, and nothing else goes with it.
func TestOptions(t *testing.T) {
	var s spillway.Stats
	next := int64(1000)
	leaves("", reflect.ValueOf(&s).Elem(), &next)
	names := func(o spillwayprom.Options) map[string]bool {
		all := map[string]bool{}
		for _, s := range parse(t, serve(t, spillwayprom.NewCollector(func() spillway.Stats { return s }, o))) {
			all[s.name] = true
		}
		return all
	}
	all, few := names(spillwayprom.Options{}), names(spillwayprom.Options{WithoutWork: true, WithoutBlocked: true})
	for name := range all {
		if grows := strings.HasPrefix(name, "spillway_work_") || strings.HasPrefix(name, "spillway_blocked_"); grows == few[name] {
			t.Errorf("%s: %v", name, few[name])
		}
	}
	if len(few) == 0 || len(all) != len(few)+10 {
		t.Errorf("%d of %d are left", len(few), len(all))
	}
}

// Plans of the same name, and names that are no UTF-8, are added up, and do not fail the scrape.
func TestOddNames(t *testing.T) {
	s := spillway.Stats{
		Work: []convert.WorkStats{
			{Plan: "q", Operator: "join", Unread: 1}, {Plan: "q", Operator: "join", Unread: 2}, {Plan: "q", Operator: "join", Port: 1, Unread: 4},
			{Plan: "\xff", Operator: "a\nb\"", Unread: 8}, {Plan: "\xfe", Operator: "a\nb\"", Unread: 16},
		},
		Blocked: []reservation.Blocked{{Owner: "\xff", Waits: 1, Longest: 2 * time.Second}, {Owner: "\xfe", Waits: 2, Longest: time.Second}, {Owner: ""}},
	}
	got := map[string]float64{}
	for _, s := range parse(t, serve(t, spillwayprom.NewCollector(func() spillway.Stats { return s }, spillwayprom.Options{}))) {
		switch s.name {
		case "spillway_work_unread_bytes_total":
			got[s.labels["plan"]+s.labels["operator"]+s.labels["port"]] = s.value
		case "spillway_blocked_waits_total", "spillway_blocked_longest_seconds":
			got[s.name+s.labels["task"]] = s.value
		}
	}
	want := map[string]float64{
		"qjoin0": 3, "qjoin1": 4, "\uFFFDa\nb\"0": 24,
		"spillway_blocked_waits_total": 0, "spillway_blocked_longest_seconds": 0, "spillway_blocked_waits_total\uFFFD": 3, "spillway_blocked_longest_seconds\uFFFD": 2,
	}
	if !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// Slots without a limit have no value.
func TestUnlimitedSlots(t *testing.T) {
	s := spillway.Stats{Permits: permit.Stats{Slots: permit.Unlimited, HeldSlots: 3}}
	text := serve(t, spillwayprom.NewCollector(func() spillway.Stats { return s }, spillwayprom.Options{}))
	if strings.Contains(text, "spillway_permit_slots") || strings.Contains(text, "spillway_permit_free_slots") || !strings.Contains(text, "spillway_permit_held_slots 3") {
		t.Error(text)
	}
}
