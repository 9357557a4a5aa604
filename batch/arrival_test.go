package batch

import (
	"testing"
	"time"
)

// A time that is kept in 32 bits is found again for two years, to 17 ms.
func TestTicks(t *testing.T) {
	now := time.Date(2026, 11, 25, 13, 0, 0, 0, time.UTC).UnixNano()
	for _, ago := range []time.Duration{0, time.Millisecond, time.Hour, 365 * 24 * time.Hour, 2 * 365 * 24 * time.Hour} {
		at := now - int64(ago)
		if got := ticksOf(at).before(now); time.Duration(got-at).Abs() > 17*time.Millisecond {
			t.Errorf("%v ago: %v off", ago, time.Duration(got-at))
		}
	}
}
