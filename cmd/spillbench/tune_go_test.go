package main

import (
	"os"
	"strings"
	"testing"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/tune"
)

// goldenGo is where the Go that tune prints is compiled.
const goldenGo = "tune_golden_test.go"

// TestGoCompilesAndOpens: what tune prints as Go is in a file that is compiled with the tests, and an
// engine opens with it. Set UPDATE_GOLDEN to write the file anew.
func TestGoCompilesAndOpens(t *testing.T) {
	t.Parallel()
	file := `package main

import (
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/reservation/permit"
)

// What follows is what tune prints, so that it is compiled. TestGoCompilesAndOpens writes it.

`
	for _, c := range []struct {
		name, args string
		first      int // which value of each setting is chosen; 0: the default
	}{
		{"tunedConfig", "--gpu=sim --gpu-memory=3MiB --host-memory=5MB --encrypt", 1},
		{"tunedToDefaults", "--gpu-memory=25% --disk=/spill/a --disk=/spill/b=9GiB --monitor-period=1500us --stuck-after=1m", 0},
	} {
		tu, fs := tuningOf(t, strings.Fields(c.args)...)
		choice := make(tune.Choice, len(tu.knobs))
		for i := range choice {
			choice[i] = c.first
		}
		v, set, err := tu.with(choice)
		if err != nil {
			t.Fatal(err)
		}
		v.input.workers, v.partitions = 8, 4 // as on a machine with four cores
		text, err := configuration{flags: v, set: set, given: fs, verdict: "The verdict."}.goText()
		if err != nil {
			t.Fatal(err)
		}
		file += strings.Replace(text, "var config = ", "var "+c.name+" = ", 1) + "\n"
	}
	file = strings.TrimSuffix(file, "\n")
	if os.Getenv("UPDATE_GOLDEN") != "" {
		if err := os.WriteFile(goldenGo, []byte(file), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if golden, err := os.ReadFile(goldenGo); err != nil || string(golden) != file {
		t.Fatalf("%v; tune prints\n%s\nand %s has\n%s", err, file, goldenGo, golden)
	}
	eng, err := spillway.Open(t.Context(), tunedConfig)
	if err != nil {
		t.Fatal(err)
	}
	if err := eng.Close(); err != nil {
		t.Error(err)
	}
	if err := tunedToDefaults.Validate(); err != nil {
		t.Error(err)
	}
}
