package labels

import (
	"bytes"
	"runtime/pprof"
	"strings"
	"testing"
)

// A goroutine has the label that was set last, and setting it allocates nothing.
func TestSet(t *testing.T) {
	defer pprof.SetGoroutineLabels(t.Context())
	Monitor.Set()
	if n := testing.AllocsPerRun(100, Transfer.Set); n != 0 {
		t.Errorf("%v allocations", n)
	}
	var profile bytes.Buffer
	if err := pprof.Lookup("goroutine").WriteTo(&profile, 1); err != nil {
		t.Fatal(err)
	}
	if text := profile.String(); !strings.Contains(text, `"spillway":"transfer"`) || strings.Contains(text, `"monitor"`) || Transfer.String() != "transfer" {
		t.Error(text)
	}
}

func BenchmarkSet(b *testing.B) {
	defer pprof.SetGoroutineLabels(b.Context())
	b.ReportAllocs()
	for b.Loop() {
		Transfer.Set()
	}
}

// BenchmarkGoroutine is the limit: what a goroutine costs that does nothing.
func BenchmarkGoroutine(b *testing.B) {
	done := make(chan struct{})
	for b.Loop() {
		go func() { done <- struct{}{} }()
		<-done
	}
}
