package guard_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"runtime"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/lockrank"
)

func TestError(t *testing.T) {
	boom := errors.New("boom")
	call := func(f func()) (err error) {
		defer guard.Error(&err, "a strategy")
		f()
		return nil
	}
	if err := call(func() {}); err != nil {
		t.Error(err)
	}
	var p *guard.PanicError
	err := call(func() { panic(boom) })
	if !errors.Is(err, boom) || !errors.As(err, &p) || !strings.Contains(err.Error(), "a strategy panicked: boom\n") {
		t.Errorf("a panic came as %v", err)
	}
	defer func() {
		if _, ok := recover().(lockrank.Violation); !ok {
			t.Error("a broken lock order was hidden")
		}
	}()
	_ = call(func() { panic(lockrank.Violation("broken")) })
}

// TestLog: of panics that repeat the first, the second, the fourth … are written.
func TestLog(t *testing.T) {
	var out bytes.Buffer
	l := guard.Log{Logger: slog.New(slog.NewTextHandler(&out, nil))}
	for range 10 {
		if l.Do("a listener", func() { panic("boom") }) {
			t.Error("it says that it returned")
		}
	}
	if n := strings.Count(out.String(), "panic=boom"); n != 4 || !strings.Contains(out.String(), `function="a listener"`) {
		t.Errorf("%d lines: %s", n, out.String())
	}
	if !l.Do("a listener", func() {}) {
		t.Error("it says that it did not return")
	}
	over := make(chan struct{})
	go func() { // Goexit is no panic
		defer close(over)
		l.Do("a listener", runtime.Goexit)
		t.Error("Goexit was stopped")
	}()
	<-over
}

// TestLogOfSeveralFunctions: a function that has panicked often does not hide the first panics of
// others, and none of them hides its later ones.
func TestLogOfSeveralFunctions(t *testing.T) {
	var out bytes.Buffer
	l := guard.Log{Logger: slog.New(slog.NewTextHandler(&out, nil))}
	for range 2 {
		l.Do("a listener", func() { panic("boom") })
	}
	for range 4 {
		l.Do("an observer", func() { panic("boom") })
		l.Do("a clock", func() { panic("boom") })
	}
	l.Do("a listener", func() { panic("boom") })
	for what, want := range map[string]int{"a listener": 2, "an observer": 3, "a clock": 3} {
		if n := strings.Count(out.String(), `function="`+what+`" panic=boom`); n != want {
			t.Errorf("%s has %d lines, want %d", what, n, want)
		}
	}
}

// brokenHandler panics with what it is given for each record.
type brokenHandler struct {
	slog.Handler
	with  any
	calls *int
}

func (h brokenHandler) Handle(context.Context, slog.Record) error {
	*h.calls++
	panic(h.with)
}

// TestLogPanics: a log whose handler panics, also as the very function that is called, does
// not end the program; a broken lock order there is not hidden.
func TestLogPanics(t *testing.T) {
	broken := func(with any) (*guard.Log, *int) {
		calls := new(int)
		return &guard.Log{Logger: slog.New(brokenHandler{slog.NewTextHandler(&bytes.Buffer{}, nil), with, calls})}, calls
	}
	l, calls := broken("boom")
	over := make(chan struct{})
	go func() { // as from a timer: there is nobody to recover
		defer close(over)
		for range 2 {
			if l.Do("Config.LongWait", func() { l.Logger.Warn("it takes long") }) {
				t.Error("it says that it returned")
			}
		}
	}()
	<-over
	if *calls != 4 { // each time the function's own, and the one that tells of its panic
		t.Errorf("the handler was called %d times", *calls)
	}
	if called := false; !l.Do("a listener", func() { called = true }) || !called {
		t.Error("a later call did not work")
	}

	l, _ = broken(lockrank.Violation("broken"))
	defer func() {
		if _, ok := recover().(lockrank.Violation); !ok {
			t.Error("a broken lock order was hidden")
		}
	}()
	l.Do("a listener", func() { panic("boom") })
}

// brokenEverywhere panics in each of a handler's methods.
type brokenEverywhere struct{}

func (brokenEverywhere) Enabled(context.Context, slog.Level) bool  { panic("boom") }
func (brokenEverywhere) Handle(context.Context, slog.Record) error { panic("boom") }
func (brokenEverywhere) WithAttrs([]slog.Attr) slog.Handler        { panic("boom") }
func (brokenEverywhere) WithGroup(string) slog.Handler             { panic("boom") }

// TestLogger: whatever of a handler panics, the calls of the logger return, and what it can
// write is written.
func TestLogger(t *testing.T) {
	l := guard.Logger(slog.New(brokenEverywhere{}))
	if l.Enabled(t.Context(), slog.LevelError) {
		t.Error("it is enabled")
	}
	if err := l.Handler().Handle(t.Context(), slog.Record{}); err != nil {
		t.Error(err)
	}
	l.With("a", 1).WithGroup("g").Error("lost")
	if guard.Logger(l) != l {
		t.Error("it is guarded twice")
	}
	calls := 0
	l = guard.Logger(slog.New(brokenHandler{slog.NewTextHandler(&bytes.Buffer{}, nil), "boom", &calls}))
	l.Error("lost")
	if l.Debug("not wanted"); calls != 1 {
		t.Errorf("the handler was called %d times", calls)
	}
	var out bytes.Buffer
	guard.Logger(slog.New(slog.NewTextHandler(&out, nil))).With("a", 1).WithGroup("g").Error("written", "b", 2)
	if text := out.String(); !strings.Contains(text, "msg=written a=1 g.b=2") {
		t.Error(text)
	}
	defer func() {
		if _, ok := recover().(lockrank.Violation); !ok {
			t.Error("a broken lock order was hidden")
		}
	}()
	broken := brokenHandler{slog.NewTextHandler(&bytes.Buffer{}, nil), lockrank.Violation("broken"), &calls}
	guard.Logger(slog.New(broken)).Error("lost")
}

// TestLoggerUnderALock: nothing may be logged with a lock held, whatever the handler.
func TestLoggerUnderALock(t *testing.T) {
	if !invariants.Enabled {
		t.Skip("needs -tags invariants, which checks ranks")
	}
	defer func() {
		if _, ok := recover().(lockrank.Violation); !ok {
			t.Error("a line was logged with a lock held")
		}
	}()
	var mu lockrank.Mutex[lockrank.Device]
	mu.Lock()
	defer mu.Unlock()
	_ = guard.Logger(slog.New(slog.DiscardHandler)).Handler().Handle(t.Context(), slog.Record{})
}
