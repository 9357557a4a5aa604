package progress

import (
	"bytes"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/spillway-db/spillway"
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
