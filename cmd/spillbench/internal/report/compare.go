package report

import (
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
	Samples     []RoundRates  `json:"samples"` // what the medians are of, one a round
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

// RoundRates are the rates of one round.
type RoundRates struct {
	Ours OurRates `json:"ours"`
	Peer Rates    `json:"peer"`
	Warm Rates    `json:"warm"` // the peer's
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

// Page shows what compare measured. notes are lines of their own.
func (c *Compare) Page(notes []string) *Page {
	p := new(Page)
	p.linef("spillbench compare: %s", c.Env.line())
	p.linef("%s of %s in %d batches (%d rows), through %s of memory; ours with codec %s%s",
		size.Approx(c.Input.Bytes), strings.Join(c.Input.Sources, ", "), c.Input.Batches, c.Input.Rows, size.Approx(c.Config.HostMemoryBytes),
		c.Config.Codec, strings.TrimSuffix(","+onDisk(c.Config.Encrypt), ","))
	p.linef("")
	rates := &sheet{columns: []column{{key: "side"}, {head: "write GiB/s", key: "write_gib_per_s"}, {head: "read GiB/s", key: "read_gib_per_s"}}}
	row := func(name any, r Rates) { rates.add(name, two(r.WriteGiBPerS), two(r.ReadGiBPerS)) }
	row("spillway", c.Ours.Rates)
	rates.add(worded{"  and laid out", "spillway, laid out"}, two(c.Ours.PutWriteGiBPerS))
	row(worded{"  in room used before", "spillway, rewritten"}, c.Ours.Rewritten)
	row(c.Peer.Name, c.Peer.Rates)
	row(worded{"  warm", c.Peer.Name + ", warm"}, c.Peer.Warm)
	p.table(rates)
	p.linef("")
	ratios := &sheet{columns: []column{{head: "spillway by " + c.Peer.Name, key: "of"}, {head: "ratio", key: "ratio"}, {head: "from", key: "ratio_min"}, {head: "to", key: "ratio_max"}}}
	ratios.add("write", two(c.Ratio.Write), two(c.Ratio.WriteMin), two(c.Ratio.WriteMax))
	ratios.add("read", two(c.Ratio.Read), two(c.Ratio.ReadMin), two(c.Ratio.ReadMax))
	p.table(ratios)
	p.linef("")
	p.linef("%d rounds; the peer's file is synced, and dropped from the page cache before it is read; warm: neither", c.Config.Rounds)
	p.notes(notes)
	p.linef("verified: %d batches of both sides are those of the input", c.Verify.Batches)
	return p
}
