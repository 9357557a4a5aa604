package main

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"

	"github.com/spillway-db/spillway/diag"
)

// maxNotes bounds how many different warnings are kept.
const maxNotes = 32

// notes is a slog.Handler that keeps the engine's warnings for the end of the
// output: each message once, with the attributes it came with first and how often
// it came. It is safe for concurrent use.
type notes struct {
	mu    sync.Mutex
	order []string
	seen  map[string]*note
}

type note struct {
	text  string
	count int
}

// Enabled reports whether a level is kept.
func (n *notes) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelWarn }

// Handle keeps a record.
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
	if w.Remedy != "" { // the machine's: once for each space, however often an engine is opened
		n.once(w.String())
		return nil
	}
	text := w.What
	if len(attrs) > 0 {
		text += ": " + strings.Join(attrs, ", ")
	}
	n.add(r.Message, text)
	return nil
}

// once adds a line that does not matter more for coming again.
func (n *notes) once(text string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.seen[text] == nil {
		n.addLocked(text, text)
	}
}

func (n *notes) add(key, text string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if e := n.seen[key]; e != nil {
		e.count++
		return
	}
	n.addLocked(key, text)
}

func (n *notes) addLocked(key, text string) {
	if len(n.order) == maxNotes {
		return
	}
	if n.seen == nil {
		n.seen = make(map[string]*note)
	}
	n.seen[key] = &note{text: strings.Join(strings.Fields(text), " "), count: 1}
	n.order = append(n.order, key)
}

// WithAttrs and WithGroup are not used by the engine; the attributes of a record
// are enough here.
func (n *notes) WithAttrs([]slog.Attr) slog.Handler { return n }

// WithGroup returns n.
func (n *notes) WithGroup(string) slog.Handler { return n }

// lines returns what was kept, in the order in which it first came.
func (n *notes) lines() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	out := make([]string, len(n.order))
	for i, key := range n.order {
		e := n.seen[key]
		out[i] = e.text
		if e.count > 1 {
			out[i] += fmt.Sprintf(" (%d times)", e.count)
		}
	}
	return out
}
