// Package progress draws the progress of a run on one line of a terminal: the phase, the share that is
// done, the bytes in each tier, the rate at which bytes move between tiers, and the time left.
//
// A Bar owns one goroutine, which draws until Close. Its methods are safe for concurrent use; its
// mutex is a leaf.
package progress

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"golang.org/x/term"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/internal/named"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/tier"
)

// refresh is the period at which a Bar draws the line and computes the rate. With a shorter one the
// figures would be hard to read.
const refresh = 250 * time.Millisecond

// Bar is a progress line on a terminal. The zero value draws nothing.
type Bar struct {
	w     io.Writer
	stats func() spillway.Stats
	stop  func() // ends the goroutine

	mu             sync.Mutex
	phase          string
	begun          time.Time // of the phase
	steps, stepped int64     // of the phase; steps is -1 if their number is not known
	drawn          int       // columns of the line on the terminal

	// Only the goroutine that draws uses these.
	moved int64     // bytes between tiers, up to the time taken
	taken time.Time // of the latest drawing
}

// OnTerminal reports whether w is a terminal.
func OnTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// New returns a Bar that draws on w until Close. stats returns the statistics of the engine.
func New(w io.Writer, stats func() spillway.Stats) *Bar {
	b := &Bar{w: w, stats: stats}
	b.stop = Every(refresh, b.draw)
	return b
}

// Every starts a goroutine that calls f once a period. stop ends the goroutine, and waits for a call
// in progress; further calls of stop do nothing.
func Every(period time.Duration, f func(now time.Time)) (stop func()) {
	stopped := make(chan struct{})
	var done sync.WaitGroup
	done.Go(func() {
		tick := time.NewTicker(period)
		defer tick.Stop()
		for {
			select {
			case <-stopped:
				return
			case now := <-tick.C:
				f(now)
			}
		}
	})
	return sync.OnceFunc(func() {
		close(stopped)
		done.Wait()
	})
}

// Begin starts a phase with a number of steps, -1 if it is not known.
func (b *Bar) Begin(phase string, steps int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.phase, b.begun, b.steps, b.stepped = named.Inert(phase), time.Now(), steps, 0
}

// Step counts a step of the phase.
func (b *Bar) Step() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.stepped++
}

// Say clears the progress line and prints a line to w. The Bar draws again below it.
func (b *Bar) Say(w io.Writer, line string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.replaceLocked("")
	fmt.Fprintln(w, named.Inert(line))
}

// Close ends the drawing and clears the line.
func (b *Bar) Close() {
	if b.w == nil {
		return
	}
	b.stop()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.replaceLocked("")
}

// replaceLocked replaces the content of the line.
func (b *Bar) replaceLocked(text string) {
	if b.drawn > 0 {
		fmt.Fprint(b.w, "\r"+strings.Repeat(" ", b.drawn)+"\r")
	}
	if text != "" {
		fmt.Fprint(b.w, text)
	}
	b.drawn = utf8.RuneCountInString(text)
}

// draw draws the parts that fit on the terminal, the most important ones first.
func (b *Bar) draw(now time.Time) {
	stats := b.stats()
	moved, rate := int64(0), ""
	for _, e := range stats.Edges {
		moved += e.Bytes
	}
	if !b.taken.IsZero() && moved > b.moved {
		rate = brief(int64(float64(moved-b.moved)/now.Sub(b.taken).Seconds())) + "/s"
	}
	b.moved, b.taken = moved, now
	room := 80
	if f, ok := b.w.(*os.File); ok {
		if columns, _, err := term.GetSize(int(f.Fd())); err == nil && columns > 0 {
			room = columns
		}
	}

	b.mu.Lock()
	defer b.mu.Unlock()
	share, left, count := "", "", fmt.Sprint(b.stepped)
	if b.steps > 0 {
		done := min(b.stepped, b.steps)
		share, count = fmt.Sprintf("%d%%", 100*done/b.steps), fmt.Sprintf("%d/%d", done, b.steps)
		if since := now.Sub(b.begun); done > 0 && done < b.steps && since >= refresh {
			rest := time.Duration(float64(since) / float64(done) * float64(b.steps-done))
			left = fmt.Sprintf("%v left", max(time.Second, rest.Round(time.Second)))
		}
	}
	text := b.phase
	for _, part := range []string{share, occupancy(stats), left, rate, count} {
		if part != "" && utf8.RuneCountInString(text+", "+part) < room {
			text += ", " + part
		}
	}
	b.replaceLocked(text)
}

// occupancy returns the bytes in use in each tier, such as "gpu 57.1M host 60.2M disk 1.2G".
func occupancy(s spillway.Stats) string {
	var parts []string
	for _, k := range tier.Kinds() {
		used, capacity := int64(0), int64(0)
		for _, sp := range s.Spaces {
			if sp.ID.Kind == k {
				used += sp.Used()
				capacity += sp.Capacity
			}
		}
		if capacity > 0 {
			parts = append(parts, k.String()+" "+brief(used))
		}
	}
	return strings.Join(parts, " ")
}

// brief returns an approximate size, such as 57.1M.
func brief(n int64) string { return strings.NewReplacer(" ", "", "iB", "").Replace(size.Approx(n)) }
