// Package spillwayprom shows what an engine does to Prometheus, by
// github.com/prometheus/client_golang. It is a module of its own, so that programs without
// Prometheus need none of it.
//
//	Engine.Stats ──▶ Collector ──▶ a prometheus.Registry of the program's ──▶ promhttp
//
// A Collector reads Engine.Stats once in each scrape and keeps nothing, so between scrapes it costs
// nothing. All of Stats is there: sizes in bytes, times in seconds, counters as _total. Counters
// are those of one engine: they begin anew with the next. The table of docs/operating.md has all
// metrics.
//
// # How many series there are
//
// A space has some twenty series, and a pair of spaces between which batches move some forty, as
// its histogram has 32: with one GPU, host memory and a disk that is less than 400. Two parts grow
// with what a program does:
//
//   - spillway_work_… has about ten series for each plan, operator and port. The engine keeps 1,024
//     of these apart, and counts the rest with the plan "(others)". A program that names each plan
//     anew makes new series with each; Options.WithoutWork leaves them out.
//   - spillway_blocked_… has three series for each name of a task that has waited. The engine keeps
//     1,024 names apart, and counts the rest as "(others)". Options.WithoutBlocked leaves them out.
package spillwayprom

import (
	"fmt"
	"maps"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/observe/internal/metrics"
)

// Options say what a Collector shows. The zero value means all.
type Options struct {
	// Labels are on all metrics, such as {"engine": "etl"}. They tell the engines of one registry
	// apart. None may be one of the metrics' own labels, nor le, which is that of buckets: Register
	// returns an error then.
	Labels prometheus.Labels
	// WithoutWork leaves out what was moved for each plan and operator.
	WithoutWork bool
	// WithoutBlocked leaves out how long tasks have waited for room, by their names.
	WithoutBlocked bool
}

// wants reports whether a metric is shown.
func (o Options) wants(m *metrics.Measure) bool {
	return !(o.WithoutWork && m.Part == metrics.Work || o.WithoutBlocked && m.Part == metrics.Blocked)
}

// Collector is a prometheus.Collector of one engine. It is safe for concurrent use, and needs no
// closing. After the engine's Close it shows the last figures; Unregister takes it out.
type Collector struct {
	stats   func() spillway.Stats
	options Options
	descs   map[*metrics.Measure]*prometheus.Desc
}

var _ prometheus.Collector = (*Collector)(nil)

// le is the label of a histogram's buckets.
const le = "le"

// NewCollector returns a Collector of what stats returns, which is an Engine's Stats. It registers
// nothing: the caller passes it to Register of a registry.
func NewCollector(stats func() spillway.Stats, options Options) *Collector {
	options.Labels = maps.Clone(options.Labels)
	c := &Collector{stats: stats, options: options, descs: make(map[*metrics.Measure]*prometheus.Desc)}
	for _, m := range metrics.All() {
		_, ofBuckets := options.Labels[le]
		switch {
		case !options.wants(m):
		case m.Kind == metrics.Histogram && ofBuckets: // client_golang does not look at it
			c.descs[m] = prometheus.NewInvalidDesc(fmt.Errorf("%s has the label %s by itself: Options.Labels must not have it", m.Prometheus(), le))
		default:
			c.descs[m] = prometheus.NewDesc(m.Prometheus(), m.Help, m.Labels, options.Labels)
		}
	}
	return c
}

// Describe implements prometheus.Collector.
func (c *Collector) Describe(to chan<- *prometheus.Desc) {
	for _, d := range c.descs {
		to <- d
	}
}

// Collect implements prometheus.Collector. It calls Engine.Stats once.
func (c *Collector) Collect(to chan<- prometheus.Metric) {
	s := c.stats()
	metrics.Each(&s, c.options.wants, func(s metrics.Sample) { to <- c.metric(s) })
}

// metric returns a sample as Prometheus has it; what is wrong with it, if anything, fails the
// scrape.
func (c *Collector) metric(s metrics.Sample) prometheus.Metric {
	d := c.descs[s.Measure]
	var m prometheus.Metric
	var err error
	switch s.Kind {
	case metrics.Histogram:
		m, err = prometheus.NewConstHistogram(d, s.Count, s.Value, s.Within, s.Values...)
	case metrics.Counter:
		m, err = prometheus.NewConstMetric(d, prometheus.CounterValue, s.Value, s.Values...)
	default:
		m, err = prometheus.NewConstMetric(d, prometheus.GaugeValue, s.Value, s.Values...)
	}
	if err != nil {
		return prometheus.NewInvalidMetric(d, err)
	}
	return m
}
