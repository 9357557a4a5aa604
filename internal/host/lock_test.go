package host

import (
	"errors"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/tier"
)

func TestLockGoesAsFarAsTheLimit(t *testing.T) {
	const capacity = 64 << 20
	for _, limit := range []int64{0, tier.Page, 8 << 20, 8<<20 + 3*tier.Page, capacity - tier.Page, capacity} {
		var locked int64
		a := openFaulty(t, Config{Capacity: capacity, Node: -1, Lock: true}, &faulty{
			onLock: func(b []byte) error {
				if locked+int64(len(b)) > limit {
					return errors.New("cannot allocate memory")
				}
				locked += int64(len(b))
				return nil
			},
		})
		s := a.Stats()
		if s.Locked != limit || locked != limit {
			t.Errorf("limit %d: %d bytes locked, %d reported", limit, locked, s.Locked)
		}
		if warned := len(s.Warnings) > 0; warned != (limit < capacity) {
			t.Errorf("limit %d: warnings %q", limit, s.Warnings)
		}
		if limit < capacity && runtime.GOOS == "linux" && !strings.Contains(s.Warnings[0].Remedy, "ulimit -l") {
			t.Errorf("the warning %q names no remedy", s.Warnings[0])
		}
	}
}

// vmLocked reads how much memory the process has locked.
func vmLocked(t *testing.T) int64 {
	t.Helper()
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Skip("needs /proc")
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "VmLck:"); ok {
			n, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(v), "kB")), 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return n << 10
		}
	}
	t.Skip("needs VmLck in /proc")
	return 0
}

// TestLockedIsWhatTheKernelSays: the figure is not wishful, whatever the limits of
// this process are.
func TestLockedIsWhatTheKernelSays(t *testing.T) {
	before := vmLocked(t)
	a := open(t, Config{Capacity: 6 << 20, Node: -1, Lock: true})
	if got := vmLocked(t) - before; got != a.Stats().Locked {
		t.Errorf("the kernel locked %d bytes, the arena says %d (%q)", got, a.Stats().Locked, a.Stats().Warnings)
	}
	m := alloc(t, a, 6<<20)
	fill(m, 1)
	free(a, m)
	trim(a)
	if got := vmLocked(t) - before; got != a.Stats().Locked {
		t.Errorf("after Trim the kernel locked %d bytes, the arena says %d (%q)", got, a.Stats().Locked, a.Stats().Warnings)
	}
	a.Close()
	a = open(t, Config{Capacity: 3 * (step + tier.Page), Node: -1, Lock: true})
	held := inPieces(t, a)
	m = alloc(t, a, 2*step)
	if m.(*memory).own == nil {
		t.Error("the memory has no mapping of its own")
	}
	for range 2 {
		if got := vmLocked(t) - before; got != a.Stats().Locked {
			t.Errorf("with memory outside the range, or after it was freed, the kernel locked %d bytes, "+
				"the arena says %d (%q)", got, a.Stats().Locked, a.Stats().Warnings)
		}
		free(a, m)
		m = alloc(t, a, step)
	}
	free(a, append(held, m)...)
	a.Close()
	if got := vmLocked(t); got != before {
		t.Errorf("%d bytes are still locked after Close", got-before)
	}
}
