package report

import (
	"fmt"
	"strings"

	"github.com/spillway-db/spillway/internal/size"
)

// Tune is the document of tune. Gains say how much faster a run was than one of the default, as a
// share: 0.25 does in 100 seconds what took 125. Low and High bound them; see docs/tuning.md.
type Tune struct {
	Header
	Config           RunConfig      `json:"config"` // the default: what was compared with
	Input            Input          `json:"input"`
	BudgetSeconds    float64        `json:"budget_seconds"`
	MostWrittenBytes int64          `json:"most_written_bytes"` // to disks, before compression
	Runs             int            `json:"runs"`
	WrittenBytes     int64          `json:"written_bytes"`
	DefaultSeconds   float64        `json:"default_seconds"` // median of the default's runs
	Variation        float64        `json:"variation"`       // between two runs of the default, one after the other: the median, as a share
	Settings         []TuneSetting  `json:"settings"`
	Comparison       TuneComparison `json:"comparison"`
	Better           bool           `json:"better"`  // the chosen configuration is faster; else it is the default
	Verdict          string         `json:"verdict"` // in words
	Chosen           TuneChosen     `json:"chosen"`
	WallSeconds      float64        `json:"wall_seconds"`
}

// TuneSetting is a setting, and what was tried in place of its default.
type TuneSetting struct {
	Name    string      `json:"name"` // of the flag, or of several with slashes between
	Default string      `json:"default"`
	Chosen  string      `json:"chosen"`
	Reason  string      `json:"reason"`
	Tried   []TuneTrial `json:"tried"`
}

// TuneTrial is a value that was to be tried. Its gain is that of this value alone.
type TuneTrial struct {
	Value    string    `json:"value"`
	Outcome  string    `json:"outcome"` // kept, tie, slower, second, not again, refused or not tried
	Gain     float64   `json:"gain"`
	GainLow  float64   `json:"gain_low"`
	GainHigh float64   `json:"gain_high"`
	Samples  []float64 `json:"samples"` // gains, one a run

	Vague bool `json:"-"` // its figures are not for people: they are of one run, or noise
}

// TuneComparison is the last one: the default beside what was chosen, in pairs of runs.
type TuneComparison struct {
	Pairs    int         `json:"pairs"` // 0: nothing was worth a comparison
	Gain     float64     `json:"gain"`
	GainLow  float64     `json:"gain_low"`
	GainHigh float64     `json:"gain_high"`
	Samples  TuneSamples `json:"samples"`
}

// TuneSamples are the seconds of the pairs, in order.
type TuneSamples struct {
	DefaultSeconds []float64 `json:"default_seconds"`
	ChosenSeconds  []float64 `json:"chosen_seconds"`
}

// TuneChosen is the configuration, in three forms.
type TuneChosen struct {
	Flags []string `json:"flags"` // those that differ from the defaults of run
	YAML  string   `json:"yaml"`  // a file for --config
	Go    string   `json:"go"`    // a spillway.Config
}

// percent is a share, for people in hundredths and with a sign.
type percent float64

func (p percent) String() string { return fmt.Sprintf("%+.1f %%", 100*float64(p)) }

// Page shows what tune found. notes are lines of their own.
func (t *Tune) Page(notes []string) *Page {
	p := new(Page)
	p.linef("spillbench tune: %s", t.Env.line())
	p.linef("%s of %s in %d batches; %d runs in %.0f s, %s moved to disks", size.Approx(t.Input.Bytes), strings.Join(t.Input.Sources, ", "),
		t.Input.Batches, t.Runs, t.WallSeconds, size.Approx(t.WrittenBytes))
	apart := ""
	if t.Variation > 0 {
		apart = fmt.Sprintf("; two runs of it, one after the other, differ by %.1f %% (medians)", 100*t.Variation)
	}
	p.linef("the default takes %.3f s%s", t.DefaultSeconds, apart)
	p.linef("")
	if len(t.Settings) > 0 {
		sheet := &sheet{columns: []column{{head: "setting", key: "name"}, {head: "default", key: "default"}, {head: "chosen", key: "chosen"},
			{head: "gain", key: "gain"}, {head: "from", key: "gain_low"}, {head: "to", key: "gain_high"}, {head: "reason", key: "reason"}}}
		for _, s := range t.Settings {
			row := []any{s.Name, s.Default, s.Chosen, nil, nil, nil, s.Reason}
			for _, trial := range s.Tried {
				if s.Chosen != s.Default && trial.Value == s.Chosen && !trial.Vague {
					row[3], row[4], row[5] = percent(trial.Gain), percent(trial.GainLow), percent(trial.GainHigh)
				}
			}
			sheet.add(row...)
		}
		p.table(sheet)
		p.linef("")
	}
	p.linef("%s", t.Verdict)
	p.notes(notes)
	if len(t.Chosen.Flags) == 0 {
		p.linef("")
		p.linef("flags: none, the default")
	} else {
		p.code("flags", "", strings.Join(t.Chosen.Flags, " "))
	}
	p.code("YAML, for --config FILE", "yaml", t.Chosen.YAML)
	p.code("Go", "go", t.Chosen.Go)
	return p
}
