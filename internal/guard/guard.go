// Package guard calls functions of users. A panic of theirs must leave our own state sound and
// other users served. So it ends at our boundary: as an error where the caller can get one, and as
// a line in the log elsewhere.
//
// A broken lock order (lockrank.Violation) is our own bug and goes on, and so does
// runtime.Goexit.
//
// A Gate counts calls in progress, so that Close can wait for them; a List calls subscribers.
package guard

import (
	"context"
	"fmt"
	"log/slog"
	"math/bits"
	"runtime/debug"
	"sync"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/lockrank"
)

// PanicError is a panic of a function that a user has given.
type PanicError struct {
	What  string // which function
	Value any
	Stack []byte
}

func (e *PanicError) Error() string {
	return fmt.Sprintf("%s panicked: %v\n%s", e.What, e.Value, e.Stack)
}

// Unwrap returns the panic's value if that is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// Error is deferred: it makes a panic the function's error. What names the user's function
// that may panic.
func Error(err *error, what string) {
	if p := recover(); p != nil {
		*err = caught(p, what)
	}
}

func caught(p any, what string) *PanicError {
	if v, ours := p.(lockrank.Violation); ours {
		panic(v)
	}
	return &PanicError{What: what, Value: p, Stack: debug.Stack()}
}

// Log writes panics to a log. Of a function that panics again and again the first is
// written, then the second, the fourth and so on; other functions count by themselves. The zero
// value is ready and writes to slog.Default. It is safe for concurrent use.
type Log struct {
	Logger *slog.Logger
	counts sync.Map // *atomic.Uint64 by what panicked
}

// Recover is deferred: it ends a panic, and writes it to the log.
func (l *Log) Recover(what string) {
	if p := recover(); p != nil {
		l.Write(caught(p, what))
	}
}

// Do calls f, and reports whether it returned.
func (l *Log) Do(what string, f func()) (returned bool) {
	defer l.Recover(what)
	f()
	return true
}

// Write writes a panic to the log.
func (l *Log) Write(e *PanicError) {
	count, _ := l.counts.LoadOrStore(e.What, new(atomic.Uint64))
	n := count.(*atomic.Uint64).Add(1)
	if bits.OnesCount64(n) > 1 {
		return
	}
	Logger(l.Logger).Error("spillway: a function of the program's panicked; it is ignored",
		"function", e.What, "panic", e.Value, "panics", n, "stack", string(e.Stack))
}

// Logger returns a logger that writes where l does; nil means slog.Default. Its calls return also
// if l's handler panics. That line is silently lost, because there is no place left to report it.
func Logger(l *slog.Logger) *slog.Logger {
	if l == nil {
		l = slog.Default()
	}
	if _, guarded := l.Handler().(handler); guarded {
		return l
	}
	return slog.New(handler{l.Handler()})
}

// handler is a handler of the program's, whose panics end here.
type handler struct{ inner slog.Handler }

// quiet is deferred: it ends a panic.
func quiet() {
	if p := recover(); p != nil {
		_ = caught(p, "the log's handler")
	}
}

func (h handler) Enabled(ctx context.Context, level slog.Level) (enabled bool) {
	defer quiet()
	return h.inner.Enabled(ctx, level)
}

func (h handler) Handle(ctx context.Context, r slog.Record) error {
	lockrank.AssertNone("a line is logged")
	defer quiet()
	return h.inner.Handle(ctx, r)
}

func (h handler) WithAttrs(attrs []slog.Attr) (with slog.Handler) {
	with = h // if it panics
	defer quiet()
	return handler{h.inner.WithAttrs(attrs)}
}

func (h handler) WithGroup(name string) (with slog.Handler) {
	with = h
	defer quiet()
	return handler{h.inner.WithGroup(name)}
}
