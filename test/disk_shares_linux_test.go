package test

import (
	"io"
	"io/fs"
	"log/slog"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// twoDevices has free bytes on each of two file systems: directories named other are on the second.
type twoDevices struct {
	disk.FS
	free int64
}

func (d twoDevices) Usage(dir string) (disk.Usage, error) {
	u, err := d.FS.Usage(dir)
	u.Free = d.free
	return u, err
}

func (d twoDevices) Stat(path string) (fs.FileInfo, error) {
	info, err := d.FS.Stat(path)
	if err != nil {
		return nil, err
	}
	st := *info.Sys().(*syscall.Stat_t)
	if strings.HasPrefix(filepath.Base(path), "other") {
		st.Dev++
	}
	return onDevice{info, &st}, nil
}

type onDevice struct {
	fs.FileInfo
	stat *syscall.Stat_t
}

func (o onDevice) Sys() any { return o.stat }

// TestDisksOfOneFileSystemShareIt: disks without a capacity in bytes take a share of what their file
// system has free for each of them, without the bytes that other disks there are to have.
func TestDisksOfOneFileSystemShareIt(t *testing.T) {
	const free = 12 << 20
	topo := discover(t)
	for name, c := range map[string]struct {
		disks map[string]spillway.Amount
		want  map[string]int64
	}{
		"one": {map[string]spillway.Amount{"a": {}}, map[string]int64{"a": 6 << 20}},
		"three": {
			map[string]spillway.Amount{"a": {}, "b": {}, "c": {}},
			map[string]int64{"a": 2 << 20, "b": 2 << 20, "c": 2 << 20},
		},
		"two and another": {
			map[string]spillway.Amount{"a": {}, "b": {}, "other": {}},
			map[string]int64{"a": 3 << 20, "b": 3 << 20, "other": 6 << 20},
		},
		"beside bytes": {
			map[string]spillway.Amount{"a": {}, "b": spillway.Bytes(4 << 20), "other": spillway.Bytes(1 << 20)},
			map[string]int64{"a": 4 << 20, "b": 4 << 20, "other": 1 << 20},
		},
		"shares": {
			map[string]spillway.Amount{"a": {Share: 0.25}, "b": {Share: 1}},
			map[string]int64{"a": 6 << 20 / 4, "b": 6 << 20},
		},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := spillway.Config{
				GPUs:       []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(1 << 20)}},
				HostMemory: spillway.Bytes(1 << 20), Topology: topo, Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
			}
			var names []string
			dir := t.TempDir()
			for name, capacity := range c.disks {
				names = append(names, name)
				path := filepath.Join(dir, name)
				if err := disk.OS().Mkdir(path); err != nil {
					t.Fatal(err)
				}
				cfg.Disks = append(cfg.Disks, spillway.DiskConfig{Dir: path, Capacity: capacity, FS: twoDevices{disk.OS(), free}})
			}
			eng, err := spillway.Open(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			for i, name := range names {
				s, _ := eng.Reservations().Spaces().ByID(tier.ID{Kind: tier.Disk, Ordinal: i})
				if got := s.Capacity; got != c.want[name] {
					t.Errorf("%s has %d bytes, want %d", name, got, c.want[name])
				}
			}
			if err := eng.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}
