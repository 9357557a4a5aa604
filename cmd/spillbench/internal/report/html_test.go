package report

import (
	"strings"
	"testing"
)

// TestMistyped: a value of another type is named by its path and in plain words, without Go's.
func TestMistyped(t *testing.T) {
	for text, want := range map[string]string{
		`[]`:           "it is a list, and not an object",
		`{"schema":3}`: "schema is a number, and not a text",
		`"command":"bandwidth","rows":[{"samples":[1]}]`:    "rows.samples is a list, and not an object",
		`"command":"bandwidth","rows":{}`:                   "rows is an object, and not a list",
		`"command":"run","input":{"rows":1.5}`:              "input.rows is the number 1.5, and not a whole number",
		`"command":"run","config":{"gpu":true}`:             "config.gpu is true or false, and not a text",
		`"command":"run","config":{"seed":-1}`:              "config.seed is the number -1, and not a whole number from 0 up",
		`"command":"run","wall_seconds":"long"`:             "wall_seconds is a text, and not a number",
		`"command":"run","verify":{"checked":"yes"}`:        "verify.checked is a text, and not true or false",
		`"command":"run","edges":[{"by_reason":{"x":"y"}}]`: "edges.by_reason is a text, and not a whole number",
		`"command":"run","time":"today"`:                    "today is no time such as 2026-11-25T12:30:00Z",
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
