package report

import (
	"strings"
	"testing"
)

// TestVerdictOfVerify: the last line says whether all files are sound.
func TestVerdictOfVerify(t *testing.T) {
	for want, files := range map[string][]File{
		"verified: all 5 batches": {{Batches: 2}, {Batches: 3}},
		"FAILED":                  {{Batches: 2}, {Batches: 3, Mismatches: 1}},
		"FAILED: the last":        {{Error: "cannot be read"}},
		"nothing was verified":    {{}},
	} {
		var b strings.Builder
		(&Verify{Files: files}).Page(nil).Write(&b, Table)
		if lines := strings.Split(strings.TrimSpace(b.String()), "\n"); !strings.HasPrefix(lines[len(lines)-1], want) {
			t.Errorf("%v: the last line is %q, want %q", files, lines[len(lines)-1], want)
		}
	}
}
