package labels

import (
	"bytes"
	"os"
	"regexp"
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

// docs/operating.md has the labels, and no other.
func TestDocs(t *testing.T) {
	code, err := os.ReadFile("labels.go")
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile("../../docs/operating.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(page), "## Profiles\n")
	section, _, _ = strings.Cut(section, "\n## ")
	all := regexp.MustCompile(`= value\("(.+)"\)`).FindAllStringSubmatch(string(code), -1)
	for _, m := range all {
		if !strings.Contains(section, "| `"+m[1]+"` |") {
			t.Errorf("the page lacks %s", m[1])
		}
	}
	if rows := strings.Count(section, "\n| `") - 1; rows != len(all) || rows == 0 {
		t.Errorf("%d rows for %d labels", rows, len(all))
	}
}
