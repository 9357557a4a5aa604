package thread

import (
	"maps"
	"testing"
)

// TestCPUTimes: each CPU's own line counts, with the time that the host gave to others, and lines that
// are not understood do not.
func TestCPUTimes(t *testing.T) {
	const text = `cpu  1373485 37963 495528 631861 9318 0 7737 2112 0 0
cpu0 100 20 30 4000 500 6 7 8 90 1
cpu12 1 2 3 4
cpu3 1 2 x 4 5
cpu4 1 2
cpu5 1 2 -3 4 5
cpu-6 1 2 3 4 5
cpus 1 2 3 4 5
intr 103089943 0 0 0
`
	want := map[int]CPUTime{0: {Busy: 100 + 20 + 30 + 6 + 7 + 8, Idle: 4500}, 12: {Busy: 6, Idle: 4}}
	if got := CPUTimes(text); !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if got := CPUTimes(""); len(got) != 0 {
		t.Errorf("%v of an empty text", got)
	}
}
