package spillway_test

import (
	"log/slog"
	"testing"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/tier"
)

// TestMarks: each tier's marks are those of the configuration.
func TestMarks(t *testing.T) {
	marks := map[tier.Kind]tier.Fractions{
		tier.GPU:  {Limit: 0.75, Trigger: 0.5, Stop: 0.25},
		tier.Host: {Limit: 0.875, Trigger: 0.625, Stop: 0.375},
		tier.Disk: {Limit: 1, Trigger: 0.5625, Stop: 0.3125},
	}
	eng, err := spillway.Open(t.Context(), spillway.Config{
		GPUs: []spillway.GPU{{Backend: spillway.Sim, Memory: 1 << 20}}, HostMemory: 1 << 20,
		Disks:    []spillway.Disk{{Dir: t.TempDir(), Capacity: 1 << 20}},
		GPUMarks: marks[tier.GPU], HostMarks: marks[tier.Host], DiskMarks: marks[tier.Disk],
		Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	share := func(s *tier.Space, f float64) int64 { return int64(float64(s.Capacity()) * f) }
	for _, s := range eng.Spaces() {
		m := marks[s.Kind()]
		if s.Limit() != share(s, m.Limit) || s.Trigger() != share(s, m.Trigger) || s.Stop() != share(s, m.Stop) {
			t.Errorf("%s of %d bytes has the limit %d, the trigger %d and the stop mark %d; want %+v of it",
				s.ID(), s.Capacity(), s.Limit(), s.Trigger(), s.Stop(), m)
		}
	}
	closeClean(t, eng)
}
