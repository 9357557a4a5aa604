package main

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"

	"github.com/spillway-db/spillway/diag"
)

// maxNotes bounds how many different notes are kept.
const maxNotes = 32

// notes collects warnings for the end of the output, each message once, with the attributes of its
// first record and the number of records. As a slog.Handler it takes the engine's. The zero value is
// empty. It is safe for concurrent use; its mutex is a leaf.
type notes struct {
	mu  sync.Mutex
	all []*note // in the order in which they first came
}

type note struct {
	key, text string
	times     int
}

// Enabled reports whether a level is kept.
func (n *notes) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelWarn }

// Handle keeps a record. Records with a remedy are warnings about the machine, which each engine
// that is opened logs again: their number means nothing.
func (n *notes) Handle(_ context.Context, r slog.Record) error {
	var attrs []string
	w := diag.Warning{What: strings.TrimPrefix(r.Message, "spillway: ")}
	r.Attrs(func(a slog.Attr) bool {
		switch a.Key {
		case "remedy":
			w.Remedy = a.Value.String()
		case "space":
			w.Space = a.Value.String()
		}
		attrs = append(attrs, fmt.Sprintf("%s %v", a.Key, a.Value))
		return true
	})
	if w.Remedy != "" {
		n.add(w.String(), w.String())
		return nil
	}
	text := w.What
	if len(attrs) > 0 {
		text += ": " + strings.Join(attrs, ", ")
	}
	n.count(r.Message, text, 1)
	return nil
}

// add keeps a text, unless there is one of this key already.
func (n *notes) add(key, text string) { n.count(key, text, 0) }

// count keeps a text, and counts a text of the same key that came before.
func (n *notes) count(key, text string, times int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, e := range n.all {
		if e.key == key {
			e.times += times
			return
		}
	}
	if len(n.all) < maxNotes {
		n.all = append(n.all, &note{key, strings.Join(strings.Fields(text), " "), times})
	}
}

// WithAttrs returns n: the engine does not use it.
func (n *notes) WithAttrs([]slog.Attr) slog.Handler { return n }

// WithGroup returns n.
func (n *notes) WithGroup(string) slog.Handler { return n }

// lines returns the notes in the order in which they first came.
func (n *notes) lines() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	out := make([]string, len(n.all))
	for i, e := range n.all {
		out[i] = e.text
		if e.times > 1 {
			out[i] += fmt.Sprintf(" (%d times)", e.times)
		}
	}
	return out
}
