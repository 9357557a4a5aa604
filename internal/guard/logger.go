package guard

import (
	"context"
	"log/slog"

	"github.com/spillway-db/spillway/internal/lockrank"
)

// Logger returns a logger that writes where l does; nil means slog.Default. Its calls return
// also if l's handler panics: that line is lost without a word, for nobody is left to be told.
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
