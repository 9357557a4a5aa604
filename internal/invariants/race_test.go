package invariants

import (
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
)

// child names the variable that makes this test do what its parent wants to see found.
const child = "SPILLWAY_RACE_CHILD"

// TestRacesAreFound: the detector finds a write to memory that is read at the same time if both use
// a page, and only then.
func TestRacesAreFound(t *testing.T) {
	if !Race {
		t.Skip("needs a build for the race detector")
	}
	if which := os.Getenv(child); which != "" {
		const page = 4096
		b := make([]byte, 10*page)
		written := b[:5*page]
		switch which {
		case "apart":
			written = b[5*page:]
		case "shifted":
			written = b[1000 : 5*page]
		}
		var both sync.WaitGroup
		both.Go(func() { Reads(b[:5*page]) })
		both.Go(func() { Writes(written) })
		both.Wait()
		return
	}
	for which, found := range map[string]bool{"same": true, "shifted": true, "apart": false} {
		cmd := exec.Command(os.Args[0], "-test.run=^TestRacesAreFound$")
		cmd.Env = append(os.Environ(), child+"="+which)
		out, err := cmd.CombinedOutput()
		if got := strings.Contains(string(out), "DATA RACE"); got != found || (err != nil) != found {
			t.Errorf("%s: found: %v (%v), want %v\n%s", which, got, err, found, out)
		}
	}
}
