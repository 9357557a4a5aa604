package report

import (
	"cmp"
	"slices"
	"strings"

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
	LimitOf      string  `json:"limit_of"` // what the limit is: "memmove", "driver's copy", "peer copy" or "disk I/O"
	Efficiency   float64 `json:"efficiency"`
	Noise        float64 `json:"noise"`
	CV           float64 `json:"cv"` // coefficient of variation of the rates
	// Inconclusive: the efficiency is no further from 1 than the noise, so the row does not tell ours
	// from the limit.
	Inconclusive bool `json:"inconclusive"`
	// BothWays: one half of the moves went the other way at the same time. Gain is how many times
	// as fast that was as one half after the other, and LimitGain that of the limit.
	BothWays  bool             `json:"both_ways,omitempty"`
	Gain      float64          `json:"gain,omitempty"`
	LimitGain float64          `json:"limit_gain,omitempty"`
	Samples   BandwidthSamples `json:"samples"`

	Error string `json:"error,omitempty"` // why the edge was not measured; then the figures are 0
}

// BandwidthSamples are the rates that a row's figures are made of, one a pair in the order in which they
// were measured: of ours, of the limit, and of the limit once more.
type BandwidthSamples struct {
	GiBPerS           []float64 `json:"gib_per_s"`
	LimitGiBPerS      []float64 `json:"limit_gib_per_s"`
	LimitAgainGiBPerS []float64 `json:"limit_again_gib_per_s"`
}

// Page shows what bandwidth measured. notes are lines of their own.
func (b *Bandwidth) Page(notes []string) *Page {
	p := new(Page)
	p.linef("spillbench bandwidth: %s", b.Env.line())
	p.linef("")
	rows := &sheet{columns: []column{{head: "from", key: "from"}, {head: "to", key: "to"}, {head: "batch", key: "bytes"}, {head: "moves", key: "threads"}, {head: "state", key: "state"}, {head: "GiB/s", key: "gib_per_s"},
		{head: "limit", key: "limit_gib_per_s"}, {head: "efficiency", key: "efficiency"}, {head: "noise", key: "noise"}, {head: "cv", key: "cv"}, {only: people},
		{key: "limit_of", only: programs}, {key: "inconclusive", only: programs}, {key: "both_ways", only: programs}, {key: "gain", only: programs}, {key: "limit_gain", only: programs}, {key: "error", only: programs}}}
	unclear := 0
	for _, r := range b.Rows {
		if r.Error != "" {
			rows.add(r.From, r.To, nil, nil, nil, nil, nil, nil, nil, nil, r.Error, nil, nil, nil, nil, nil, r.Error)
			continue
		}
		state, says := worded{orUnknown(r.State, "-"), r.State}, ""
		if r.BothWays {
			state.text = "both ways"
		}
		if r.Inconclusive {
			unclear++
			says = "says nothing"
		}
		rows.add(r.From, r.To, exact(r.Bytes), r.Threads, state, two(r.GiBPerS), two(r.LimitGiBPerS), two(r.Efficiency), three(r.Noise), three(r.CV), says,
			r.LimitOf, r.Inconclusive, r.BothWays, two(r.Gain), two(r.LimitGain))
	}
	p.table(rows)
	io := "buffered I/O" // as the volumes do it
	if b.Env.DirectIO {
		io = "direct I/O"
	}
	p.linef("")
	p.linef("%d pairs a row, in %s; limits are %s, a thread for each move, and with a disk %s on a file in the same state;",
		b.Config.Pairs, duration(b.WallSeconds), b.memoryLimits(), io)
	p.linef("efficiency is the median of ours by the limit, pair by pair; noise is how far the limit is from itself in the same rounds")
	if unclear > 0 {
		p.linef("%d of %d rows say nothing: ours is no further from the limit than the limit from itself (more --pairs, larger --sizes or an idle machine help)", unclear, len(b.Rows))
	}
	p.linef("%s", b.extent())
	for _, r := range b.Rows {
		if r.BothWays {
			p.linef("%s and %s, %s: both ways at once are %.2f times as fast as one after the other, and the limit %.2f times",
				r.From, r.To, size.Format(r.Bytes), r.Gain, r.LimitGain)
		}
	}
	p.notes(notes)
	return p
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

// memoryLimits describes the limits between memories.
func (b *Bandwidth) memoryLimits() string {
	words := map[string]string{
		"driver's copy": "the driver's asynchronous copy between the same pinned memory and the GPU",
		"peer copy":     "the device's own copy to its peer",
	}
	var all []string
	for _, r := range b.Rows {
		text := cmp.Or(words[r.LimitOf], r.LimitOf)
		if r.State == "" && r.Error == "" && !slices.Contains(all, text) {
			all = append(all, text)
		}
	}
	return cmp.Or(strings.Join(all, ", "), "memmove")
}
