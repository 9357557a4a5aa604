package main

import (
	"fmt"
	"go/format"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/tier"
)

// configuration is what tune prints as flags, YAML and Go.
type configuration struct {
	flags    *runFlags
	set      *pflag.FlagSet // has the texts of flags
	given    *pflag.FlagSet // says which flags were given
	verdict  string
	settings []report.TuneSetting
}

// configured are the flags of a configuration, in the order in which they are printed. Those that say
// what the work is, such as --input and --passes, are not among them.
var configured = []string{"gpu", "gpu-memory", "host-memory", "disk", "limit", "trigger", "stop", "policy", "codec", "encrypt", "monitor-period", "stuck-after",
	"write-ahead", "moves-per-edge", "disk-slots", "workers", "partitions", "rows-per-batch"}

// forms returns the configuration in each form.
func (c configuration) forms() (report.TuneChosen, error) {
	goText, err := c.goText()
	return report.TuneChosen{Flags: c.flagTexts(), YAML: c.yamlText(), Go: goText}, err
}

// text is the value of a flag; disks are absolute, since a configuration is used elsewhere.
func (c configuration) texts(name string) (texts []string) {
	if name != "disk" {
		return []string{c.set.Lookup(name).Value.String()}
	}
	for _, d := range c.flags.engine.disks {
		text := absolute(d.dir)
		if !d.capacity.IsZero() {
			text += "=" + d.capacity.String()
		}
		texts = append(texts, text)
	}
	return texts
}

func absolute(dir string) string {
	if abs, err := filepath.Abs(dir); err == nil {
		return abs
	}
	return dir
}

// reason returns why a flag has its value, and whether that is not its default.
func (c configuration) reason(name string) (reason string, changed bool) {
	for _, s := range c.settings {
		if slices.Contains(strings.Split(s.Name, "/"), name) {
			return s.Reason, s.Chosen != s.Default
		}
	}
	if c.given.Changed(name) {
		return "as given", true
	}
	return "the default; not tried", false
}

// flagTexts are the flags that are not those of run without any.
func (c configuration) flagTexts() []string {
	all := []string{}
	for _, name := range configured {
		if _, changed := c.reason(name); !changed {
			continue
		}
		for _, text := range c.texts(name) {
			all = append(all, shellQuoted("--"+name+"="+text))
		}
	}
	return all
}

// shellQuoted is a word of a command line.
func shellQuoted(word string) string {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-_=./%:,+", r)
	}
	if strings.IndexFunc(word, func(r rune) bool { return !plain(r) }) < 0 {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}

// yamlText is a file for --config, with the reason above each value.
func (c configuration) yamlText() string {
	var b strings.Builder
	comment := func(text string) { fmt.Fprintf(&b, "# %s\n", strings.Join(strings.Fields(text), " ")) }
	comment("Made by spillbench tune, for spillbench run --config FILE.")
	comment(c.verdict)
	for _, name := range configured {
		texts := c.texts(name)
		if len(texts) == 0 {
			continue
		}
		reason, _ := c.reason(name)
		comment(reason)
		if name != "disk" {
			fmt.Fprintf(&b, "%s: %s\n", name, texts[0])
			continue
		}
		fmt.Fprintf(&b, "%s:\n", name)
		for _, text := range texts {
			fmt.Fprintf(&b, "  - %s\n", strconv.Quote(text))
		}
	}
	return b.String()
}

// policies and codecs are what Go calls the values of flags.
var (
	goBackends = map[string]string{"auto": "spillway.Auto", "sim": "spillway.Sim", "cuda": "spillway.CUDA"}
	goPolicies = map[string]string{"cost-aware": "monitor.CostAware()", "plan-order": "monitor.PlanOrder()", "lru": "monitor.LRU()", "largest-first": "monitor.LargestFirst()"}
	goCodecs   = map[string]string{"auto": "convert.CodecAuto", "none": "convert.CodecNone", "s2": "convert.CodecS2", "zstd": "convert.CodecZstd", "bitpack": "convert.CodecBitpack"}
)

// goText is a spillway.Config. What is no part of one is a comment.
func (c configuration) goText() (string, error) {
	e := &c.flags.engine
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("// %s", strings.Join(strings.Fields(c.verdict), " "))
	line("// Work it with %d goroutines, on %d partitions%s.", c.flags.input.workers, c.flags.partitions, rowsInWords(c.flags.input.rowsPerBatch))
	line("var config = spillway.Config{")
	line("GPUs: []spillway.GPUConfig{{Backend: %s, Memory: %s}},", goBackends[e.gpu], goAmount(e.gpuMemory))
	line("HostMemory: %s,", goAmount(e.hostMemory))
	encrypt := ""
	if e.encrypt {
		encrypt = ", Encrypt: true"
	}
	switch {
	case len(e.disks) > 0:
		line("Disks: []spillway.DiskConfig{")
		for _, d := range e.disks {
			capacity := ""
			if !d.capacity.IsZero() {
				capacity = ", Capacity: " + goAmount(d.capacity)
			}
			line("{Dir: %s%s%s},", strconv.Quote(absolute(d.dir)), capacity, encrypt)
		}
		line("},")
	case e.encrypt:
		line("Disks: []spillway.DiskConfig{{Encrypt: true}},")
	}
	marks := fmt.Sprintf("spillway.Fractions{Limit: %v, Trigger: %v, Stop: %v}", e.limit, e.trigger, e.stop)
	line("GPUMarks: %s,", marks)
	line("HostMarks: %s,", marks)
	line("Policy: %s,", goPolicies[e.policy])
	line("Codec: %s,", goCodecs[e.codec])
	line("MonitorPeriod: %s,", goDuration(e.period))
	line("MovesPerEdge: %d,", e.movesPerEdge)
	line("WriteAhead: %d, // %s", int64(e.ahead), e.ahead.String())
	if c.given.Changed("stuck-after") { // the default is for runs, in which nobody comes to free room
		line("StuckAfter: %s,", goDuration(e.stuckAfter))
	}
	line("Limits: spillway.Limits{Permits: permit.Config{Slots: new(%d)}},", e.diskSlots)
	line("}")
	text, err := format.Source([]byte(b.String()))
	return string(text), err
}

func rowsInWords(rows int64) string {
	if rows == 0 {
		return ""
	}
	return fmt.Sprintf(", in batches of %d rows", rows)
}

func goAmount(a tier.Amount) string {
	if a.Share != 0 {
		return fmt.Sprintf("spillway.Share(%v)", a.Share)
	}
	for _, unit := range []struct {
		shift int
		is    int64
	}{{30, 1 << 30}, {20, 1 << 20}} {
		if a.Bytes%unit.is == 0 && a.Bytes > 0 {
			return fmt.Sprintf("spillway.Bytes(%d << %d)", a.Bytes/unit.is, unit.shift)
		}
	}
	return fmt.Sprintf("spillway.Bytes(%d)", a.Bytes)
}

func goDuration(d time.Duration) string {
	for _, unit := range []struct {
		name string
		is   time.Duration
	}{{"time.Second", time.Second}, {"time.Millisecond", time.Millisecond}, {"time.Microsecond", time.Microsecond}} {
		if d%unit.is == 0 {
			return fmt.Sprintf("%d * %s", d/unit.is, unit.name)
		}
	}
	return fmt.Sprintf("%d * time.Nanosecond", d)
}
