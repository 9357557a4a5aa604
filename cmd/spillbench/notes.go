package main

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
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
	all []note // in the order in which they first came
}

type note struct {
	key, text string
	times     int // log records; 0 for notes of add
}

// Enabled reports whether a level is kept.
func (n *notes) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelWarn }

// Handle keeps a record. Records with a remedy are warnings about the machine, which each engine that
// is opened logs again: their number means nothing.
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
		attrs = append(attrs, a.Key+" "+a.Value.String())
		return true
	})
	if w.Remedy != "" {
		n.add(w.String())
	} else {
		n.count(r.Message, strings.TrimSuffix(w.What+": "+strings.Join(attrs, ", "), ": "), 1)
	}
	return nil
}

// add keeps a text, unless it is there already.
func (n *notes) add(text string) { n.count(text, text, 0) }

// count keeps a text, or adds times to the earlier text with the same key.
func (n *notes) count(key, text string, times int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	i := slices.IndexFunc(n.all, func(e note) bool { return e.key == key })
	switch {
	case i >= 0:
		n.all[i].times += times
	case len(n.all) < maxNotes:
		n.all = append(n.all, note{key, strings.Join(strings.Fields(text), " "), times})
	}
}

// WithAttrs returns n: the engine does not use it.
func (n *notes) WithAttrs([]slog.Attr) slog.Handler { return n }

// WithGroup returns n.
func (n *notes) WithGroup(string) slog.Handler { return n }

// lines returns the notes in the order in which they first came.
func (n *notes) lines() (all []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, e := range n.all {
		if e.times > 1 {
			e.text += fmt.Sprintf(" (%d times)", e.times)
		}
		all = append(all, e.text)
	}
	return all
}
