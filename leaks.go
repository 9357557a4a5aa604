package spillway

import (
	"fmt"
	"log/slog"
	"strings"

	"github.com/spillway-db/spillway/internal/holds"
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
	var b strings.Builder
	b.WriteString("spillway: not released at Close: ")
	byID := make(map[tier.ID]*leakSum)
	for _, l := range e.Leaks {
		if byID[l.Space] == nil {
			byID[l.Space] = new(leakSum)
		}
		byID[l.Space].add(l)
	}
	for i, id := range sortedIDs(byID) {
		if i > 0 {
			b.WriteString("; ")
		}
		fmt.Fprintf(&b, "in %s %s", id, byID[id])
	}
	for i, l := range e.Leaks {
		if i == maxLeaksListed {
			fmt.Fprintf(&b, "\nand %d more", len(e.Leaks)-i)
			break
		}
		writeLeak(&b, l)
	}
	return b.String()
}

func writeLeak(b *strings.Builder, l tier.Leak) {
	if len(l.Holders) == 0 && l.Stack == "" {
		return
	}
	fmt.Fprintf(b, "\n%d bytes in %s", l.Bytes, l.Space)
	for i, h := range l.Holders {
		if i == maxLeaksListed {
			fmt.Fprintf(b, ", and %d more", len(l.Holders)-i)
			break
		}
		sep := ", "
		if i == 0 {
			sep = ": "
		}
		b.WriteString(sep + h.String())
		if h.Stack != "" {
			fmt.Fprintf(b, ", taken at\n%s", h.Stack)
		}
	}
	if l.Stack != "" {
		fmt.Fprintf(b, "\nthe memory was taken at\n%s", l.Stack)
	}
}

// leakSum counts the leaks of a space.
type leakSum struct {
	promised         int64 // bytes
	buffers, bytes   int64
	handles, records int64
}

func (s *leakSum) add(l tier.Leak) {
	if l.Promise {
		s.promised += l.Bytes
		return
	}
	s.buffers++
	s.bytes += l.Bytes
	for _, h := range l.Holders {
		switch h.Kind {
		case holds.Handle:
			s.handles++
		case holds.Record:
			s.records++
		}
	}
}

func (s *leakSum) String() string {
	var parts []string
	if s.buffers > 0 {
		part := count(s.buffers, "buffer") + " of " + count(s.bytes, "byte")
		var by []string
		if s.handles > 0 {
			by = append(by, count(s.handles, "open handle"))
		}
		if s.records > 0 {
			by = append(by, count(s.records, "open record"))
		}
		if len(by) > 0 {
			part += " (kept by " + strings.Join(by, " and ") + ")"
		}
		parts = append(parts, part)
	}
	if s.promised > 0 {
		parts = append(parts, count(s.promised, "byte")+" of reservations")
	}
	return strings.Join(parts, " and ")
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
	e.cfg.Logger.Warn("spillway: room is waited for; close handles, release records or reservations there, or make the space larger",
		slog.Group("wait", "space", w.Space.String(), "requested", w.Requested, "waited", w.Waited, "owner", w.Owner,
			"waiters", w.Waiters, "waiting", w.Waiting, "available", w.Holdings.Available, "held", w.Holdings.String()))
}
