package quota_test

import (
	"math/big"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
)

// env is an environment.
func env(pairs ...string) func(string) (string, bool) {
	m := make(map[string]string)
	for _, p := range pairs {
		name, value, _ := strings.Cut(p, "=")
		m[name] = value
	}
	return func(name string) (string, bool) {
		v, ok := m[name]
		return v, ok
	}
}

func TestFromEnv(t *testing.T) {
	for name, c := range map[string]struct {
		env      []string
		limit    string // as it prints
		source   string
		ratio    string
		physical int64
		ledger   string
		group    string
	}{
		"nothing": {},
		"limit":   {env: []string{"SPILLWAY_GPU_MEMORY_LIMIT=4Gi"}, limit: "4GiB", source: "SPILLWAY_GPU_MEMORY_LIMIT"},
		"share": {env: []string{"SPILLWAY_GPU_MEMORY_LIMIT=12.5%"}, limit: "12.5%",
			source: "SPILLWAY_GPU_MEMORY_LIMIT"},
		"exponent": {
			env: []string{"SPILLWAY_GPU_MEMORY_LIMIT=1e9"}, limit: "1GB", source: "SPILLWAY_GPU_MEMORY_LIMIT",
		},
		"fallback": {env: []string{"NVSHARE_GPU_MEMORY_LIMIT=500MB"}, limit: "500MB",
			source: "NVSHARE_GPU_MEMORY_LIMIT"},
		"ours comes first": {env: []string{"NVSHARE_GPU_MEMORY_LIMIT=1Gi", "SPILLWAY_GPU_MEMORY_LIMIT=2Gi"},
			limit: "2GiB", source: "SPILLWAY_GPU_MEMORY_LIMIT"},
		"theirs may be wrong if ours is set": {
			env: []string{"NVSHARE_GPU_MEMORY_LIMIT=much", "SPILLWAY_GPU_MEMORY_LIMIT=2Gi"}, limit: "2GiB",
			source: "SPILLWAY_GPU_MEMORY_LIMIT",
		},
		"ratio":            {env: []string{"SPILLWAY_GPU_MEMORY_OVERSUB_RATIO=1.5"}, ratio: "3/2"},
		"nvshare's ratio":  {env: []string{"NVSHARE_GPU_MEMORY_OVERSUB_RATIO=0.5"}, ratio: "1/2"},
		"ratio, short":     {env: []string{"SPILLWAY_GPU_OVERSUB_RATIO=3"}, ratio: "3"},
		"nvshare's, short": {env: []string{"NVSHARE_GPU_OVERSUB_RATIO=4"}, ratio: "4"},
		"ratio exactly":    {env: []string{"SPILLWAY_GPU_MEMORY_OVERSUB_RATIO=1.1"}, ratio: "11/10"},
		"ratio as a power": {env: []string{"SPILLWAY_GPU_MEMORY_OVERSUB_RATIO=25e-1"}, ratio: "5/2"},
		"first name first": {env: []string{"SPILLWAY_GPU_OVERSUB_RATIO=x", "SPILLWAY_GPU_MEMORY_OVERSUB_RATIO=2"},
			ratio: "2"},
		"their first first": {env: []string{"NVSHARE_GPU_OVERSUB_RATIO=x", "NVSHARE_GPU_MEMORY_OVERSUB_RATIO=2"},
			ratio: "2"},
		"our prefix first": {env: []string{"NVSHARE_GPU_MEMORY_OVERSUB_RATIO=x", "SPILLWAY_GPU_OVERSUB_RATIO=5"},
			ratio: "5"},
		"physical":          {env: []string{"SPILLWAY_GPU_PHYSICAL_MEMORY_MB=8192"}, physical: 8 << 30},
		"physical fallback": {env: []string{"NVSHARE_GPU_PHYSICAL_MEMORY_MB=1"}, physical: 1 << 20},
		"ledger": {env: []string{"SPILLWAY_GPU_QUOTA_DIR=/run/x", "SPILLWAY_GPU_QUOTA_GROUP=etl"},
			ledger: "/run/x", group: "etl"},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := quota.FromEnv(env(c.env...))
			if err != nil {
				t.Fatal(err)
			}
			ratio := ""
			if s.Ratio != nil {
				ratio = s.Ratio.RatString()
			}
			if s.Limit.String() != c.limit || s.Source != c.source || ratio != c.ratio || s.Physical != c.physical ||
				s.Ledger != c.ledger || s.Group != c.group {
				t.Errorf("%+v, limit %q, ratio %q", s, s.Limit.String(), ratio)
			}
			if s.Limit.IsZero() != (c.limit == "") {
				t.Errorf("IsZero = %v", s.Limit.IsZero())
			}
			if err := s.Validate(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestWrongEnvironment: whatever is wrong is an error that quotes it and names the
// variable, and never means "no limit".
func TestWrongEnvironment(t *testing.T) {
	sizes := []string{
		"",
		"0",
		"0Gi",
		"-1",
		"-1Gi",
		"5m",
		"5K",
		"5KB",
		"Gi",
		"5 GiB",
		"5GiBx",
		" 5GiB",
		"5GiB ",
		"1e",
		"1e3Gi",
		"1e-1",
		"1e19",
		"0e9",
		"0x10",
		"NaN",
		"Inf",
		"none",
		"unlimited",
		"9223372036854775808",
		"8Ei",
		"16E",
		".5Gi",
		"1.1Ki",
		"0%",
		"101%",
		"-5%",
		"%",
		"5%%",
		"1,5Gi",
		"1_000",
	}
	ratios := []string{"", "0", "-1", "-0.5", "NaN", "nan", "Inf", "+Inf", "-Inf", "inf", "1/2", "0x1p1", "1_0", "1.5x",
		" 1", "1 ", "1e400", "1e-400", "one", "1..5", "1e", "0e0", "--1"}
	physicals := []string{"", "0", "-1", "1.5", "8Gi", "1e3", " 1", "0x10", "9223372036854775807", "8796093022208",
		"99999999999999999999"}
	for variable, texts := range map[string][]string{
		"GPU_MEMORY_LIMIT": sizes, "GPU_MEMORY_OVERSUB_RATIO": ratios, "GPU_OVERSUB_RATIO": ratios,
		"GPU_PHYSICAL_MEMORY_MB": physicals,
	} {
		for _, prefix := range []string{"SPILLWAY_", "NVSHARE_"} {
			for _, text := range texts {
				s, err := quota.FromEnv(env(prefix + variable + "=" + text))
				if err == nil {
					t.Errorf("%s%s=%q: want an error", prefix, variable, text)
					continue
				}
				if !strings.Contains(err.Error(), prefix+variable) ||
					text != "" && !strings.Contains(err.Error(), `"`+text+`"`) {
					t.Errorf("%s%s=%q: %v", prefix, variable, text, err)
				}
				if !s.Limit.IsZero() || s.Ratio != nil || s.Physical != 0 {
					t.Errorf("%s%s=%q: settings with an error: %+v", prefix, variable, text, s)
				}
			}
		}
	}
	for name, e := range map[string][]string{
		"ledger set to nothing":  {"SPILLWAY_GPU_QUOTA_DIR="},
		"group set to nothing":   {"SPILLWAY_GPU_QUOTA_DIR=/x", "SPILLWAY_GPU_QUOTA_GROUP="},
		"group without a ledger": {"SPILLWAY_GPU_QUOTA_GROUP=a"},
		"group too long":         {"SPILLWAY_GPU_QUOTA_DIR=/x", "SPILLWAY_GPU_QUOTA_GROUP=" + strings.Repeat("x", 129)},
		"group with a newline":   {"SPILLWAY_GPU_QUOTA_DIR=/x", "SPILLWAY_GPU_QUOTA_GROUP=a\nb"},
	} {
		if _, err := quota.FromEnv(env(e...)); err == nil || !strings.Contains(err.Error(), "SPILLWAY_GPU_QUOTA_") {
			t.Errorf("%s: %v", name, err)
		}
	}
	_, err := quota.FromEnv(env("SPILLWAY_GPU_MEMORY_LIMIT=x", "SPILLWAY_GPU_MEMORY_OVERSUB_RATIO=y"))
	if err == nil || !strings.Contains(err.Error(), `"x"`) || !strings.Contains(err.Error(), `"y"`) {
		t.Errorf("two mistakes: %v; want both", err)
	}
}

func TestSettingsValidate(t *testing.T) {
	for name, s := range map[string]quota.Settings{
		"negative physical":      {Physical: -1},
		"ratio of 0":             {Ratio: new(big.Rat)},
		"negative ratio":         {Ratio: big.NewRat(-1, 2)},
		"group without a ledger": {Group: "a"},
		"negative limit":         {Limit: tier.Amount{Bytes: -1}},
		"limit above all":        {Limit: tier.Amount{Share: 1.1}},
		"long group":             {Ledger: "x", Group: strings.Repeat("x", 129)},
	} {
		if s.Validate() == nil {
			t.Errorf("%s: want an error", name)
		}
	}
}

func FuzzRatio(f *testing.F) {
	for _, s := range []string{"1", "1.5", "NaN", "1e308", "1e-308", "1/3", "0x1", "-0", "1e999999999", "00001.10000"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := quota.ParseRatio(s)
		if (r == nil) != (err != nil) || r != nil && r.Sign() <= 0 {
			t.Errorf("ParseRatio(%q) = %v, %v", s, r, err)
		}
	})
}
