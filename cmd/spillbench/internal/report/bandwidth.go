package report

import (
	"fmt"
	"io"

	"github.com/spillway-db/spillway/internal/size"
)

// Bandwidth is the document of bandwidth.
type Bandwidth struct {
	Header
	Config      BandwidthConfig `json:"config"`
	Rows        []BandwidthRow  `json:"rows"`
	WallSeconds float64         `json:"wall_seconds"`
}

// BandwidthConfig is what bandwidth ran with. What did not fit is left out of the rows.
type BandwidthConfig struct {
	Config
	Extent string `json:"extent"` // "quick", "thorough", or "sizes" if those were given
	// PlannedBytes is how much was to be moved, ours and the limit's, in memory and on disk.
	PlannedBytes int64 `json:"planned_bytes"`

	Seed    uint64  `json:"seed"`
	Pairs   int     `json:"pairs"` // for each row
	Sizes   []int64 `json:"sizes_bytes"`
	Threads []int   `json:"threads"`
}

// BandwidthRow is one edge, at one size and so many moves at a time. Rates are medians, of
// all moves together; the efficiency is the median of the pairs' ratios, and the noise the
// median of how far the ratios of the limit to itself are from 1.
type BandwidthRow struct {
	From         string  `json:"from"`
	To           string  `json:"to"`
	Bytes        int64   `json:"bytes"`   // of each batch
	Threads      int     `json:"threads"` // batches that move at the same time
	GiBPerS      float64 `json:"gib_per_s"`
	State        string  `json:"state"` // of the disk's room: "fresh" or "rewritten"; "" between memories
	LimitGiBPerS float64 `json:"limit_gib_per_s"`
	LimitOf      string  `json:"limit_of"` // what the limit is: "memmove", "driver's copy" or "disk I/O"
	Efficiency   float64 `json:"efficiency"`
	Noise        float64 `json:"noise"`
	CV           float64 `json:"cv"` // coefficient of variation of the rates
	// Inconclusive: the efficiency is no further from 1 than the noise, so the row does not tell ours
	// from the limit.
	Inconclusive bool `json:"inconclusive"`
	// BothWays: one half of the moves went the other way at the same time. Gain is how many times
	// as fast that was as one half after the other, and LimitGain that of the limit.
	BothWays  bool    `json:"both_ways,omitempty"`
	Gain      float64 `json:"gain,omitempty"`
	LimitGain float64 `json:"limit_gain,omitempty"`
	Error     string  `json:"error,omitempty"` // why the edge was not measured; then the figures are 0
}

// Print writes what bandwidth measured for people.
func (b *Bandwidth) Print(w io.Writer, notes []string) {
	fmt.Fprintf(w, "spillbench bandwidth: %s\n\n", b.Env.line())
	rows := [][]string{{"from", "to", "batch", "moves", "state", "GiB/s", "limit", "efficiency", "noise", "cv", ""}}
	unclear := 0
	for _, r := range b.Rows {
		if r.Error != "" {
			rows = append(rows, []string{r.From, r.To, r.Error})
			continue
		}
		state := orUnknown(r.State, "-")
		if r.BothWays {
			state = "both ways"
		}
		says := ""
		if r.Inconclusive {
			unclear++
			says = "says nothing"
		}
		rows = append(rows, []string{
			r.From, r.To, size.Format(r.Bytes), fmt.Sprint(r.Threads), state, fmt.Sprintf("%.2f", r.GiBPerS),
			fmt.Sprintf("%.2f", r.LimitGiBPerS), fmt.Sprintf("%.2f", r.Efficiency), fmt.Sprintf("%.3f", r.Noise), fmt.Sprintf("%.3f", r.CV), says,
		})
	}
	table(w, rows)
	io := "buffered I/O" // as the volumes do it
	if b.Env.DirectIO {
		io = "direct I/O"
	}
	fmt.Fprintf(w, "\n%d pairs a row, in %s; limits are %s, a thread for each move, and with a disk %s on a file in the same state;\n",
		b.Config.Pairs, duration(b.WallSeconds), b.memoryLimit(), io)
	fmt.Fprintln(w, "efficiency is the median of ours by the limit, pair by pair; noise is how far the limit is from itself in the same rounds")
	if unclear > 0 {
		fmt.Fprintf(w, "%d of %d rows say nothing: ours is no further from the limit than the limit from itself (more --pairs, larger --sizes or an idle machine help)\n", unclear, len(b.Rows))
	}
	fmt.Fprintln(w, b.extent())
	for _, r := range b.Rows {
		if r.BothWays {
			fmt.Fprintf(w, "%s and %s, %s: both ways at once are %.2f times as fast as one after the other, and the limit %.2f times\n",
				r.From, r.To, size.Format(r.Bytes), r.Gain, r.LimitGain)
		}
	}
	for _, n := range notes {
		fmt.Fprintf(w, "note: %s\n", n)
	}
}

// extent says how much was measured.
func (b *Bandwidth) extent() string {
	moved := size.Approx(b.Config.PlannedBytes) + " were moved"
	switch b.Config.Extent {
	case "quick":
		return "quick: " + moved + "; --thorough measures larger batches, several moves at a time, and all spaces"
	case "thorough":
		return "thorough: " + moved
	}
	return moved
}

// memoryLimit says what the limit is between memories.
func (b *Bandwidth) memoryLimit() string {
	for _, r := range b.Rows {
		if r.LimitOf != "memmove" && r.State == "" && r.Error == "" {
			return "the driver's asynchronous copy between the same pinned memory and the GPU"
		}
	}
	return "memmove"
}
