package progress

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/tier"
)

// stats are those of an engine that has moved so many bytes. Host memory has two spaces.
func stats(moved int64) spillway.Stats {
	return spillway.Stats{
		Edges: []convert.EdgeStats{{Bytes: moved / 4}, {Bytes: moved - moved/4}},
		Spaces: []spillway.SpaceStats{
			{ID: tier.ID{Kind: tier.GPU}, Capacity: 64 << 20, Usage: tier.Usage{Live: 50 << 20, Reserved: 7 << 20}},
			{ID: tier.ID{Kind: tier.Host}, Capacity: 64 << 20, Usage: tier.Usage{Live: 20 << 20}},
			{ID: tier.ID{Kind: tier.Host, Ordinal: 1}, Capacity: 64 << 20, Usage: tier.Usage{Live: 40 << 20}},
		},
	}
}

// screen is a terminal of one line, which wraps nothing. The bar's goroutine may write to it.
type screen struct {
	mu   sync.Mutex
	all  bytes.Buffer
	line []rune
	at   int
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range string(p) {
		switch {
		case r == '\r':
			s.at = 0
			continue
		case r == '\n':
			s.line, s.at = nil, 0
			continue
		case s.at == len(s.line):
			s.line = append(s.line, r)
		default:
			s.line[s.at] = r
		}
		s.at++
	}
	return s.all.Write(p)
}

func (s *screen) shows() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.TrimRight(string(s.line), " ")
}

// TestBar draws phases of known and unknown length, with the bytes in each tier, and clears its line.
func TestBar(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s screen
		var mu sync.Mutex
		moved := int64(0)
		b := New(&s, func() spillway.Stats {
			mu.Lock()
			defer mu.Unlock()
			return stats(moved)
		})
		shows := func(want string) {
			t.Helper()
			time.Sleep(refresh)
			synctest.Wait()
			if got := s.shows(); got != want {
				t.Errorf("it shows %q, want %q", got, want)
			}
		}
		b.Begin("load", -1)
		b.Step()
		shows("load, gpu 57.0M host 60.0M, 1")
		b.Begin("pass-1", 10)
		b.Step()
		mu.Lock()
		moved = 25 << 20
		mu.Unlock()
		shows("pass-1, 10%, gpu 57.0M host 60.0M, 2s left, 100.0M/s, 1/10")
		shows("pass-1, 10%, gpu 57.0M host 60.0M, 5s left, 1/10") // nothing has moved
		for range 10 {                                            // one more than was promised
			b.Step()
		}
		shows("pass-1, 100%, gpu 57.0M host 60.0M, 10/10")
		b.Begin("drain\x1b[31m", 0)
		shows(`drain\x1b[31m, gpu 57.0M host 60.0M, 0`)
		b.Close()
		if got := s.shows(); got != "" {
			t.Errorf("the line is not cleared: %q", got)
		}
	})
}

// TestNarrow: 80 columns have the share, the bytes in each tier, the time left and the rate, and what
// does not fit is left out.
func TestNarrow(t *testing.T) {
	now := time.Now()
	draw := func(phase string) string {
		var s screen
		b := &Bar{w: &s, stats: func() spillway.Stats { return stats(1234 << 20) }, taken: now.Add(-time.Second)}
		b.Begin(phase, 1000)
		b.begun, b.stepped = now.Add(-time.Minute), 990
		b.draw(now)
		return s.shows()
	}
	want := "pass 10 of 10, 99%, gpu 57.0M host 60.0M, 1s left, 1.2G/s, 990/1000"
	if got := draw("pass 10 of 10"); got != want {
		t.Errorf("%q, want %q", got, want)
	}
	for n := range 79 {
		if got := draw(strings.Repeat("x", n)); len(got) >= 80 {
			t.Errorf("%d columns: %q", len(got), got)
		}
	}
}

// TestSay: a line takes the place of the progress, and without a bar it is printed, too.
func TestSay(t *testing.T) {
	var s screen
	b := &Bar{w: &s, stats: func() spillway.Stats { return stats(0) }}
	b.Begin("load", 10)
	b.draw(time.Now())
	b.Say(&s, "a note")
	if out := s.all.String(); !strings.HasSuffix(out, "\ra note\n") || s.shows() != "" {
		t.Errorf("drew %q", out)
	}
	var plain bytes.Buffer
	if new(Bar).Say(&plain, "a note of \x1b[31m"); plain.String() != `a note of \x1b[31m`+"\n" {
		t.Errorf("without a bar: %q", plain.String())
	}
}

// TestBrief: sizes have six characters at most.
func TestBrief(t *testing.T) {
	for n, want := range map[int64]string{0: "0B", 50: "50B", 1023: "1023B", 1 << 20: "1.0M", 1234 << 20: "1.2G"} {
		if got := brief(n); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
}

// TestNoBar: the zero value draws nothing, and only a terminal is one.
func TestNoBar(t *testing.T) {
	before := runtime.NumGoroutine()
	var b Bar
	b.Begin("load", 3)
	b.Step()
	b.Close()
	if now := runtime.NumGoroutine(); now > before {
		t.Errorf("%d goroutines, and %d before", now, before)
	}
	if OnTerminal(new(bytes.Buffer)) {
		t.Error("a buffer is a terminal")
	}
	f, err := os.Create(fmt.Sprint(t.TempDir(), "/file"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if OnTerminal(f) {
		t.Error("a file is a terminal")
	}
}
