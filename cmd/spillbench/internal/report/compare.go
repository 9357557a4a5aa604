package report

import (
	"fmt"
	"io"
	"strings"

	"github.com/spillway-db/spillway/internal/size"
)

// Compare is the document of compare. Rates are medians over the rounds.
type Compare struct {
	Header
	Config      CompareConfig `json:"config"`
	Input       Input         `json:"input"` // the bytes are those of the Arrow buffers
	Verify      Verification  `json:"verify"`
	Ours        OurRates      `json:"ours"`
	Peer        PeerRates     `json:"peer"`
	Ratio       Ratios        `json:"ratio"`
	WallSeconds float64       `json:"wall_seconds"`
}

// CompareConfig is what compare ran with.
type CompareConfig struct {
	Config
	Peer    string `json:"peer"`
	Seed    uint64 `json:"seed"`
	Repeat  int    `json:"repeat"`
	Rounds  int    `json:"rounds"`
	Workers int    `json:"workers"` // goroutines that move our batches
}

// Rates is what was spilled and read back in a second.
type Rates struct {
	WriteGiBPerS float64 `json:"write_gib_per_s"`
	ReadGiBPerS  float64 `json:"read_gib_per_s"`
}

// OurRates is our side.
type OurRates struct {
	Rates                   // into an empty volume
	PutWriteGiBPerS float64 `json:"put_write_gib_per_s"` // with laying the batches out in host memory counted
	Rewritten       Rates   `json:"rewritten"`           // into room that was written before
}

// PeerRates is the peer's.
type PeerRates struct {
	Name  string `json:"name"`
	Rates        // synced, and read without the page cache
	Warm  Rates  `json:"warm"` // not synced, and read from it
}

// Ratios are our rates by the peer's: the medians of the pairs of rounds, with the
// least and the largest of them.
type Ratios struct {
	Write    float64 `json:"write"`
	WriteMin float64 `json:"write_min"`
	WriteMax float64 `json:"write_max"`
	Read     float64 `json:"read"`
	ReadMin  float64 `json:"read_min"`
	ReadMax  float64 `json:"read_max"`
}

// Print writes what compare measured for people. notes are lines of their own.
func (c *Compare) Print(w io.Writer, notes []string) {
	fmt.Fprintf(w, "spillbench compare: %s\n", c.Env.line())
	fmt.Fprintf(w, "%s of %s in %d batches (%d rows), through %s of memory; ours with codec %s%s\n\n",
		size.Approx(c.Input.Bytes), strings.Join(c.Input.Sources, ", "), c.Input.Batches, c.Input.Rows, size.Approx(c.Config.HostMemoryBytes),
		c.Config.Codec, strings.TrimSuffix(","+onDisk(c.Config.Encrypt), ","))
	row := func(name string, r Rates) []string {
		return []string{name, fmt.Sprintf("%.2f", r.WriteGiBPerS), fmt.Sprintf("%.2f", r.ReadGiBPerS)}
	}
	table(w, [][]string{
		{"", "write GiB/s", "read GiB/s"},
		row("spillway", c.Ours.Rates),
		{"  and laid out", fmt.Sprintf("%.2f", c.Ours.PutWriteGiBPerS), ""},
		row("  in room used before", c.Ours.Rewritten),
		row(c.Peer.Name, c.Peer.Rates),
		row("  warm", c.Peer.Warm),
	})
	fmt.Fprintln(w)
	table(w, [][]string{
		{"spillway by " + c.Peer.Name, "ratio", "from", "to"},
		{"write", fmt.Sprintf("%.2f", c.Ratio.Write), fmt.Sprintf("%.2f", c.Ratio.WriteMin), fmt.Sprintf("%.2f", c.Ratio.WriteMax)},
		{"read", fmt.Sprintf("%.2f", c.Ratio.Read), fmt.Sprintf("%.2f", c.Ratio.ReadMin), fmt.Sprintf("%.2f", c.Ratio.ReadMax)},
	})
	fmt.Fprintf(w, "\n%d rounds; the peer's file is synced, and dropped from the page cache before it is read; warm: neither\n", c.Config.Rounds)
	for _, n := range notes {
		fmt.Fprintf(w, "note: %s\n", n)
	}
	fmt.Fprintf(w, "verified: %d batches of both sides are those of the input\n", c.Verify.Batches)
}
