package progress

import (
	"bytes"
	"math"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/tier"
)

func stats() spillway.Stats {
	return spillway.Stats{Spaces: []spillway.SpaceStats{
		{ID: tier.ID{Kind: tier.GPU}, Capacity: 100, Usage: tier.Usage{Live: 40, Reserved: 10}},
		{ID: tier.ID{Kind: tier.Host}, Capacity: 100, Usage: tier.Usage{Live: 25}},
		{ID: tier.ID{Kind: tier.Host, Ordinal: 1}, Capacity: 100, Usage: tier.Usage{Live: 25}},
	}}
}

// TestOccupancy: tiers are summed, and those that are not there are not named.
func TestOccupancy(t *testing.T) {
	if got := occupancy(stats()); got != "gpu 50% host 25%" {
		t.Errorf("got %q", got)
	}
	if got := held(stats()); got != "gpu 50 B host 50 B" {
		t.Errorf("got %q", got)
	}
}

// TestFitting: what has no room on the line is left out, the least important first.
func TestFitting(t *testing.T) {
	for wide, want := range map[int]string{
		200: "load, gpu 57.1 MiB disk 1.0 GiB, 1.2 GiB/s, 3s left", 80: "load, gpu 90% disk 3%, 1.2 GiB/s, 3s left", 70: "load, gpu 90% disk 3%, 3s left",
		60: "load, gpu 90% disk 3%", 40: "load", 10: "load",
	} {
		if got := fitting(wide, "load", "gpu 57.1 MiB disk 1.0 GiB", "gpu 90% disk 3%", "1.2 GiB/s", "3s left"); got != want {
			t.Errorf("%d columns: %q, want %q", wide, got, want)
		}
	}
	if got := fitting(80, "load", "gpu 1 B", "gpu 1%", "", ""); got != "load, gpu 1 B" {
		t.Errorf("got %q", got)
	}
}

// TestLeft: the time that is left is a guess only when something has been done.
func TestLeft(t *testing.T) {
	for _, c := range []struct {
		since       time.Duration
		done, steps int64
		want        string
	}{
		{10 * time.Second, 25, 100, "30s left"}, {10 * time.Second, 99, 100, "1s left"}, {10 * time.Second, 0, 100, ""},
		{10 * time.Second, 5, -1, ""}, {10 * time.Second, 100, 100, ""}, {time.Millisecond, 5, 100, ""},
	} {
		if got := left(c.since, c.done, c.steps); got != c.want {
			t.Errorf("%+v: %q", c, got)
		}
	}
}

// TestRate: it is what was moved in the time between two looks.
func TestRate(t *testing.T) {
	b, at, s := new(Bar), time.Unix(100, 0), stats()
	for i, want := range []float64{0, 100, 100, 250} { // the third look is too soon
		at = at.Add([]time.Duration{0, time.Second, time.Millisecond, 2 * time.Second}[i])
		s.Edges = []convert.EdgeStats{{Bytes: []int64{1000, 1100, 1100, 1600}[i]}}
		if b.measure(s, at); math.Abs(b.rate-want) > 1 {
			t.Errorf("look %d: %v bytes a second, want %v", i, b.rate, want)
		}
	}
}

// lockedBuffer may be written by the bar's goroutine.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// TestBar draws phases of known and unknown length, with the occupancy, and
// clears its line.
func TestBar(t *testing.T) {
	before := runtime.NumGoroutine()
	var w lockedBuffer
	b := New(&w, stats)
	b.Begin("load", -1)
	for range 10 {
		b.Step()
	}
	b.Begin("pass-1", 4)
	b.Step()
	b.describe()  // the ticker's work, now
	for range 5 { // one more than was promised
		b.Step()
	}
	b.Begin("drain", 0)
	b.Step()
	b.Close()
	out := w.String()
	if !strings.Contains(out, "load") || !strings.Contains(out, "pass-1") {
		t.Errorf("drew %q", out)
	}
	if i := strings.LastIndex(out, "\r"); i < 0 || strings.TrimSpace(out[i:]) != "" {
		t.Errorf("the line is not cleared: %q", out)
	}
	for runtime.NumGoroutine() > before {
		runtime.Gosched()
	}
}

// TestNoBar: the zero value draws nothing, and only a terminal is one.
func TestNoBar(t *testing.T) {
	var b Bar
	b.Begin("load", 3)
	b.Step()
	b.Close()
	if OnTerminal(new(bytes.Buffer)) {
		t.Error("a buffer is a terminal")
	}
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if OnTerminal(f) {
		t.Error("a file is a terminal")
	}
}
