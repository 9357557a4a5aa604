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
	var spaces []string
	var details strings.Builder
	listed, more := 0, 0
	for left := e.Leaks; len(left) > 0; { // one space after the other
		id := left[0].Space
		var promised, other, handles, records int64
		for len(left) > 0 && left[0].Space == id {
			l := left[0]
			left = left[1:]
			if l.Promise {
				promised += l.Bytes
			} else {
				other += l.Bytes
			}
			var holders []string
			for i, h := range l.Holders {
				switch {
				case l.Promise:
				case h.Kind == books.Handle:
					handles++
				case h.Kind == books.Record:
					records++
				}
				text := h.String()
				if h.Stack != "" {
					text += ", taken at\n" + h.Stack
				}
				if i < maxLeaksListed {
					holders = append(holders, text)
				}
			}
			switch n := len(l.Holders) - len(holders); {
			case len(holders) == 0:
				continue
			case listed == maxLeaksListed:
				more++
				continue
			case n > 0:
				holders = append(holders, fmt.Sprintf("and %d more", n))
			}
			listed++
			fmt.Fprintf(&details, "\n%d bytes in %s: %s", l.Bytes, id, strings.Join(holders, ", "))
			if l.Stack != "" {
				fmt.Fprintf(&details, ", taken at\n%s", l.Stack)
			}
		}
		var parts, by []string
		if handles > 0 {
			by = append(by, count(handles, "open handle"))
		}
		if records > 0 {
			by = append(by, count(records, "open record"))
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
	if more > 0 {
		fmt.Fprintf(&details, "\nand %d more", more)
	}
	return "spillway: not released at Close: " + strings.Join(spaces, "; ") + details.String()
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
