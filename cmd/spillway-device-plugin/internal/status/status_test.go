package status

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
)

// A problem is logged once until the subject is well or has another problem.
func TestWarn(t *testing.T) {
	var log bytes.Buffer
	s := New(slog.New(slog.NewTextHandler(&log, nil)))
	for _, problem := range []string{"", "down", "down", "slow", "", "down"} {
		s.Warn("server", problem)
		s.Warn("client", "down")
		if got := s.Problem("server"); got != problem {
			t.Errorf("the problem is %q, want %q", got, problem)
		}
	}
	s.Set("server", "down again")
	if got := s.Problem("server"); got != "down again" {
		t.Error(got)
	}
	for text, want := range map[string]int{"msg=down\n": 3, "msg=slow\n": 1, "again": 0} {
		if got := strings.Count(log.String(), text); got != want {
			t.Errorf("%q is logged %d times, want %d:\n%s", text, got, want, &log)
		}
	}
}
