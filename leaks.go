package spillway

import (
	"cmp"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"

	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// LeakError is part of what Close returns if memory was still held: by handles or records
// that are open, or by reservations and buffers that were not released. Each leak names
// its holders, as far as they are known; a build with -tags invariants adds stacks.
type LeakError struct{ Leaks []tier.Leak }

// maxLeaksListed bounds how many leaks a message lists one by one.
const maxLeaksListed = 16

func (e *LeakError) Error() string {
	type sum struct{ promised, other, handles, records int64 }
	sums := make(map[tier.ID]*sum)
	for _, l := range e.Leaks {
		s := sums[l.Space]
		if s == nil {
			s = new(sum)
			sums[l.Space] = s
		}
		if l.Promise {
			s.promised += l.Bytes
			continue
		}
		s.other += l.Bytes
		for _, h := range l.Holders {
			switch h.Kind {
			case books.Handle:
				s.handles++
			case books.Record:
				s.records++
			}
		}
	}
	byID := func(a, b tier.ID) int { return cmp.Or(cmp.Compare(a.Kind, b.Kind), a.Ordinal-b.Ordinal) }
	var spaces []string
	for _, id := range slices.SortedFunc(maps.Keys(sums), byID) {
		s := sums[id]
		var parts, by []string
		if s.handles > 0 {
			by = append(by, count(s.handles, "open handle"))
		}
		if s.records > 0 {
			by = append(by, count(s.records, "open record"))
		}
		if s.other > 0 {
			part := count(s.other, "byte") + " of buffers"
			if len(by) > 0 {
				part += " (kept by " + strings.Join(by, " and ") + ")"
			}
			parts = append(parts, part)
		}
		if s.promised > 0 {
			parts = append(parts, count(s.promised, "byte")+" of reservations")
		}
		spaces = append(spaces, fmt.Sprintf("in %s %s", id, strings.Join(parts, " and ")))
	}
	var b strings.Builder
	b.WriteString("spillway: not released at Close: " + strings.Join(spaces, "; "))
	for i, l := range e.Leaks {
		if i == maxLeaksListed {
			fmt.Fprintf(&b, "\nand %d more", len(e.Leaks)-i)
			break
		}
		if len(l.Holders) == 0 {
			continue
		}
		fmt.Fprintf(&b, "\n%d bytes in %s: ", l.Bytes, l.Space)
		for j, h := range l.Holders {
			if j > 0 {
				b.WriteString(", ")
			}
			if j == maxLeaksListed {
				fmt.Fprintf(&b, "and %d more", len(l.Holders)-j)
				break
			}
			b.WriteString(h.String())
			if h.Stack != "" {
				fmt.Fprintf(&b, ", taken at\n%s", h.Stack)
			}
		}
		if l.Stack != "" {
			fmt.Fprintf(&b, ", taken at\n%s", l.Stack)
		}
	}
	return b.String()
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
