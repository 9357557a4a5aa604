package report

import (
	"strings"
	"testing"
)

// TestMistyped: the error of a value of another type has its path and JSON type, and no Go type.
func TestMistyped(t *testing.T) {
	for text, want := range map[string]string{
		`[]`:           "the document: unexpected array",
		`{"schema":3}`: "schema: unexpected number",
		`"command":"bandwidth","rows":[{"samples":[1]}]`:    "rows.samples: unexpected array",
		`"command":"bandwidth","rows":{}`:                   "rows: unexpected object",
		`"command":"run","input":{"rows":1.5}`:              "input.rows: unexpected number 1.5",
		`"command":"run","config":{"gpu":true}`:             "config.gpu: unexpected bool",
		`"command":"run","config":{"seed":-1}`:              "config.seed: unexpected number -1",
		`"command":"run","wall_seconds":"long"`:             "wall_seconds: unexpected string",
		`"command":"run","verify":{"checked":"yes"}`:        "verify.checked: unexpected string",
		`"command":"run","edges":[{"by_reason":{"x":"y"}}]`: "edges.by_reason: unexpected string",
		`"command":"run","waits":{"p999":-1}`:               "its p999 is -1",
	} {
		if strings.HasPrefix(text, `"`) {
			text = `{"schema":"` + Schema + `",` + text + "}"
		}
		_, err := Read([]byte(text))
		if err == nil || !strings.HasSuffix(err.Error(), ": "+want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}
