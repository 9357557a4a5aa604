// Package progress draws how far a run is, and how full the tiers are, on a
// terminal.
//
// It uses schollz/progressbar, which knows widths, escape sequences and the
// terminals of Windows, and draws one line, which is all that is wanted here.
//
// A Bar owns one goroutine, which redraws the occupancy until Close. Its methods
// are safe for concurrent use; its mutex is a leaf.
package progress

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/tier"
)

// refresh is how often the line is drawn: often enough to look alive, and
// nothing beside what the run costs.
const refresh = 100 * time.Millisecond

// Bar is a progress line on a terminal. The zero value draws nothing.
type Bar struct {
	w     io.Writer
	stats func() spillway.Stats

	mu    sync.Mutex
	bar   *progressbar.ProgressBar // of the phase; nil before the first
	phase string

	stop chan struct{}
	done sync.WaitGroup
}

// OnTerminal reports whether w is a terminal.
func OnTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// New draws on w until Close. stats returns how full the tiers are.
func New(w io.Writer, stats func() spillway.Stats) *Bar {
	b := &Bar{w: w, stats: stats, stop: make(chan struct{})}
	b.done.Go(func() {
		tick := time.NewTicker(refresh)
		defer tick.Stop()
		for {
			select {
			case <-b.stop:
				return
			case <-tick.C:
				b.describe()
			}
		}
	})
	return b
}

// Begin starts a phase of so many steps, -1 if that is not known.
func (b *Bar) Begin(phase string, steps int64) {
	if b.w == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.clearLocked()
	b.phase = phase
	b.bar = progressbar.NewOptions64(steps,
		progressbar.OptionSetWriter(b.w),
		progressbar.OptionSetWidth(20),
		progressbar.OptionThrottle(refresh),
		progressbar.OptionShowCount(),
		progressbar.OptionClearOnFinish(),
		progressbar.OptionSetPredictTime(false),
		progressbar.OptionSetElapsedTime(false),
		progressbar.OptionSpinnerType(14),
		progressbar.OptionSetSpinnerChangeInterval(0), // no goroutine of its own
		progressbar.OptionSetDescription(phase),
	)
}

// Step counts one.
func (b *Bar) Step() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.bar != nil {
		_ = b.bar.Add(1) // drawing is all that can fail
	}
}

// Close ends the drawing and clears the line.
func (b *Bar) Close() {
	if b.w == nil {
		return
	}
	close(b.stop)
	b.done.Wait()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.clearLocked()
}

func (b *Bar) clearLocked() {
	if b.bar != nil {
		_ = b.bar.Clear()
		b.bar = nil
	}
}

func (b *Bar) describe() {
	text := occupancy(b.stats())
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.bar != nil {
		b.bar.Describe(b.phase + " " + text)
	}
}

// occupancy says how full each tier is: "gpu 90% host 94% disk 3%".
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
			parts = append(parts, fmt.Sprintf("%s %.0f%%", k, 100*float64(used)/float64(capacity)))
		}
	}
	return strings.Join(parts, " ")
}
