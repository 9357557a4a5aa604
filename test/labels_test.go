package test

import (
	"bytes"
	"maps"
	"regexp"
	"runtime/pprof"
	"slices"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/test/busyengine"
)

var (
	ofProfile = regexp.MustCompile(`"` + labels.Key + `":"([^"]*)"`)
	frame     = regexp.MustCompile(`(?m)^#\t0x[0-9a-f]+\t(\S+)\+0x`)
)

// begun returns the function that a goroutine of a profile began with, and how deep its stack is.
func begun(stack string) (f string, deep int) {
	var frames []string
	for _, m := range frame.FindAllStringSubmatch(stack, -1) {
		frames = append(frames, m[1])
	}
	for len(frames) > 0 {
		last := frames[len(frames)-1]
		if strings.Contains(last, "spillway-db/spillway") {
			return last, len(frames)
		}
		if !strings.HasPrefix(last, "sync.") && !strings.HasPrefix(last, "time.") && !strings.HasPrefix(last, "context.") {
			return "", 0 // another's: a test's, or the runtime's
		}
		frames = frames[:len(frames)-1] // as of WaitGroup.Go
	}
	return "", 0
}

// While an engine works, each goroutine that it started has a label that says what it does.
func TestGoroutinesAreLabelled(t *testing.T) {
	eng := busyengine.Open(t, nil)
	done := make(chan error, 1)
	go func() { done <- busyengine.Work(t.Context(), eng, testseed.One(t), testseed.Rounds(150, 60)) }()
	seen := map[string]bool{}
	for over := false; !over; {
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
			over = true
		default:
		}
		var profile bytes.Buffer
		if err := pprof.Lookup("goroutine").WriteTo(&profile, 1); err != nil {
			t.Fatal(err)
		}
		for stack := range strings.SplitSeq(profile.String(), "\n\n") {
			f, deep := begun(stack)
			if f == "" || strings.Contains(f, "spillway/test.") || strings.Contains(f, "busyengine.") {
				continue
			}
			// One that has not begun its first line, or is in it, has no label yet: its first line is Set.
			first := deep <= 1 || strings.Contains(stack, "internal/labels.Label.Set+")
			of := ofProfile.FindStringSubmatch(stack)
			if of != nil {
				seen[of[1]] = true
			} else if !first {
				t.Errorf("a goroutine has no label:\n%s", stack)
			}
		}
	}
	for _, want := range []labels.Label{labels.Monitor, labels.WatchGPUs, labels.Trim} {
		if !seen[want.String()] {
			t.Errorf("no goroutine with the label %q was seen, only %q", want, slices.Sorted(maps.Keys(seen)))
		}
	}
	closeEngine(t, eng)
}
