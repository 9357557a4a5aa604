// Package spillwayprom exports the statistics of an engine to Prometheus through
// github.com/prometheus/client_golang. It is a module of its own, so that other programs do not need
// that library.
//
//	Engine.Stats ──▶ Collector ──▶ the program's prometheus.Registry ──▶ promhttp
//
// A Collector reads Engine.Stats once in each scrape and keeps no state. It exports all of Stats: sizes
// in bytes, times in seconds, counters as _total. Counters start at 0 with each engine. The table in
// docs/operating.md lists all metrics.
//
// # Number of series
//
// A space has about twenty series. A pair of spaces between which batches move has about forty, 32 of
// them for its histogram. One GPU, host memory and one disk have less than 400. Two groups grow with
// the work of a program:
//
//   - spillway_work_… has about ten series for each plan, operator and port. The engine distinguishes
//     1,024 of these and counts the rest as plan "(others)". A program that gives each plan a new name
//     adds series with each; Options.WithoutWork omits them.
//   - spillway_blocked_… has five series for each name of a task that has waited. The engine
//     distinguishes 1,024 names and counts the rest as "(others)". Options.WithoutBlocked omits them.
package spillwayprom

import (
	"fmt"
	"maps"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/observe/internal/metrics"
)

// Options select what a Collector exports. The zero value selects everything.
type Options struct {
	// Labels are added to all metrics, such as {"engine": "etl"}, to distinguish the engines of one
	// registry. They must not contain the metrics' own labels or le, the label of buckets: otherwise
	// Register returns an error.
	Labels prometheus.Labels
	// WithoutWork omits the moves of each plan and operator.
	WithoutWork bool
	// WithoutBlocked omits the waits for room of each name of a task.
	WithoutBlocked bool
}

// Collector is a prometheus.Collector for one engine. It is safe for concurrent use and needs no
// closing. After Engine.Close it exports the last values until the program calls Unregister.
type Collector struct {
	stats  func() spillway.Stats
	filter metrics.Filter
	descs  map[*metrics.Measure]*prometheus.Desc
}

var _ prometheus.Collector = (*Collector)(nil)

// NewCollector returns a Collector that calls stats, the method Stats of an Engine, in each scrape.
// The caller registers it.
func NewCollector(stats func() spillway.Stats, options Options) *Collector {
	labels := maps.Clone(options.Labels)
	c := &Collector{
		stats:  stats,
		filter: metrics.Filter{WithoutWork: options.WithoutWork, WithoutBlocked: options.WithoutBlocked},
		descs:  make(map[*metrics.Measure]*prometheus.Desc),
	}
	_, hasBucketLabel := labels["le"]
	for _, m := range metrics.All(c.filter) {
		c.descs[m] = prometheus.NewDesc(m.Prometheus(), m.Help, m.Labels, labels)
		if hasBucketLabel && m.Kind == metrics.Histogram { // client_golang does not check this
			c.descs[m] = prometheus.NewInvalidDesc(fmt.Errorf(
				"spillwayprom: %s: Options.Labels has le, which is the label of its buckets", m.Prometheus()))
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

// Collect implements prometheus.Collector. It calls Engine.Stats once. An invalid sample makes the
// scrape fail.
func (c *Collector) Collect(to chan<- prometheus.Metric) {
	stats := c.stats()
	metrics.Each(&stats, c.filter, func(s metrics.Sample) {
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
			m = prometheus.NewInvalidMetric(d, err)
		}
		to <- m
	})
}
