package bandwidth

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"

	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// mappings calls f with the bounds of each mapping of the process.
func mappings(t *testing.T, f func(begin, end uint64)) {
	t.Helper()
	maps, err := os.Open("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	defer maps.Close()
	lines := bufio.NewScanner(maps)
	for lines.Scan() {
		var begin, end uint64
		if _, err := fmt.Sscanf(lines.Text(), "%x-%x ", &begin, &end); err != nil {
			t.Fatalf("%q: %v", lines.Text(), err)
		}
		f(begin, end)
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
}

// pointing is a file system that remembers where in memory something was written from.
type pointing struct {
	disk.FS

	mu sync.Mutex
	at uint64
}

type pointed struct {
	disk.File
	fs *pointing
}

func (p *pointing) OpenAnonymous(dir string, direct bool) (disk.File, error) {
	f, err := p.FS.OpenAnonymous(dir, direct)
	return pointed{f, p}, err
}

func (p *pointing) Create(path string, direct bool) (disk.File, error) {
	f, err := p.FS.Create(path, direct)
	return pointed{f, p}, err
}

func (f pointed) WriteAt(b []byte, off int64) (int, error) {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	if _, err := fmt.Sscanf(fmt.Sprintf("%p", b), "0x%x", &f.fs.at); err != nil {
		return 0, err
	}
	return f.File.WriteAt(b, off)
}

// TestRunUnmaps: the regions of a measurement are gone when it has ended.
func TestRunUnmaps(t *testing.T) {
	p := &pointing{FS: disk.OS()}
	cfg := small(engine(t))
	cfg.Sizes, cfg.Threads, cfg.Pairs, cfg.Between = cfg.Sizes[:1], []int{1}, 1, []tier.Kind{tier.Host, tier.Disk}
	cfg.Files = func() disk.FS { return p }
	for range 5 { // somebody else may map something at the same place
		if _, err := measured(t.Context(), t, cfg); err != nil || p.at == 0 {
			t.Fatal(p.at, err)
		}
		there := false
		mappings(t, func(begin, end uint64) { there = there || begin <= p.at && p.at < end })
		if !there {
			return
		}
	}
	t.Error("the regions are still mapped")
}

// TestRegionsCancelled: regions that are not filled, because nobody waits for them, are gone.
func TestRegionsCancelled(t *testing.T) {
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	all := func() (bytes uint64) {
		mappings(t, func(begin, end uint64) { bytes += end - begin })
		return bytes
	}
	const half = 512 << 20 // more than all others will map meanwhile
	before := all()
	if room, err := newRegions(ctx, half); room != nil || !errors.Is(err, cause) {
		t.Fatal(room, err)
	}
	if now := all(); now > before+half {
		t.Errorf("%d bytes are mapped; before it was %d", now, before)
	}
}
