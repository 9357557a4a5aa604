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

// Options select what Metrics observes. The zero value selects everything.
type Options struct {
	// Attributes are added to all metrics, such as an engine's name, to distinguish the engines of one
	// process.
	Attributes []attribute.KeyValue
	// WithoutWork omits the moves of each plan and operator: about ten series each, of which an engine
	// distinguishes 1,024.
	WithoutWork bool
	// WithoutBlocked omits the waits for room of each name of a task: five series each, of which an
	// engine distinguishes 1,024.
	WithoutBlocked bool
}

// instruments belong to one metric. Only a histogram has count and sum: a callback cannot observe a
// histogram, so value is a gauge of its percentiles then.
type instruments struct {
	value      metric.Observable
	count, sum metric.Observable
}

// Metrics registers instruments with a meter of p that observe the result of stats, the method Stats
// of an Engine: sizes in By, durations in s. Each collection of a reader calls stats once, on the
// reader's goroutine. The caller calls Unregister of the result; until then the last values remain
// visible after Engine.Close. On an error nothing is registered.
func Metrics(p metric.MeterProvider, stats func() spillway.Stats, options Options) (metric.Registration, error) {
	attributes := slices.Clone(options.Attributes)
	filter := metrics.Filter{WithoutWork: options.WithoutWork, WithoutBlocked: options.WithoutBlocked}
	meter := p.Meter(scope)
	of := make(map[*metrics.Measure]instruments)
	var all []metric.Observable
	for _, m := range metrics.All(filter) {
		i, err := instrument(meter, m)
		if err != nil {
			return nil, fmt.Errorf("spillwayotel: %w", err)
		}
		of[m] = i
		if all = append(all, i.value); m.Kind == metrics.Histogram {
			all = append(all, i.count, i.sum)
		}
	}
	r, err := meter.RegisterCallback(func(_ context.Context, to metric.Observer) error {
		s := stats()
		metrics.Each(&s, filter, func(s metrics.Sample) { of[s.Measure].observe(to, s, attributes) })
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
	switch counter, whole := m.Kind == metrics.Counter, m.Unit != metrics.Seconds; {
	case m.Kind == metrics.Histogram:
		var errs [3]error
		i.value, errs[0] = meter.Float64ObservableGauge(name, help, unit)
		i.count, errs[1] = meter.Int64ObservableCounter(name+".count", help, metric.WithUnit("1"))
		i.sum, errs[2] = meter.Float64ObservableCounter(name+".sum", help, unit)
		err = errors.Join(errs[:]...)
	case counter && whole:
		i.value, err = meter.Int64ObservableCounter(name, help, unit)
	case counter:
		i.value, err = meter.Float64ObservableCounter(name, help, unit)
	case whole:
		i.value, err = meter.Int64ObservableGauge(name, help, unit)
	default:
		i.value, err = meter.Float64ObservableGauge(name, help, unit)
	}
	return i, err
}

// observe reports a sample.
func (i instruments) observe(to metric.Observer, s metrics.Sample, attributes []attribute.KeyValue) {
	labels := slices.Clone(attributes)
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
			to.ObserveFloat64(o, v, set, metric.WithAttributes(attribute.Float64("quantile", q)))
		}
		to.ObserveInt64(i.count.(metric.Int64Observable), int64(s.Count), set)
		to.ObserveFloat64(i.sum.(metric.Float64Observable), s.Value, set)
	}
}
