package report

import (
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"

	"github.com/spillway-db/spillway/internal/named"
	"github.com/spillway-db/spillway/internal/page"
)

// Measured is a Document that measures something: Run, Bandwidth and Compare. It has figures for
// benchstat, and a page of its own.
type Measured interface {
	Document
	header() *Header
	Benchmarks() []Benchmark
	run() page.Run
}

// Benchmark is one line of Go's benchmark format: a name such as "Run/phase=load" without spaces, how
// often it was done, and what was measured.
type Benchmark struct {
	Name   string
	Times  int64
	Values []Value
}

// Value is a figure and its unit.
type Value struct {
	Value float64
	Unit  string
}

// units are those of Value whose direction benchstat does not know, and whether more of it is better.
var units = map[string]bool{
	"GiB/s": true, "limit-GiB/s": true, "cpu-ns/op": false,
}

// WriteBenchmarks writes the figures of documents in Go's benchmark format, which benchstat reads. Two
// have their names as the value of the key "result", by which benchstat tells them apart.
func WriteBenchmarks(w io.Writer, names []string, documents ...Measured) error {
	var b strings.Builder
	stated := make(map[string]bool) // keys, which are valid for all lines below, and units
	for i, document := range documents {
		env, benchmarks, result := document.header().Env, document.Benchmarks(), ""
		if len(documents) > 1 {
			result = names[i]
		}
		for _, key := range [][2]string{
			{"result", result}, {"goos", env.GOOS}, {"goarch", env.GOARCH}, {"pkg", "github.com/spillway-db/spillway/cmd/spillbench"},
			{"cpu", env.CPU}, {"gpu", env.GPU}, {"filesystem", env.FileSystem}, {"commit", env.Commit},
		} {
			if value := named.Inert(strings.Join(strings.Fields(key[1]), " ")); value != "" {
				fmt.Fprintf(&b, "%s: %s\n", key[0], value)
				stated[key[0]] = true
			} else if stated[key[0]] {
				fmt.Fprintf(&b, "%s:\n", key[0]) // takes back what was said of the document before
			}
		}
		for _, m := range benchmarks {
			for _, v := range m.Values {
				if more, own := units[v.Unit]; own && !stated[v.Unit] {
					stated[v.Unit] = true
					better := "lower"
					if more {
						better = "higher"
					}
					fmt.Fprintf(&b, "Unit %s better=%s\n", v.Unit, better)
				}
			}
		}
		for _, m := range benchmarks {
			// A stored document may have any text where a name is made of.
			fmt.Fprintf(&b, "Benchmark%s %d", named.Inert(strings.Join(strings.Fields(m.Name), "-")), max(1, m.Times))
			for _, v := range m.Values {
				fmt.Fprintf(&b, " %s %s", strconv.FormatFloat(math.Round(v.Value*1e6)/1e6, 'f', -1, 64), v.Unit)
			}
			b.WriteString("\n")
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// once is a benchmark that was done once.
func once(name string, values ...Value) Benchmark {
	return Benchmark{Name: name, Times: 1, Values: values}
}

// Benchmarks has a line for each phase, one for each edge, and one for each run if there are several.
func (r *Run) Benchmarks() (all []Benchmark) {
	for _, p := range r.Phases {
		values := []Value{{p.Seconds * 1e9, "ns/op"}}
		if p.Name != drain {
			values = append(values, Value{Rate(r.Input.Bytes, p.Seconds), "GiB/s"})
		}
		all = append(all, once("Run/phase="+p.Name, values...))
	}
	all = append(all, once("Run/phase=all", Value{r.WallSeconds * 1e9, "ns/op"}))
	if len(r.Runs) > 1 {
		for _, one := range r.Runs {
			all = append(all, once("Run/whole", Value{one.Seconds * 1e9, "ns/op"}, Value{one.GiBPerS, "GiB/s"}, Value{one.CPUSeconds * 1e9, "cpu-ns/op"}))
		}
	}
	for _, e := range r.Edges {
		if e.Batches > 0 {
			all = append(all, Benchmark{"Run/from=" + e.From + "/to=" + e.To, e.Batches, []Value{{e.Seconds * 1e9 / float64(e.Batches), "ns/op"}, {e.GiBPerS, "GiB/s"}}})
		}
	}
	return all
}

// Benchmarks has a line for each pair of each row.
func (b *Bandwidth) Benchmarks() (all []Benchmark) {
	for _, r := range b.Rows {
		if r.Error != "" {
			continue
		}
		name := fmt.Sprintf("Bandwidth/from=%s/to=%s/bytes=%d/moves=%d", r.From, r.To, r.Bytes, r.Threads)
		if r.State != "" {
			name += "/state=" + r.State
		}
		if r.BothWays {
			name += "/both-ways"
		}
		for i, v := range r.Samples.GiBPerS {
			all = append(all, once(name, Value{v, "GiB/s"}, Value{r.Samples.LimitGiBPerS[i], "limit-GiB/s"}))
		}
	}
	return all
}

// Benchmarks has two lines for each side and round: writing and reading.
func (c *Compare) Benchmarks() (all []Benchmark) {
	add := func(side string, r Rates) {
		all = append(all, once("Compare/side="+side+"/op=write", Value{r.WriteGiBPerS, "GiB/s"}), once("Compare/side="+side+"/op=read", Value{r.ReadGiBPerS, "GiB/s"}))
	}
	for _, round := range c.Samples {
		add("spillway", round.Ours.Rates)
		all = append(all, once("Compare/side=spillway-laid-out/op=write", Value{round.Ours.PutWriteGiBPerS, "GiB/s"}))
		add("spillway-rewritten", round.Ours.Rewritten)
		add(c.Peer.Name, round.Peer)
		add(c.Peer.Name+"-warm", round.Warm)
	}
	return all
}
