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
	"unicode/utf8"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/size"
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
	if got := held(stats(), size.Approx); got != "gpu 50 B host 50 B" {
		t.Errorf("got %q", got)
	}
}

// TestFitting: what has no room on the line is shortened or left out, the least important first.
func TestFitting(t *testing.T) {
	full := spillway.Stats{Spaces: []spillway.SpaceStats{
		{ID: tier.ID{Kind: tier.GPU}, Capacity: 64 << 20, Usage: tier.Usage{Live: 57 << 20}},
		{ID: tier.ID{Kind: tier.Host}, Capacity: 64 << 20, Usage: tier.Usage{Live: 60 << 20}},
		{ID: tier.ID{Kind: tier.Disk}, Capacity: 10 << 30, Usage: tier.Usage{Live: 1234 << 20}},
	}}
	rate := 1.25 * (1 << 30)
	for room, want := range map[int]string{
		200: "pass 3 of 10, gpu 57.0 MiB host 60.0 MiB disk 1.2 GiB, 1.2 GiB/s, 12s left",
		66:  "pass 3 of 10, gpu 57M host 60M disk 1.2G, 1.2G/s, 12s left", // of 80 columns
		56:  "pass 3 of 10, gpu 89% host 94% disk 12%, 12s left",
		40:  "pass 3 of 10, gpu 89% host 94% disk 12%",
		20:  "pass 3 of 10", 5: "pass 3 of 10",
	} {
		if got := fitting(room, "pass 3 of 10", full, rate, "12s left"); got != want {
			t.Errorf("%d columns: %q, want %q", room, got, want)
		}
	}
	if got := fitting(66, "pass 10 of 10", full, rate, "1h2m3s left"); !strings.Contains(got, "1.2G/s, 1h2m3s left") || !strings.Contains(got, "disk 1.2G") {
		t.Errorf("a long one: %q", got)
	}
	if got := fitting(66, "load", stats(), 0, ""); got != "load, gpu 50 B host 50 B" {
		t.Errorf("got %q", got)
	}
}

// TestBrief: sizes have four characters or so.
func TestBrief(t *testing.T) {
	for n, want := range map[int64]string{0: "0B", 50: "50B", 1023: "1023B", 1 << 20: "1.0M", 57<<20 + 1: "57M", 999 << 20: "999M", 1234 << 20: "1.2G"} {
		if got := brief(n); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
}

// TestNarrow: at 80 columns the line has the share, the bytes in each tier, the rate and the time left,
// and no more columns than there are.
func TestNarrow(t *testing.T) {
	var w lockedBuffer
	b := &Bar{w: &w, stats: stats}
	b.Begin("pass 10 of 10", 1000)
	b.mu.Lock()
	b.bar.Describe(strings.Repeat("x", 80-b.beside))
	b.mu.Unlock()
	for range 1000 - 1 {
		b.Step()
	}
	b.mu.Lock()
	_ = b.bar.RenderBlank()
	b.mu.Unlock()
	out := w.String()
	if !strings.Contains(out, "%") {
		t.Errorf("no share in %q", out)
	}
	for line := range strings.SplitSeq(out, "\r") {
		if n := utf8.RuneCountInString(line); n > 80 {
			t.Errorf("%d columns: %q", n, line)
		}
	}
}

// TestSay: a line goes where the bar is, which is cleared before.
func TestSay(t *testing.T) {
	var w lockedBuffer
	b := &Bar{w: &w, stats: stats}
	b.Begin("load", 10)
	b.Step()
	b.Say(&w, "a note")
	if out := w.String(); !strings.HasSuffix(out, "\ra note\n") {
		t.Errorf("drew %q", out)
	}
	var plain lockedBuffer
	if new(Bar).Say(&plain, "a note of \x1b[31m"); plain.String() != `a note of \x1b[31m`+"\n" {
		t.Errorf("without a bar: %q", plain.String())
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
