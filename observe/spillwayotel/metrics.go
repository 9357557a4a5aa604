package spillwayotel

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/observe/internal/metrics"
)

// Options say what Metrics observes. The zero value means all.
type Options struct {
	// Attributes are on all metrics, such as an engine's name. They tell the engines of one process
	// apart.
	Attributes []attribute.KeyValue
	// WithoutWork leaves out what was moved for each plan and operator: some ten series each, of which
	// an engine keeps 1,024 apart.
	WithoutWork bool
	// WithoutBlocked leaves out how long tasks have waited for room: five series for each name, of
	// which an engine keeps 1,024 apart.
	WithoutBlocked bool
}

// wants reports whether a metric is observed.
func (o Options) wants(m *metrics.Measure) bool {
	return !(o.WithoutWork && m.Part == metrics.Work || o.WithoutBlocked && m.Part == metrics.Blocked)
}

// instruments are those of one metric. A histogram has all three, the others value: what is observed
// in a callback can be no histogram, so it is a gauge of percentiles, a count and a sum.
type instruments struct {
	value, count, sum metric.Observable
}

// Metrics registers instruments with a meter of p that observe what stats returns, which is an
// Engine's Stats: sizes in By, durations in s. stats is called once each time that a reader
// collects, on the reader's goroutine. The caller calls Unregister of what is returned; after the
// engine's Close the last figures are observed until then. On an error nothing is registered.
func Metrics(p metric.MeterProvider, stats func() spillway.Stats, options Options) (metric.Registration, error) {
	options.Attributes = slices.Clone(options.Attributes)
	meter := p.Meter(scope)
	of := make(map[*metrics.Measure]instruments)
	var all []metric.Observable
	var errs []error
	for _, m := range metrics.All() {
		if !options.wants(m) {
			continue
		}
		i, err := instrument(meter, m)
		errs = append(errs, err)
		of[m] = i
		for _, o := range []metric.Observable{i.value, i.count, i.sum} {
			if o != nil {
				all = append(all, o)
			}
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("spillwayotel: %w", err)
	}
	r, err := meter.RegisterCallback(func(_ context.Context, to metric.Observer) error {
		s := stats()
		metrics.Each(&s, options.wants, func(s metrics.Sample) { of[s.Measure].observe(to, s, options.Attributes) })
		return nil
	}, all...)
	if err != nil {
		return nil, fmt.Errorf("spillwayotel: %w", err)
	}
	return r, nil
}

// instrument makes the instruments of a metric.
func instrument(meter metric.Meter, m *metrics.Measure) (i instruments, err error) {
	name, help, unit := m.OpenTelemetry(), metric.WithDescription(m.Help), metric.WithUnit(string(m.Unit))
	whole := m.Unit != metrics.Seconds
	switch {
	case m.Kind == metrics.Histogram:
		var errs [3]error
		i.value, errs[0] = meter.Float64ObservableGauge(name, help, unit)
		i.count, errs[1] = meter.Int64ObservableCounter(name+".count", help, metric.WithUnit("1"))
		i.sum, errs[2] = meter.Float64ObservableCounter(name+".sum", help, unit)
		err = errors.Join(errs[:]...)
	case m.Kind == metrics.Counter && whole:
		i.value, err = meter.Int64ObservableCounter(name, help, unit)
	case m.Kind == metrics.Counter:
		i.value, err = meter.Float64ObservableCounter(name, help, unit)
	case whole:
		i.value, err = meter.Int64ObservableGauge(name, help, unit)
	default:
		i.value, err = meter.Float64ObservableGauge(name, help, unit)
	}
	return i, err
}

// observe passes a sample on.
func (i instruments) observe(to metric.Observer, s metrics.Sample, more []attribute.KeyValue) {
	labels := slices.Clone(more)
	for n, name := range s.Labels {
		labels = append(labels, attribute.String("spillway."+name, s.Values[n]))
	}
	set := metric.WithAttributeSet(attribute.NewSet(labels...))
	switch o := i.value.(type) {
	case metric.Int64Observable:
		to.ObserveInt64(o, int64(s.Value), set)
	case metric.Float64Observable:
		if s.Kind != metrics.Histogram {
			to.ObserveFloat64(o, s.Value, set)
			return
		}
		for q, v := range map[float64]float64{0.5: s.P50, 0.99: s.P99} {
			to.ObserveFloat64(o, v, metric.WithAttributes(append(slices.Clone(labels), attribute.Float64("quantile", q))...))
		}
		to.ObserveInt64(i.count.(metric.Int64Observable), int64(s.Count), set)
		to.ObserveFloat64(i.sum.(metric.Float64Observable), s.Value, set)
	}
}
