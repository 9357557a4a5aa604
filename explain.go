package spillway

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/named"
	"github.com/spillway-db/spillway/tier"
)

// Explanation reports where a batch is, why, since when, and what it would cost to move it.
type Explanation struct {
	batch.Info
	// Foreign: it is in another engine's memory, of which Space and Copies are. There are no Ways.
	Foreign bool
	Copies  []SpaceID // where it has clean images: a move there copies no bytes

	// Ways are the spaces of faster tiers, or all others if there is no faster one.
	Ways []Way
}

// Way reports what it would cost to move a batch to a space.
type Way struct {
	To   SpaceID
	Took time.Duration // at the speed of the last moves between the two; 0: there were none
	Copy bool          // a copy is there: no bytes would be moved
	Room bool          // there is room at present: it would not wait
}

// Explain reports where a batch is, why, since when, and what it would cost to fetch it. The parts
// are looked up one after the other. Nil is explained as a batch that is gone.
func (e *Engine) Explain(b *Batch) Explanation {
	if b == nil {
		return Explanation{Info: batch.Info{State: batch.Released}}
	}
	now := b.Info()
	x := Explanation{Info: now, Copies: b.Copies()}
	if !now.Space.Valid() {
		return x
	}
	if s := b.Space(); s != nil && !slices.Contains(e.spaces, s) {
		x.Foreign = true
		return x
	}
	size := now.Bytes
	if now.Descriptor != nil {
		size = now.Descriptor.Body
	}
	way := func(s *tier.Space) Way {
		w := Way{To: s.ID(), Copy: slices.Contains(x.Copies, s.ID()), Room: s.State().Available >= s.Charge(size)}
		if speed := e.mover.Speed(now.Space, s.ID()); speed > 0 {
			w.Took = time.Duration(float64(size) / float64(speed) * float64(time.Second))
		}
		return w
	}
	faster := func(s *tier.Space) bool { return s.Lost() == nil && s.Kind() < now.Space.Kind }
	isFastest := !slices.ContainsFunc(e.spaces, faster)
	for _, s := range e.spaces {
		if faster(s) || isFastest && s.ID() != now.Space && s.Lost() == nil {
			x.Ways = append(x.Ways, way(s))
		}
	}
	return x
}

// String returns the explanation as one line.
func (x Explanation) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "batch %d", x.ID)
	if p := x.Place; p.Name != "" {
		fmt.Fprintf(&b, " of plan %s, operator %s:%d", named.Quoted(p.Name), named.Plain(p.Operator), p.Port)
	}
	if !x.Space.Valid() {
		b.WriteString(" is gone")
		return b.String()
	}
	if x.Foreign {
		b.WriteString(" is another engine's: there it")
	}
	if x.State == batch.Released {
		fmt.Fprintf(&b, " is dropped, and still held in %s (%s, %d bytes)", x.Space, x.Form, x.Bytes)
	} else {
		fmt.Fprintf(&b, " is %s in %s (%s, %d bytes)", x.State, x.Space, x.Form, x.Bytes)
	}
	since := time.Unix(0, x.Since).Format("15:04:05.000")
	if x.Why == "put" {
		b.WriteString(", where it was put at " + since)
	} else {
		fmt.Fprintf(&b, ", where it came for %s at %s", x.Why, since)
	}
	if x.Active > 0 || x.Pending > 0 {
		fmt.Fprintf(&b, "; open: %s; waiting for it: %s",
			count(int64(x.Active), "handle"), count(int64(x.Pending), "task"))
	}
	for _, id := range x.Copies {
		fmt.Fprintf(&b, "; a copy is in %s", id)
	}
	for _, w := range x.Ways {
		how := ""
		switch {
		case w.Copy:
			how = "move no bytes"
		case w.Took > 0:
			how = fmt.Sprintf("take about %v", w.Took.Round(time.Microsecond))
		}
		switch {
		case how == "" && w.Room:
			how = "not have to wait; its speed is not known yet"
		case how == "":
			how = "have to wait for room; its speed is not known yet"
		case !w.Room:
			how = "have to wait for room, and then " + how
		}
		fmt.Fprintf(&b, "; a move to %s would %s", w.To, how)
	}
	return b.String()
}
