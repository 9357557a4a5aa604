package spillwayotel_test

import (
	"context"
	"fmt"
	"log"
	"log/slog"
	"os"

	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/observe/spillwayotel"
)

// A program sets up the SDK with its exporters, and passes the providers on.
func Example() {
	dir, err := os.MkdirTemp("", "spill")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	exporter, reader := tracetest.NewInMemoryExporter(), metric.NewManualReader()
	traces := trace.NewTracerProvider(trace.WithSyncer(exporter))
	meters := metric.NewMeterProvider(metric.WithReader(reader))

	ctx := context.Background()
	eng, err := spillway.Open(ctx, spillway.Config{
		GPUs:       []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(1 << 20)}},
		HostMemory: spillway.Bytes(2 << 20),
		Disks:      []spillway.DiskConfig{{Dir: dir, Capacity: spillway.Bytes(16 << 20)}},
		Events:     spillway.Tee(spillway.LogEvents(slog.Default()), spillwayotel.Spans(traces, spillwayotel.SpanOptions{})),
	})
	if err != nil {
		log.Fatal(err)
	}
	defer eng.Close()
	registered, err := spillwayotel.Metrics(meters, eng.Stats, spillwayotel.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer registered.Unregister()

	if err := eng.RunTask(ctx, spillway.Task{Operator: "sort", Output: 4096}, func(context.Context, *spillway.Grant, []*spillway.Handle) error { return nil }); err != nil {
		log.Fatal(err)
	}
	for _, span := range exporter.GetSpans() {
		fmt.Println(span.Name)
	}
	var data metricdata.ResourceMetrics
	if err := reader.Collect(ctx, &data); err != nil {
		log.Fatal(err)
	}
	fmt.Println(data.ScopeMetrics[0].Metrics[1].Name)
	// Output:
	// spillway admission
	// spillway task
	// spillway.space.capacity
}
