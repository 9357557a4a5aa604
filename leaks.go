package spillway

import (
	"fmt"
	"log/slog"
	"strings"

	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// LeakError is part of what Close returns if memory was still held: by handles or records
// that are open, or by reservations and buffers that were not released. Each leak names
// its holders, as far as they are known; a build with -tags invariants adds stacks.
type LeakError struct{ Leaks []tier.Leak }

// maxLeaksListed bounds how many leaks of an error, and holders of a leak, a message lists one by one.
const maxLeaksListed = 16

func (e *LeakError) Error() string {
	var spaces, lines []string
	for left := e.Leaks; len(left) > 0; { // one space after the other
		id := left[0].Space
		var promised, other int64
		held := map[string]int64{} // holders of buffers, by their kind
		for len(left) > 0 && left[0].Space == id {
			l := left[0]
			left = left[1:]
			if l.Promise {
				promised += l.Bytes
			} else {
				other += l.Bytes
			}
			var holders []string
			for _, h := range l.Holders {
				if !l.Promise {
					held[h.Kind]++
				}
				holders = append(holders, withStack(h.String(), h.Stack))
			}
			if len(holders) > 0 {
				text := strings.Join(atMost(maxLeaksListed, holders), ", ")
				lines = append(lines, withStack(fmt.Sprintf("%d bytes in %s: %s", l.Bytes, id, text), l.Stack))
			}
		}
		var parts, by []string
		for _, kind := range []string{books.Handle, books.Record} {
			if held[kind] > 0 {
				by = append(by, count(held[kind], "open "+kind))
			}
		}
		if other > 0 {
			part := count(other, "byte") + " of buffers"
			if len(by) > 0 {
				part += " (kept by " + strings.Join(by, " and ") + ")"
			}
			parts = append(parts, part)
		}
		if promised > 0 {
			parts = append(parts, count(promised, "byte")+" of reservations")
		}
		spaces = append(spaces, fmt.Sprintf("in %s %s", id, strings.Join(parts, " and ")))
	}
	lines = append([]string{strings.Join(spaces, "; ")}, atMost(maxLeaksListed, lines)...)
	return "spillway: not released at Close: " + strings.Join(lines, "\n")
}

// atMost returns the first n texts, and how many others there are.
func atMost(n int, texts []string) []string {
	if len(texts) <= n {
		return texts
	}
	return append(texts[:n:n], fmt.Sprintf("and %d more", len(texts)-n))
}

// withStack returns what was taken, and where if that is known.
func withStack(text, stack string) string {
	if stack == "" {
		return text
	}
	return text + ", taken at\n" + stack
}

// count returns "1 buffer" or "3 buffers".
func count(n int64, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// warnOfWait logs a long wait, with the holders of what it waits for.
func (e *Engine) warnOfWait(w reservation.LongWait) {
	e.cfg.Logger.Warn("spillway: room is waited for; "+
		"close handles, release records or reservations there, or make the space larger",
		slog.Group("wait", "space", w.Space.String(), "requested", w.Requested, "waited", w.Waited, "owner", w.Owner,
			"waiters", w.Waiters, "waiting", w.Waiting, "available", w.Holdings.Available, "held", w.Holdings.String()))
}
