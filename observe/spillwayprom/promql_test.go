// The race detector would compile the engine of Prometheus once more, and no goroutines meet here.

//go:build !race

package spillwayprom_test

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/model"
	promhistogram "github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb/chunkenc"
	"github.com/prometheus/prometheus/tsdb/chunks"
	"github.com/prometheus/prometheus/util/annotations"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/histogram"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/observe/spillwayprom"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/test/busyengine"
	"github.com/spillway-db/spillway/tier"
)

// epoch is when the first scrape is.
var epoch = time.Unix(1_700_000_000, 0)

// point is a value at a time.
type point struct {
	at    int64 // ms
	value float64
}

func (p point) T() int64                          { return p.at }
func (p point) ST() int64                         { return 0 }
func (p point) F() float64                        { return p.value }
func (p point) H() *promhistogram.Histogram       { return nil }
func (p point) FH() *promhistogram.FloatHistogram { return nil }
func (p point) Type() chunkenc.ValueType          { return chunkenc.ValFloat }
func (p point) Copy() chunks.Sample               { return p }

// scraped is what a server of Prometheus has after some scrapes. It implements storage.Queryable.
type scraped struct {
	series map[string]*series
	end    time.Duration // of the last scrape, after epoch
}

type series struct {
	labels labels.Labels
	points []chunks.Sample
}

// add takes an exposition in.
func (s *scraped) add(at time.Duration, all []sample) {
	if s.series == nil {
		s.series = map[string]*series{}
	}
	for _, one := range all { // parse leaves out the last bucket, which has all
		if of, ok := strings.CutSuffix(one.name, "_count"); ok {
			last := maps.Clone(one.labels)
			last["le"] = "+Inf"
			all = append(all, sample{of + "_bucket", last, one.value})
		}
	}
	for _, one := range all {
		b := labels.NewScratchBuilder(len(one.labels) + 3)
		b.Add(model.MetricNameLabel, one.name)
		b.Add("instance", "host:9090")
		b.Add("job", "engine")
		for k, v := range one.labels {
			b.Add(k, v)
		}
		b.Sort()
		key := b.Labels().String()
		of := s.series[key]
		if of == nil {
			of = &series{labels: b.Labels()}
			s.series[key] = of
		}
		of.points = append(of.points, point{epoch.Add(at).UnixMilli(), one.value})
	}
	s.end = max(s.end, at)
}

// Querier implements storage.Queryable.
func (s *scraped) Querier(from, to int64) (storage.Querier, error) { return querier{s, from, to}, nil }

type querier struct {
	of       *scraped
	from, to int64
}

func (querier) LabelValues(context.Context, string, *storage.LabelHints, ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	return nil, nil, nil
}

func (querier) LabelNames(context.Context, *storage.LabelHints, ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	return nil, nil, nil
}

func (querier) Close() error { return nil }

// Select implements storage.Querier.
func (q querier) Select(_ context.Context, _ bool, _ *storage.SelectHints, matchers ...*labels.Matcher) storage.SeriesSet {
	var found set
	for _, s := range q.of.series {
		if slices.ContainsFunc(matchers, func(m *labels.Matcher) bool { return !m.Matches(s.labels.Get(m.Name)) }) {
			continue
		}
		within := slices.DeleteFunc(slices.Clone(s.points), func(p chunks.Sample) bool { return p.T() < q.from || p.T() > q.to })
		if len(within) > 0 {
			found = append(found, storage.NewListSeries(s.labels, within))
		}
	}
	slices.SortFunc(found, func(a, b storage.Series) int { return labels.Compare(a.Labels(), b.Labels()) })
	return &iterated{all: found, at: -1}
}

type set []storage.Series

// iterated is a storage.SeriesSet.
type iterated struct {
	all set
	at  int
}

func (s *iterated) Next() bool                      { s.at++; return s.at < len(s.all) }
func (s *iterated) At() storage.Series              { return s.all[s.at] }
func (*iterated) Err() error                        { return nil }
func (*iterated) Warnings() annotations.Annotations { return nil }

// query evaluates an expression as Prometheus does.
func (s *scraped) query(t *testing.T, expr string, from, to, step time.Duration) promql.Matrix {
	t.Helper()
	engine := promql.NewEngine(promql.EngineOpts{MaxSamples: 1 << 22, Timeout: time.Minute, EnableAtModifier: true, EnableNegativeOffset: true})
	q, err := engine.NewRangeQuery(t.Context(), s, nil, expr, epoch.Add(from), epoch.Add(to), step)
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	m, err := q.Exec(t.Context()).Matrix()
	if err != nil {
		t.Fatalf("%s: %v", expr, err)
	}
	all := make(promql.Matrix, len(m))
	for i := range m { // which Close takes back
		all[i] = promql.Series{Metric: m[i].Metric, Floats: slices.Clone(m[i].Floats)}
	}
	return all
}

// at evaluates an expression at one time, and returns its values by the values of the labels.
func (s *scraped) at(t *testing.T, expr string, at time.Duration, of ...string) map[string]float64 {
	t.Helper()
	all := map[string]float64{}
	for _, one := range s.query(t, expr, at, at, time.Second) {
		var names []string
		for _, l := range of {
			names = append(names, one.Metric.Get(l))
		}
		all[strings.Join(names, " ")] = one.Floats[0].F
	}
	return all
}

const scrapes = 30 * time.Second

// scrapeFor has an exposition taken each half a minute, of what the function makes of an engine's
// figures. The function is told how long after the first scrape it is.
func scrapeFor(t *testing.T, long time.Duration, stats func(at time.Duration) *spillway.Stats) *scraped {
	t.Helper()
	var now *spillway.Stats
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(spillwayprom.NewCollector(func() spillway.Stats { return *now }, spillwayprom.Options{}))
	s := new(scraped)
	for at := time.Duration(0); at <= long; at += scrapes {
		if now = stats(at); now != nil {
			s.add(at, parse(t, scrape(t, registry)))
		}
	}
	return s
}

// working returns the figures of a real engine, as if it worked well for ever: with moves, waits of
// ten milliseconds, and tasks.
func working(t *testing.T) func(at time.Duration) *spillway.Stats {
	t.Helper()
	eng := busyengine.Open(t, nil)
	if err := busyengine.Work(t.Context(), eng, testseed.One(t), 60); err != nil {
		t.Fatal(err)
	}
	if err := eng.Close(); err != nil {
		t.Error(err)
	}
	return func(at time.Duration) *spillway.Stats {
		s := eng.Stats()
		n := int64(at / time.Second)
		for i := range s.Spaces {
			p := &s.Spaces[i]
			p.Live, p.Reserved = p.Trigger/2, 0
			if p.Host != nil {
				p.Host.Warnings = nil
			}
			if p.Disk != nil {
				p.Disk.Warnings, p.Disk.Ailing = nil, false
			}
		}
		s.Corrupt, s.Monitor.Refused, s.Monitor.Failed, s.Monitor.Unmovable, s.Admission.Retried = 0, 0, 0, 0, 0
		s.Monitor.Moves += 10 * n
		s.Admission.Admitted += n
		s.Waits = waits(n, 10*time.Millisecond)
		return &s
	}
}

// waits are n waits for room of one length.
func waits(n int64, long time.Duration) (w reservation.WaitStats) {
	var d histogram.Durations
	d.Record(long)
	one := d.Summary()
	w.Count, w.Total, w.P50, w.P99, w.Max = n, time.Duration(n)*long, long, long, long
	w.Within = one.Within
	for bound := range w.Within {
		w.Within[bound] *= n
	}
	return w
}

// fires returns for which space, or nothing, an alert fires at all.
func (r rule) fires(t *testing.T, s *scraped) (of []string) {
	t.Helper()
	var wait time.Duration
	if r.For != "" {
		d, err := model.ParseDuration(r.For)
		if err != nil {
			t.Fatal(err)
		}
		wait = time.Duration(d)
	}
	for _, one := range s.query(t, r.Expr, 0, s.end, scrapes) {
		pending, last := int64(0), int64(0)
		for _, p := range one.Floats {
			if p.T-last > scrapes.Milliseconds() {
				pending = p.T
			}
			if last = p.T; p.T-pending >= wait.Milliseconds() {
				of = append(of, one.Metric.Get("space"))
				break
			}
		}
	}
	return of
}

// Each alert fires when its trouble begins, and no other does; none does while all is well, nor for
// what is over at once.
func TestAlertsFire(t *testing.T) {
	well := working(t)
	const begins = 10 * time.Minute
	space := func(s *spillway.Stats, k tier.Kind) *spillway.SpaceStats {
		return &s.Spaces[slices.IndexFunc(s.Spaces, func(p spillway.SpaceStats) bool { return p.ID.Kind == k })]
	}
	type trouble struct {
		name  string
		make  func(s *spillway.Stats, since time.Duration) // since it began
		fires []string                                     // alerts with their spaces
		until time.Duration                                // of the scrapes; 0: 30 minutes
		begin time.Duration                                // 0: begins
	}
	all := []trouble{
		{name: "nothing", make: func(*spillway.Stats, time.Duration) {}, until: 80 * time.Minute},
		{name: "a corrupt batch", make: func(s *spillway.Stats, _ time.Duration) { s.Corrupt = 1 }, fires: []string{"SpillwayCorruption"}},
		{name: "a batch that was corrupt before the first scrape", make: func(s *spillway.Stats, _ time.Duration) { s.Corrupt = 1 }, fires: []string{"SpillwayCorruption"}, begin: -1},
		{name: "a lost GPU", make: func(s *spillway.Stats, _ time.Duration) { space(s, tier.GPU).Lost = true }, fires: []string{"SpillwaySpaceLost gpu:0"}},
		{name: "refused waiters", make: func(s *spillway.Stats, _ time.Duration) { s.Monitor.Refused = 3 }, fires: []string{"SpillwayWaitersRefused"}},
		{name: "waiters that were refused before the first scrape", make: func(s *spillway.Stats, _ time.Duration) { s.Monitor.Refused = 3 }, fires: []string{"SpillwayWaitersRefused"}, begin: -1},
		{name: "a disk that fails", make: func(s *spillway.Stats, since time.Duration) {
			space(s, tier.Disk).Disk.Ailing = since/scrapes%4 == 0 // it is tried again between
		}, fires: []string{"SpillwayDiskAiling disk:0"}},
		{name: "a disk that failed once", make: func(s *spillway.Stats, since time.Duration) { space(s, tier.Disk).Disk.Ailing = since == 0 }},
		{name: "a disk that fills", make: func(s *spillway.Stats, _ time.Duration) {
			space(s, tier.Disk).Live = space(s, tier.Disk).Capacity * 92 / 100
		}, fires: []string{"SpillwayDiskNearlyFull disk:0"}},
		{name: "a GPU whose batches cannot move", make: func(s *spillway.Stats, _ time.Duration) {
			space(s, tier.GPU).Live = space(s, tier.GPU).Trigger
		}, fires: []string{"SpillwaySpaceAboveTrigger gpu:0"}},
		{name: "a GPU that spills each minute", make: func(s *spillway.Stats, since time.Duration) {
			if since/scrapes%2 == 0 {
				space(s, tier.GPU).Live = space(s, tier.GPU).Trigger
			}
		}},
		{name: "waits of two seconds", make: func(s *spillway.Stats, since time.Duration) {
			n, w := int64(since/time.Second), waits(1, 2*time.Second)
			s.Waits = waits(int64(begins/time.Second), 10*time.Millisecond)
			s.Waits.Count, s.Waits.Total = s.Waits.Count+n, s.Waits.Total+time.Duration(n)*w.Total
			for bound := range s.Waits.Within {
				s.Waits.Within[bound] += n * w.Within[bound]
			}
		}, fires: []string{"SpillwayWaitsLong"}},
		{name: "a wait that does not end", make: func(s *spillway.Stats, since time.Duration) {
			s.Waits.Waiting, s.Waits.Oldest = 1, since
		}, fires: []string{"SpillwayWaitStuck"}},
		{name: "waits of a minute, one after the other", make: func(s *spillway.Stats, since time.Duration) {
			s.Waits.Waiting, s.Waits.Oldest = 1, since%time.Minute
		}},
		{name: "moves that fail", make: func(s *spillway.Stats, since time.Duration) { s.Monitor.Failed = int64(since / time.Minute) }, fires: []string{"SpillwayMovesFail"}},
		{name: "batches that cannot be converted", make: func(s *spillway.Stats, _ time.Duration) { s.Monitor.Unmovable = 1 }, fires: []string{"SpillwayMovesFail"}},
		{name: "tasks that run out of memory", make: func(s *spillway.Stats, since time.Duration) {
			s.Admission.Retried = int64(since/time.Second) / 5
		}, fires: []string{"SpillwayTasksRetried"}, until: 45 * time.Minute},
		{name: "a machine that refuses something", make: func(s *spillway.Stats, _ time.Duration) {
			space(s, tier.Host).Host.Warnings = make([]spillway.Warning, 2)
		}, fires: []string{"SpillwayWarnings host:0"}, until: 80 * time.Minute},
	}
	fired := map[string]bool{}
	for _, c := range all {
		begin := begins
		if c.begin < 0 {
			begin = 0
		}
		until := c.until
		if until == 0 {
			until = 30 * time.Minute
		}
		s := scrapeFor(t, until, func(at time.Duration) *spillway.Stats {
			now := well(at)
			if at >= begin {
				c.make(now, at-begin)
			}
			return now
		})
		var have []string
		for _, r := range rules(t) {
			for _, of := range r.fires(t, s) {
				have = append(have, strings.TrimSpace(r.Alert+" "+of))
				fired[r.Alert] = true
			}
		}
		if !slices.Equal(have, c.fires) {
			t.Errorf("%s: %q fire, want %q", c.name, have, c.fires)
		}
	}
	for _, r := range rules(t) {
		if !fired[r.Alert] {
			t.Errorf("%s never fires", r.Alert)
		}
	}
}

// panel returns the queries of a panel of the dashboard, with values for Grafana's variables.
func panel(t *testing.T, title string) (all []string) {
	t.Helper()
	var board struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(read(t, "grafana-dashboard.json"), &board); err != nil {
		t.Fatal(err)
	}
	for _, p := range board.Panels {
		if p.Title == title {
			for _, q := range p.Targets {
				all = append(all, filled(q.Expr))
			}
		}
	}
	if len(all) == 0 {
		t.Fatalf("there is no panel %q", title)
	}
	return all
}

// The panels of operators have what these moved in the time shown, an hour, to the byte: also of
// those that were not there at its begin, whose engine was opened anew, or which were counted with
// others since.
func TestPanelsOfOperators(t *testing.T) {
	const start, end = 30 * time.Minute, 90 * time.Minute // of what is shown
	s := scrapeFor(t, end, func(at time.Duration) *spillway.Stats {
		now := new(spillway.Stats)
		add := func(plan, operator string, port int, down, unread int64) {
			w := convert.WorkStats{Plan: plan, Operator: operator, Port: port, Unread: unread}
			w.Down.Bytes, w.Up.Bytes = down, 1<<50
			now.Work = append(now.Work, w)
		}
		minutes := int64(at / time.Minute)
		add("always", "scan", 0, 1000+100*minutes, 10*minutes)
		add("always", "scan", 1, 7, 7)
		if at >= 45*time.Minute {
			add("query-17", "join", 0, 5_000_000_000, 1_000_000)
		}
		if at < 60*time.Minute {
			add("restarted", "sort", 0, 10_000_000, 500)
		} else {
			add("restarted", "sort", 0, 1_000_000, 50)
		}
		if at < 50*time.Minute {
			add("folded", "hash", 0, 700_000_000_000, 1)
		} else {
			add("(others)", "", 0, 700_000_000_000, 1)
		}
		return now
	})
	for title, want := range map[string]map[string]float64{
		"Operators that spill most": {"always scan": 6000, "query-17 join": 5_000_000_000, "restarted sort": 1_000_000},
		"Spilled in vain":           {"always scan": 600, "query-17 join": 1_000_000, "restarted sort": 50},
	} {
		if got := s.at(t, panel(t, title)[0], end, "plan", "operator"); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: %v, want %v", title, got, want)
		}
	}
}

// Percentiles are at most twice the true value between the bounds of the histogram, over all
// engines; a wait of ten minutes is between them.
func TestPercentiles(t *testing.T) {
	for _, long := range []time.Duration{5 * time.Microsecond, 10 * time.Millisecond, time.Second, time.Minute, 10 * time.Minute, 18 * time.Minute} {
		stats := func(at time.Duration) *spillway.Stats {
			w := waits(int64(at/time.Second), long)
			return &spillway.Stats{Waits: w, Edges: []convert.EdgeStats{{
				From: tier.ID{Kind: tier.GPU}, To: tier.ID{Kind: tier.Host}, Batches: w.Count, Bytes: w.Count, Moving: w.Total, Within: w.Within,
			}}}
		}
		s := scrapeFor(t, 10*time.Minute, stats)
		check := func(title string, query int, least, most float64) {
			t.Helper()
			expr := panel(t, title)[query]
			got := s.at(t, expr, 10*time.Minute)
			if v := got[""]; len(got) != 1 || !(v >= least*long.Seconds()*(1-1e-9) && v <= most*long.Seconds()*(1+1e-9)) {
				t.Errorf("%v: %s is %v", long, expr, got)
			}
		}
		check("How long a wait takes", 0, 1, 1)   // the mean
		check("How long a wait takes", 1, 0.5, 2) // half of the bucket, as they are spread in it
		check("How long a wait takes", 2, 1, 2)
		check("How long a move takes", 0, 1, 1)
		check("How long a move takes", 1, 1, 2)
	}
}

// Panels tell the engines of one process apart by their label, and add up over those that are
// chosen; an engine without a label is among all.
func TestPanelsAddUpOverEngines(t *testing.T) {
	s := new(scraped)
	for i, l := range []prometheus.Labels{{"engine": "a"}, {"engine": "b"}, nil} {
		stats := spillway.Stats{Spaces: []spillway.SpaceStats{{ID: tier.ID{Kind: tier.GPU}, Trigger: 100 << i}}}
		registry := prometheus.NewPedanticRegistry()
		registry.MustRegister(spillwayprom.NewCollector(func() spillway.Stats { return stats }, spillwayprom.Options{Labels: l}))
		s.add(0, parse(t, scrape(t, registry)))
	}
	trigger := panel(t, "$space: what is held")[2]
	one := strings.Replace(trigger, `engine=~".*"`, `engine=~"b"`, 1)
	if all, b := s.at(t, trigger, 0)[""], s.at(t, one, 0)[""]; all != 700 || b != 200 {
		t.Errorf("the trigger of all is %v, that of b %v", all, b)
	}
}
