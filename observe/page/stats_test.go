package page

import (
	"testing"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/tier"
)

// TestFill: edges have the figures of the statistics in seconds and GiB/s, and each counts in one
// direction.
func TestFill(t *testing.T) {
	gpu, host, disk := tier.ID{Kind: tier.GPU}, tier.ID{Kind: tier.Host}, tier.ID{Kind: tier.Disk}
	var stats spillway.Stats
	stats.Edges = []convert.EdgeStats{
		{From: gpu, To: host, Bytes: 1 << 30, Busy: 500 * time.Millisecond, P50: time.Millisecond},
		{From: gpu, To: disk, Bytes: 2},
		{From: disk, To: host, Bytes: 40},
		{From: host, To: gpu, Bytes: 800},
		{From: gpu, To: tier.ID{Kind: tier.GPU, Ordinal: 1}, Bytes: 16_000},
	}
	var r Run
	r.Fill(stats)
	e := r.Edges[0]
	if e.From != "gpu:0" || e.To != "host:0" || e.Seconds != 0.5 || e.GiBPerS != 2 || e.P50 != 0.001 {
		t.Errorf("%+v", e)
	}
	if down, up, within := r.Moved(); down != 1<<30+2 || up != 840 || within != 16_000 {
		t.Errorf("%d bytes down, %d up and %d within a tier", down, up, within)
	}
}
