package spillwayprom_test

import (
	"context"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/observe/spillwayprom"
)

func ExampleNewCollector() {
	dir, err := os.MkdirTemp("", "spill")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	eng, err := spillway.Open(context.Background(), spillway.Config{
		GPUs:       []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(1 << 20)}},
		HostMemory: spillway.Bytes(2 << 20),
		Disks:      []spillway.DiskConfig{{Dir: dir, Capacity: spillway.Bytes(16 << 20)}},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer eng.Close()

	registry := prometheus.NewRegistry()
	registry.MustRegister(spillwayprom.NewCollector(eng.Stats, spillwayprom.Options{Labels: prometheus.Labels{"engine": "etl"}}))
	server := httptest.NewServer(promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	defer server.Close()

	answer, err := http.Get(server.URL)
	if err != nil {
		log.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		log.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, "spillway_space_capacity_bytes") {
			fmt.Print(line)
		}
	}
	// Output:
	// # HELP spillway_space_capacity_bytes Size of a space, in bytes.
	// # TYPE spillway_space_capacity_bytes gauge
	// spillway_space_capacity_bytes{engine="etl",space="disk:0",tier="disk"} 1.6777216e+07
	// spillway_space_capacity_bytes{engine="etl",space="gpu:0",tier="gpu"} 1.048576e+06
	// spillway_space_capacity_bytes{engine="etl",space="host:0",tier="host"} 2.097152e+06
}
