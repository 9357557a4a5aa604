package headroom

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/topology"
)

const mib = 1 << 20

// limits are those of a machine of 32 GiB whose process is in a cgroup of a version that
// may have so many bytes; 0: any.
func limits(t *testing.T, version int, bytes int64) topology.Limits {
	t.Helper()
	files := map[string]string{"proc/meminfo": "MemTotal: 33554432 kB\n"}
	switch version {
	case 1:
		files["proc/self/cgroup"] = "4:memory:/pod\n"
		files["proc/self/mountinfo"] = "1 0 0:1 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
		files["sys/fs/cgroup/memory/pod/memory.limit_in_bytes"] = fmt.Sprintln(bytes)
		files["sys/fs/cgroup/memory/pod/memory.stat"] = fmt.Sprintln("hierarchical_memory_limit", bytes)
	case 2:
		files["proc/self/cgroup"] = "0::/pod\n"
		files["proc/self/mountinfo"] = "1 0 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
		files["sys/fs/cgroup/pod/memory.max"] = fmt.Sprintln(bytes)
	}
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text), 0o600))
		if err != nil {
			t.Fatal(err)
		}
	}
	top, err := topology.Discover(t.Context(), topology.Options{Root: root})
	if err != nil {
		t.Fatal(err)
	}
	return top.Limits
}

// TestDivide: what the spaces leave is the heap's, and what leaves it too little is refused
// with what would fit, whichever way the process is limited.
func TestDivide(t *testing.T) {
	for _, c := range []struct {
		version               int
		limit, spaces, others int64 // MiB
		heap, fit             int64 // MiB; a heap of 0: refused
	}{
		{1, 704, 512, 0, 165, 0},
		{2, 704, 512, 0, 165, 0},
		{2, 704, 512, 100, 65, 0},
		{2, 704, 512, 110, 0, 511},
		{1, 512, 512, 0, 0, 432}, // which is not more than there is
		{2, 256, 128, 0, 108, 0},
		{2, 256, 180, 0, 56, 0}, // just enough
		{2, 256, 181, 0, 0, 180},
		{1, 64, 0, 0, 0, 0},
		{0, 0, 20 << 10, 0, 32<<10 - 20<<10 - 16 - 512, 0}, // the machine's own memory
		{0, 0, 32 << 10, 0, 0, 32<<10 - 16 - 512 - 56},
	} {
		p, err := Divide(limits(t, c.version, c.limit*mib), c.spaces*mib, c.others*mib)
		var small *TooSmallError
		if c.heap > 0 {
			if err != nil || p.Heap != c.heap*mib {
				t.Errorf("%+v: a heap of %d, %v", c, p.Heap/mib, err)
			}
			continue
		}
		if !errors.As(err, &small) || small.Fit != c.fit*mib ||
			strings.Contains(err.Error(), "\n") {
			t.Errorf("%+v: %+v", c, err)
		}
	}
	if p, err := Divide(topology.Limits{}, math.MaxInt64, 0); err != nil || p != (Plan{}) || p.Held() != 0 {
		t.Errorf("where nothing is known: %+v, %v", p, err)
	}
}

// TestApply: the heap has the limit, and a lower one stays.
func TestApply(t *testing.T) {
	before := debug.SetMemoryLimit(-1)
	defer debug.SetMemoryLimit(before)
	debug.SetMemoryLimit(math.MaxInt64)
	Plan{Heap: 1 << 40}.Apply()
	if now := debug.SetMemoryLimit(-1); now != 1<<40 {
		t.Errorf("the limit is %d", now)
	}
	Plan{Heap: 1 << 41}.Apply()
	if now := debug.SetMemoryLimit(-1); now != 1<<40 {
		t.Errorf("a lower limit became %d", now)
	}
	Plan{}.Apply()
	if now := debug.SetMemoryLimit(-1); now != 1<<40 {
		t.Errorf("a plan without a limit made it %d", now)
	}
}

// TestAdmit: a heap that is full is collected, and looked at again for a while; if it stays
// full that is an error with the numbers.
func TestAdmit(t *testing.T) {
	p := Plan{Heap: 100 * mib}
	for _, c := range []struct {
		name     string
		bytes    int64
		used     []int64 // at each look, MiB; the last one stays
		collects int
		full     bool
	}{
		{"room", 40 * mib, []int64{60}, 0, false},
		{"a byte too much", 40*mib + 1, []int64{60}, patience, true},
		{"garbage", 40 * mib, []int64{99, 50}, 1, false},
		{"work that ends", 40 * mib, []int64{99, 90, 80, 70, 60}, 4, false},
		{"more than there is", 101 * mib, []int64{0}, patience, true},
		{"small", smallest - 1, []int64{200}, 0, false},
	} {
		looks, collects := 0, 0
		used := func() int64 {
			used := c.used[min(looks, len(c.used)-1)]
			looks++
			return used * mib
		}
		err := p.admit(c.bytes, used, func(tries int) {
			if tries != collects {
				t.Errorf("%s: try %d is called %d", c.name, collects, tries)
			}
			collects++
		})
		var full *FullError
		if errors.As(err, &full) != c.full || collects != c.collects {
			t.Errorf("%s: %v, after %d collections", c.name, err, collects)
		}
		if c.full &&
			(full.Requested != c.bytes || full.Used != c.used[len(c.used)-1]*mib || full.Heap != p.Heap) {
			t.Errorf("%s: %+v", c.name, full)
		}
	}
	if err := (Plan{}).Admit(math.MaxInt64); err != nil {
		t.Errorf("without a limit: %v", err)
	}
}

// TestInUse: what is allocated counts, and what nothing refers to does not once it is
// collected.
func TestInUse(t *testing.T) {
	const size = 64 * mib
	collect(0)
	before := inUse()
	kept := make([]byte, size)
	for i := range kept {
		kept[i] = 1
	}
	with := inUse()
	if with < before+size*9/10 {
		t.Errorf("%d bytes are in use with %d more, and %d were", with, size, before)
	}
	if kept[size-1] != 1 {
		t.Error("it is kept until here")
	}
	kept = nil
	collect(0)
	if after := inUse(); after > with-size*9/10 {
		t.Errorf("%d bytes are in use without it, and %d were", after, with)
	}
}
