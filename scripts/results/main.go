// Command results writes the tables of measured figures in README.md and docs/results/README.md.
//
//	go run ./scripts/results                    write the tables from the newest files of figures
//	go run ./scripts/results -check             exit with 1 if a table differs from its file
//	go run ./scripts/results -measure FILE      measure seven times and write FILE; ten minutes on two cores
//
// The table in README.md comes from the newest check of a real GPU in docs/results, which
// scripts/gpu-check.sh wrote. The table in docs/results/README.md comes from the newest file in
// docs/results/readme. Figures that need another program or its data are not measured by -measure:
// it copies them from the newest file, with their dates.
package main

import (
	"bytes"
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
	check := flag.Bool("check", false, "write nothing; exit with 1 if a table differs from its file")
	measureTo := flag.String("measure", "", "measure, and write the figures to this file")
	rounds := flag.Int("rounds", 7, "with -measure: how often")
	machine := flag.String("machine", "", "with -measure: the machine, in words; empty: as before")
	flag.Parse()
	if err := run(*root, *check, *measureTo, *rounds, *machine); err != nil {
		log.Fatal(err)
	}
}

func run(root string, check bool, measureTo string, rounds int, machine string) error {
	figures, err := newest(root)
	if err != nil {
		return err
	}
	if measureTo != "" {
		now, err := measure(root, rounds, figures)
		if err != nil {
			return err
		}
		if machine != "" {
			now.Machine = machine
		}
		text, err := json.MarshalIndent(now, "", "  ")
		if err != nil {
			return err
		}
		return os.WriteFile(measureTo, append(text, '\n'), 0o644)
	}
	page := filepath.Join(root, "docs", "results", "README.md")
	if err := replace(page, begin, check, func() (string, error) { return table(figures) }); err != nil {
		return err
	}
	c, err := newestCheck(root)
	if err != nil || c == nil {
		return err
	}
	return replace(filepath.Join(root, "README.md"), beginGPU, check, func() (string, error) { return gpuTable(c) })
}

// schema names the version of files of figures.
const schema = "spillway.figures/v1"

// Figures is what was measured on a machine.
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
	Name    string    `json:"name"` // of the benchmark, or of what else has measured it
	Unit    string    `json:"unit"` // as the benchmark prints it; of ns/op benchfmt makes sec/op
	Median  float64   `json:"median"`
	Samples []float64 `json:"samples,omitempty"`
	Date    string    `json:"date,omitempty"` // if it is not that of the file
}

// find returns a figure by "name unit".
func (f *Figures) find(key string) (Figure, error) {
	i := slices.IndexFunc(f.Figures, func(g Figure) bool { return g.Name+" "+g.Unit == key })
	if i < 0 {
		return Figure{}, fmt.Errorf("the figures of %s have no %q", f.Date, key)
	}
	return f.Figures[i], nil
}

// newest reads the newest file of figures.
func newest(root string) (*Figures, error) {
	names, err := filepath.Glob(filepath.Join(root, "docs", "results", "readme", "*.json"))
	if err != nil {
		return nil, err
	}
	if len(names) == 0 {
		return nil, errors.New("there is no file of figures in docs/results/readme")
	}
	name := slices.Max(names)
	text, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	f := new(Figures)
	if err := dec.Decode(f); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if f.Schema != schema || !strings.HasPrefix(filepath.Base(name), f.Date) {
		return nil, fmt.Errorf("%s: schema %q, date %q", name, f.Schema, f.Date)
	}
	return f, nil
}

// source is a command whose figures are in the table.
type source struct {
	command string // as the table has it
	args    []string
	pattern string // of a benchmark; empty: spillbench compare
}

var (
	moves = source{
		command: "go test ./convert -run xxx -bench Move",
		args:    []string{"./convert"}, pattern: "Move/.*/64MiB",
	}
	codecs = source{
		command: "go test ./convert -run xxx -bench Codec",
		args:    []string{"./convert"}, pattern: "Codec/flights/as-it-is",
	}
	small = source{
		command: "go test ./test -run xxx -bench SmallBatches",
		args:    []string{"./test"}, pattern: "SmallBatches",
	}
	tiny = source{
		command: "go test ./test -run xxx -bench TinySpill",
		args:    []string{"./test"}, pattern: "TinySpill/host/4KiB",
	}
	reserve = source{
		command: "go test ./reservation -run xxx -bench ReserveRelease -cpu 1",
		args:    []string{"-cpu", "1", "./reservation"}, pattern: "ReserveRelease",
	}
	compare = source{
		command: "go run ./cmd/spillbench compare --peer arrow-ipc",
		args:    []string{"run", "./cmd/spillbench", "compare", "--peer", "arrow-ipc", "--quiet", "--json", "-"},
	}
	duckdb = source{command: "scripts/duckdb"} // which downloads DuckDB, and wants a file of flights
)

// row is one of the table. Each {} in text is the next figure, rounded to so many decimals.
type row struct {
	what, text string
	figures    []string
	decimals   int
	scale      float64 // of what is printed to what was measured; 0: 1
	from       source
	how        string // instead of the command, in words
}

var rows = []row{
	{
		"64 MiB batch, host → disk / disk → host", "{} / {} of the baseline",
		[]string{"Move/host-disk/64MiB of-limit", "Move/disk-host/64MiB of-limit"}, 2, 0, moves, "",
	},
	{
		"64 MiB batch, simulated GPU → disk / back", "{} / {} of the baseline",
		[]string{"Move/gpu-disk/64MiB of-limit", "Move/disk-gpu/64MiB of-limit"}, 2, 0, moves, "the same",
	},
	{
		"64 MiB batch, simulated GPU → host / back", "{} / {} of the baseline",
		[]string{"Move/gpu-host/64MiB of-limit", "Move/host-gpu/64MiB of-limit"}, 2, 0, moves, "the same",
	},
	{
		"4 KiB batch, put and spilled to host / to disk", "{} µs / {} µs",
		[]string{"SmallBatches/host sec/put", "SmallBatches/disk sec/put"}, 0, 1e6, small, "",
	},
	{"4 KiB batches, spilled from host to disk", "{} MiB/s", []string{"TinySpill/host/4KiB MiB/s"}, 0, 0, tiny, ""},
	{"CPU time per batch of that spill", "{} µs", []string{"TinySpill/host/4KiB cpu-us/batch"}, 1, 0, tiny, "the same"},
	{"reserve and release", "{} ns", []string{"ReserveRelease/specific sec/op"}, 0, 1e9, reserve, ""},
	{
		"generated table to disk / back", "{} / {} times as fast as arrow-go's IPC files",
		[]string{"compare/arrow-ipc write", "compare/arrow-ipc read"}, 1, 0, compare, "",
	},
	{
		"24 million flights (1,053 MiB as Arrow) in 300 MB of memory, stored / read again",
		"{} / {} times as fast as DuckDB 1.4.5",
		[]string{"duckdb/300MB store", "duckdb/300MB read"}, 1, 0, duckdb, "",
	},
	{
		"the same in 150 MB of host and 150 MB of simulated GPU memory", "{} / {} times as fast",
		[]string{"duckdb/150MB+150MB store", "duckdb/150MB+150MB read"}, 1, 0, duckdb,
		"the same, with `--gpu 150 --host 150`",
	},
	{
		"generated flights to disk and back, codec `auto` / `none`", "{} / {} GiB/s",
		[]string{"Codec/flights/as-it-is auto-GiB/s", "Codec/flights/as-it-is none-GiB/s"}, 2, 0, codecs, "",
	},
}

// table returns the table of docs/results/README.md.
func table(f *Figures) (string, error) {
	day, err := time.Parse(time.DateOnly, f.Date)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	b.WriteString(wrapped("Measured on " + day.Format("2 January 2006") + ": " + f.Machine + "."))
	b.WriteString("\n| | Spillway | command |\n|---|---|---|\n")
	for _, r := range rows {
		text, dates := r.text, ""
		for _, key := range r.figures {
			g, err := f.find(key)
			if err != nil {
				return "", err
			}
			scale := r.scale
			if scale == 0 {
				scale = 1
			}
			text = strings.Replace(text, "{}", fmt.Sprintf("%.*f", r.decimals, g.Median*scale), 1)
			if g.Date != "" && g.Date != f.Date {
				dates = " (" + g.Date + ")"
			}
		}
		how := r.how
		if how == "" {
			how = "`" + r.from.command + "`"
		}
		fmt.Fprintf(&b, "| %s | %s%s | %s |\n", r.what, text, dates, how)
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

// The marks around the tables in README.md and docs/results/README.md.
const (
	begin    = "<!-- figures: go run ./scripts/results -->\n"
	beginGPU = "<!-- figures of a real GPU: go run ./scripts/results -->\n"
	end      = "<!-- end of figures -->\n"
)

// replace writes a table between its marks in the file page. With check it only returns an error if
// the page has a different table.
func replace(page, begin string, check bool, table func() (string, error)) error {
	text, err := os.ReadFile(page)
	if err != nil {
		return err
	}
	old := string(text)
	before, rest, ok := strings.Cut(old, begin)
	_, after, closed := strings.Cut(rest, end)
	if !ok || !closed {
		return fmt.Errorf("%s has no marks for the table: %s", page, strings.TrimSpace(begin))
	}
	made, err := table()
	if err != nil {
		return err
	}
	made = before + begin + made + end + after
	if check && made != old {
		return fmt.Errorf("%s: the table differs from the newest figures: go run ./scripts/results", page)
	}
	if check {
		return nil
	}
	return os.WriteFile(page, []byte(made), 0o644)
}

// measure runs the commands of the table, and takes medians.
func measure(root string, rounds int, before *Figures) (*Figures, error) {
	now := &Figures{Schema: schema, Date: time.Now().UTC().Format(time.DateOnly), Machine: before.Machine}
	git := exec.Command("git", "rev-parse", "HEAD")
	git.Dir = root
	if out, err := git.Output(); err == nil {
		now.Commit = strings.TrimSpace(string(out))
	}
	samples := make(map[string][]float64)
	for range rounds {
		for _, s := range []source{moves, codecs, small, tiny, reserve, compare} {
			args := s.args
			if s.pattern != "" {
				args = append([]string{"test", "-run", "xxx", "-bench", s.pattern}, args...)
			}
			log.Print("go ", strings.Join(args, " "))
			cmd := exec.Command("go", args...)
			cmd.Dir, cmd.Stderr = root, os.Stderr
			out, err := cmd.Output()
			if err != nil {
				return nil, fmt.Errorf("go %s: %w", strings.Join(args, " "), err)
			}
			read := ofBenchmarks
			if s.pattern == "" {
				read = ofCompare
			}
			if err := read(out, samples); err != nil {
				return nil, err
			}
		}
	}
	for _, r := range rows {
		for _, key := range r.figures {
			name, unit, _ := cutLast(key)
			g := Figure{Name: name, Unit: unit, Samples: samples[key]}
			if len(g.Samples) == 0 {
				if r.from.args != nil {
					return nil, fmt.Errorf("nothing has measured %q", key)
				}
				old, err := before.find(key)
				if err != nil {
					return nil, err
				}
				g = old
				if g.Date == "" {
					g.Date = before.Date
				}
			} else {
				g.Median = median(g.Samples)
			}
			now.Figures = append(now.Figures, g)
		}
	}
	return now, nil
}

func cutLast(key string) (name, unit string, found bool) {
	i := strings.LastIndexByte(key, ' ')
	return key[:max(0, i)], key[i+1:], i >= 0
}

func median(of []float64) float64 {
	s := slices.Sorted(slices.Values(of))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

// ofBenchmarks adds what Go's benchmarks have printed.
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
