// Command results writes the tables of measured figures in README.md and docs/results/README.md.
//
//	go run ./scripts/results                    write the tables from the newest files of figures
//	go run ./scripts/results -check             exit with status 1 if a table differs from its file
//	go run ./scripts/results -measure FILE      measure seven times and write FILE; ten minutes on two cores
//
// The table in README.md has the figures of the newest check of a real GPU in docs/results, which
// scripts/gpu-check.sh wrote. The table in docs/results/README.md has those of the newest file in
// docs/results/readme. Figures that -measure cannot measure, because they need another program or
// its data, are copied from that file with their date.
package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/perf/benchfmt"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("results: ")
	root := flag.String("root", ".", "directory of the module")
	check := flag.Bool("check", false, "write nothing; exit with status 1 if a table differs from its file")
	measureTo := flag.String("measure", "", "measure, and write the figures to this file")
	rounds := flag.Int("rounds", 7, "with -measure: number of rounds")
	machine := flag.String("machine", "", "with -measure: a description of the machine; empty: as before")
	flag.Parse()
	if err := run(*root, *check, *measureTo, *rounds, *machine); err != nil {
		log.Fatal(err)
	}
}

func run(root string, check bool, measureTo string, rounds int, machine string) error {
	var figures Figures
	name, err := newest(filepath.Join(root, "docs", "results", "readme"), &figures, true)
	if err != nil {
		return err
	}
	if figures.Schema != schema || !strings.HasPrefix(filepath.Base(name), figures.Date) {
		return fmt.Errorf("docs/results/readme: file %q: schema %q, date %q", name, figures.Schema, figures.Date)
	}
	if measureTo != "" {
		now, err := measure(root, rounds, &figures)
		if err != nil {
			return err
		}
		now.Machine = cmp.Or(machine, figures.Machine)
		text, err := json.MarshalIndent(now, "", "  ")
		if err != nil {
			return err
		}
		return os.WriteFile(measureTo, append(text, '\n'), 0o644)
	}
	text, err := table(&figures)
	if err != nil {
		return err
	}
	if err := replace(filepath.Join(root, "docs", "results", "README.md"), begin, text, check); err != nil {
		return err
	}
	c, err := newestCheck(root)
	if err != nil || c == nil {
		return err
	}
	if text, err = gpuTable(c); err != nil {
		return err
	}
	return replace(filepath.Join(root, "README.md"), beginGPU, text, check)
}

// newest decodes the newest JSON file of a directory and returns its name, which begins with its
// date. The name is empty if there is no file. A strict file may have no unknown fields.
func newest(dir string, into any, strict bool) (name string, err error) {
	names, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil || len(names) == 0 {
		return "", err
	}
	name = slices.Max(names)
	text, err := os.ReadFile(name)
	if err != nil {
		return "", err
	}
	dec := json.NewDecoder(bytes.NewReader(text))
	if strict {
		dec.DisallowUnknownFields()
	}
	if err := dec.Decode(into); err != nil {
		return "", fmt.Errorf("%s: %w", name, err)
	}
	return name, nil
}

// schema is the version of the files of figures.
const schema = "spillway.figures/v1"

// Figures are the figures that were measured on a machine.
type Figures struct {
	Schema  string   `json:"schema"`
	Date    string   `json:"date"` // 2026-01-31, in UTC
	Machine string   `json:"machine"`
	Commit  string   `json:"commit,omitempty"`
	Note    string   `json:"note,omitempty"`
	Figures []Figure `json:"figures"`
}

// Figure is one number.
type Figure struct {
	Name    string    `json:"name"` // of the benchmark or other program that measured it
	Unit    string    `json:"unit"` // as the benchmark prints it; benchfmt turns ns/op into sec/op
	Median  float64   `json:"median"`
	Samples []float64 `json:"samples,omitempty"`
	Date    string    `json:"date,omitempty"` // if it differs from the file's
}

// find returns a figure by "name unit".
func (f *Figures) find(key string) (Figure, error) {
	i := slices.IndexFunc(f.Figures, func(g Figure) bool { return g.Name+" "+g.Unit == key })
	if i < 0 {
		return Figure{}, fmt.Errorf("the figures of %s have no %q", f.Date, key)
	}
	return f.Figures[i], nil
}

// source is a command whose figures are in the table.
type source struct {
	command string // as the table shows it
	run     string // the arguments of go that measure it; empty: -measure cannot
}

var (
	moves   = source{"go test ./convert -run xxx -bench Move", "test -run xxx -bench Move/.*/64MiB ./convert"}
	codecs  = source{"go test ./convert -run xxx -bench Codec", "test -run xxx -bench Codec/flights/as-it-is ./convert"}
	small   = source{"go test ./test -run xxx -bench SmallBatches", "test -run xxx -bench SmallBatches ./test"}
	tiny    = source{"go test ./test -run xxx -bench TinySpill", "test -run xxx -bench TinySpill/host/4KiB ./test"}
	reserve = source{
		"go test ./reservation -run xxx -bench ReserveRelease -cpu 1",
		"test -run xxx -bench ReserveRelease -cpu 1 ./reservation",
	}
	compare = source{
		"go run ./cmd/spillbench compare --peer arrow-ipc",
		"run ./cmd/spillbench compare --peer arrow-ipc --quiet --json -",
	}
	duckdb = source{"scripts/duckdb", ""} // it downloads DuckDB and needs a file of flights
)

// row is one row of the table. Each {} in text is the next figure, rounded to so many decimals.
type row struct {
	what, text string
	figures    []string
	decimals   int
	scale      float64 // factor from the measured to the printed unit; 0: 1
	from       source
	options    string // of the command, if they differ from the row before
}

var rows = []row{
	{"64 MiB batch, host → disk / disk → host", "{} / {} of the baseline",
		[]string{"Move/host-disk/64MiB of-limit", "Move/disk-host/64MiB of-limit"}, 2, 0, moves, ""},
	{"64 MiB batch, simulated GPU → disk / back", "{} / {} of the baseline",
		[]string{"Move/gpu-disk/64MiB of-limit", "Move/disk-gpu/64MiB of-limit"}, 2, 0, moves, ""},
	{"64 MiB batch, simulated GPU → host / back", "{} / {} of the baseline",
		[]string{"Move/gpu-host/64MiB of-limit", "Move/host-gpu/64MiB of-limit"}, 2, 0, moves, ""},
	{"4 KiB batch, put and spilled to host / to disk", "{} µs / {} µs",
		[]string{"SmallBatches/host sec/put", "SmallBatches/disk sec/put"}, 0, 1e6, small, ""},
	{"4 KiB batches, spilled from host to disk", "{} MiB/s",
		[]string{"TinySpill/host/4KiB MiB/s"}, 0, 0, tiny, ""},
	{"CPU time per batch of that spill", "{} µs",
		[]string{"TinySpill/host/4KiB cpu-us/batch"}, 1, 0, tiny, ""},
	{"reserve and release", "{} ns",
		[]string{"ReserveRelease/specific sec/op"}, 0, 1e9, reserve, ""},
	{"generated table to disk / back", "{} / {} times as fast as arrow-go's IPC files",
		[]string{"compare/arrow-ipc write", "compare/arrow-ipc read"}, 1, 0, compare, ""},
	{"24 million flights (1,053 MiB as Arrow) in 300 MB of memory, stored / read again",
		"{} / {} times as fast as DuckDB 1.4.5",
		[]string{"duckdb/300MB store", "duckdb/300MB read"}, 1, 0, duckdb, ""},
	{"the same in 150 MB of host and 150 MB of simulated GPU memory", "{} / {} times as fast",
		[]string{"duckdb/150MB+150MB store", "duckdb/150MB+150MB read"}, 1, 0, duckdb, ", with `--gpu 150 --host 150`"},
	{"generated flights to disk and back, codec `auto` / `none`", "{} / {} GiB/s",
		[]string{"Codec/flights/as-it-is auto-GiB/s", "Codec/flights/as-it-is none-GiB/s"}, 2, 0, codecs, ""},
}

// table returns the table of docs/results/README.md.
func table(f *Figures) (string, error) {
	day, err := time.Parse(time.DateOnly, f.Date)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	b.WriteString(wrapped("Measured on "+day.Format("2 January 2006")+": "+f.Machine+".") +
		"\n| | Spillway | command |\n|---|---|---|\n")
	var before source
	for _, r := range rows {
		text, date := r.text, ""
		for _, key := range r.figures {
			g, err := f.find(key)
			if err != nil {
				return "", err
			}
			text = strings.Replace(text, "{}", fmt.Sprintf("%.*f", r.decimals, g.Median*cmp.Or(r.scale, 1)), 1)
			if g.Date != "" && g.Date != f.Date {
				date = " (" + g.Date + ")"
			}
		}
		command := "`" + r.from.command + "`"
		if r.from == before {
			command = "the same"
		}
		before = r.from
		fmt.Fprintf(&b, "| %s | %s%s | %s%s |\n", r.what, text, date, command, r.options)
	}
	return b.String(), nil
}

// wrapped returns text in lines of at most 100 columns.
func wrapped(text string) string {
	var b strings.Builder
	line := ""
	for word := range strings.FieldsSeq(text) {
		if utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > 100 {
			b.WriteString(line + "\n")
			line = ""
		}
		line = strings.TrimSpace(line + " " + word)
	}
	return b.String() + line + "\n"
}

// The marks around the tables.
const (
	begin    = "<!-- figures: go run ./scripts/results -->\n"
	beginGPU = "<!-- figures of a real GPU: go run ./scripts/results -->\n"
	end      = "<!-- end of figures -->\n"
)

// replace writes a table between its marks in the file page. With check it only returns an error if
// the page has a different table.
func replace(page, begin, table string, check bool) error {
	old, err := os.ReadFile(page)
	if err != nil {
		return err
	}
	before, rest, ok := strings.Cut(string(old), begin)
	_, after, closed := strings.Cut(rest, end)
	if !ok || !closed {
		return fmt.Errorf("%s has no marks for the table: %s", page, strings.TrimSpace(begin))
	}
	text := before + begin + table + end + after
	if !check {
		return os.WriteFile(page, []byte(text), 0o644)
	}
	if text != string(old) {
		return fmt.Errorf("%s: the table differs from the newest figures: go run ./scripts/results", page)
	}
	return nil
}

// measure runs the commands of the table and returns the medians.
func measure(root string, rounds int, before *Figures) (*Figures, error) {
	now := &Figures{Schema: schema, Date: time.Now().UTC().Format(time.DateOnly)}
	git := exec.Command("git", "rev-parse", "HEAD")
	git.Dir = root
	if out, err := git.Output(); err == nil {
		now.Commit = strings.TrimSpace(string(out))
	}
	samples := make(map[string][]float64)
	for range rounds {
		for _, s := range []source{moves, codecs, small, tiny, reserve, compare} {
			log.Print("go ", s.run)
			cmd := exec.Command("go", strings.Fields(s.run)...)
			cmd.Dir, cmd.Stderr = root, os.Stderr
			out, err := cmd.Output()
			if err != nil {
				return nil, fmt.Errorf("go %s: %w", s.run, err)
			}
			read := ofBenchmarks
			if s == compare {
				read = ofCompare
			}
			if err := read(out, samples); err != nil {
				return nil, err
			}
		}
	}
	for _, r := range rows {
		for _, key := range r.figures {
			if r.from.run == "" {
				old, err := before.find(key)
				if err != nil {
					return nil, err
				}
				old.Date = cmp.Or(old.Date, before.Date)
				now.Figures = append(now.Figures, old)
				continue
			}
			if len(samples[key]) == 0 {
				return nil, fmt.Errorf("no command has measured %q", key)
			}
			unit := strings.LastIndexByte(key, ' ')
			now.Figures = append(now.Figures, Figure{
				Name: key[:unit], Unit: key[unit+1:], Median: median(samples[key]), Samples: samples[key],
			})
		}
	}
	return now, nil
}

func median(of []float64) float64 {
	s := slices.Sorted(slices.Values(of))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

// ofBenchmarks adds the figures in the output of Go's benchmarks.
func ofBenchmarks(out []byte, samples map[string][]float64) error {
	r := benchfmt.NewReader(bytes.NewReader(out), "output")
	for r.Scan() {
		res, ok := r.Result().(*benchfmt.Result)
		if !ok {
			continue
		}
		name := string(res.Name)
		if i := strings.LastIndexByte(name, '-'); i > 0 && strings.Trim(name[i+1:], "0123456789") == "" {
			name = name[:i] // the number of processors
		}
		for _, v := range res.Values {
			key := name + " " + v.Unit
			samples[key] = append(samples[key], v.Value)
		}
	}
	return r.Err()
}

// ofCompare adds the ratios of spillbench compare.
func ofCompare(out []byte, samples map[string][]float64) error {
	var doc struct {
		Ratio *struct{ Write, Read float64 }
	}
	if err := json.Unmarshal(out, &doc); err != nil {
		return err
	}
	if doc.Ratio == nil {
		return errors.New("spillbench compare has no ratio")
	}
	samples["compare/arrow-ipc write"] = append(samples["compare/arrow-ipc write"], doc.Ratio.Write)
	samples["compare/arrow-ipc read"] = append(samples["compare/arrow-ipc read"], doc.Ratio.Read)
	return nil
}
