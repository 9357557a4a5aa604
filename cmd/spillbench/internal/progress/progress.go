// Package progress draws how far a run is on a terminal: the phase, the bytes in each tier, the rate at
// which bytes move between them, the time that is left, and the share that is done.
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
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/internal/named"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/tier"
)

// refresh is how often the line is drawn: often enough to look alive, and
// nothing beside what the run costs.
const refresh = 100 * time.Millisecond

// Bar is a progress line on a terminal. The zero value draws nothing.
type Bar struct {
	w     io.Writer
	stats func() spillway.Stats

	mu             sync.Mutex
	bar            *progressbar.ProgressBar // of the phase; nil before the first
	phase          string
	begun          time.Time // of the phase
	steps, stepped int64     // of it; steps -1: not known
	beside         int       // columns that the bar takes beside its text

	// Only the goroutine that draws uses these.
	moved int64 // when the rate was taken last
	taken time.Time
	rate  float64 // bytes a second

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
	phase = named.Inert(phase)
	b.phase, b.begun, b.steps, b.stepped = phase, time.Now(), steps, 0
	width, count := 10, progressbar.OptionShowCount()
	b.beside = besideWide
	if columns(b.w) < wide {
		width, count, b.beside = 4, func(*progressbar.ProgressBar) {}, besideNarrow
	}
	b.bar = progressbar.NewOptions64(steps,
		progressbar.OptionSetWriter(b.w),
		progressbar.OptionSetWidth(width),
		progressbar.OptionThrottle(refresh),
		count,
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
		b.stepped++
		_ = b.bar.Add(1) // drawing is all that can fail
	}
}

// Say prints a line above the bar to w, where the bar is drawn if there is one.
func (b *Bar) Say(w io.Writer, line string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.bar != nil {
		_ = b.bar.Clear() // the next look draws it again
	}
	fmt.Fprintln(w, named.Inert(line))
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
	stats, now := b.stats(), time.Now()
	b.measure(stats, now)
	room := columns(b.w)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.bar != nil {
		b.bar.Describe(fitting(room-b.beside, b.phase, stats, b.rate, left(now.Sub(b.begun), b.stepped, b.steps)))
	}
}

// measured is how long a rate is taken over: shorter would flicker.
const measured = 500 * time.Millisecond

// measure takes the rate at which bytes move between tiers.
func (b *Bar) measure(stats spillway.Stats, now time.Time) {
	since := now.Sub(b.taken)
	if since < measured {
		return
	}
	moved := int64(0)
	for _, e := range stats.Edges {
		moved += e.Bytes
	}
	if !b.taken.IsZero() {
		b.rate = max(0, float64(moved-b.moved)) / since.Seconds()
	}
	b.moved, b.taken = moved, now
}

// On a terminal of fewer columns than wide the bar is shorter and has no count, so that its text has
// more room.
const (
	wide         = 100
	besideWide   = 36 // columns of the bar with its share and its count
	besideNarrow = 14 // of the short one with its share
)

// columns returns the width of the terminal.
func columns(w io.Writer) int {
	if f, ok := w.(*os.File); ok {
		if wide, _, err := term.GetSize(int(f.Fd())); err == nil && wide > 0 {
			return wide
		}
	}
	return 80
}

// fitting joins what there is room for in so many columns: sizes get shorter, bytes give way to shares,
// then the rate goes, and then the time that is left.
func fitting(room int, phase string, stats spillway.Stats, rate float64, left string) (text string) {
	shares := occupancy(stats)
	for _, parts := range [][]string{
		{phase, held(stats, size.Approx), speed(rate, size.Approx), left}, {phase, held(stats, brief), speed(rate, brief), left},
		{phase, shares, speed(rate, brief), left}, {phase, shares, left}, {phase, shares}, {phase},
	} {
		parts = slices.DeleteFunc(parts, func(s string) bool { return s == "" })
		if text = strings.Join(parts, ", "); utf8.RuneCountInString(text) <= room {
			break
		}
	}
	return text
}

// brief prints a size in four characters or so: 57M, 1.2G.
func brief(n int64) string {
	number, unit, _ := strings.Cut(size.Approx(n), " ")
	if len(number) > 3 { // a digit behind the point says little beside two before it
		number, _, _ = strings.Cut(number, ".")
	}
	return number + strings.TrimSuffix(unit, "iB")
}

func speed(rate float64, print func(int64) string) string {
	if rate <= 0 {
		return ""
	}
	return print(int64(rate)) + "/s"
}

// left says how long a phase will take, if it goes on as it did.
func left(since time.Duration, done, steps int64) string {
	if done <= 0 || steps <= 0 || done >= steps || since < measured {
		return ""
	}
	rest := time.Duration(float64(since) / float64(done) * float64(steps-done))
	return fmt.Sprintf("%v left", max(time.Second, rest.Round(time.Second)))
}

// held says how many bytes are in each tier: "gpu 57.1 MiB host 60.2 MiB disk 120.0 MiB".
func held(s spillway.Stats, print func(int64) string) string {
	return tiers(s, func(k tier.Kind, used, _ int64) string { return fmt.Sprintf("%s %s", k, print(used)) })
}

// occupancy says how full each tier is: "gpu 90% host 94% disk 3%".
func occupancy(s spillway.Stats) string {
	return tiers(s, func(k tier.Kind, used, capacity int64) string {
		return fmt.Sprintf("%s %.0f%%", k, 100*float64(used)/float64(capacity))
	})
}

// tiers says something of each tier that there is.
func tiers(s spillway.Stats, say func(k tier.Kind, used, capacity int64) string) string {
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
			parts = append(parts, say(k, used, capacity))
		}
	}
	return strings.Join(parts, " ")
}
