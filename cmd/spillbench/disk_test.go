package main

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/topology"
)

// TestFullSpillDirectories: a spill directory without room has status 3, and the line says what to
// do; one without leave to write has 2. One that is full is left out, and noted, if another has
// room.
func TestFullSpillDirectories(t *testing.T) {
	full, other, closed := t.TempDir(), t.TempDir(), t.TempDir()
	for name, c := range map[string]struct {
		probe  error // in full
		free   int64 // there
		disks  []string
		status int
		says   []string
		left   []string // directories that are used
	}{
		"no room for a file":     {syscall.ENOSPC, 1 << 30, []string{full}, 3, []string{"--disk FULL: there is no room: no space left on device", "make room there, or name another directory"}, nil},
		"no room in the quota":   {syscall.EDQUOT, 1 << 30, []string{full}, 3, []string{"--disk FULL: there is no room: disk quota exceeded", "quota raised"}, nil},
		"nothing is free":        {nil, 0, []string{full}, 3, []string{"--disk FULL: there is no room: 0 bytes are free"}, nil},
		"a share of nothing":     {nil, 0, []string{full + "=95%"}, 3, []string{"there is no room: 0 bytes are free"}, nil},
		"next to nothing":        {nil, leastDisk - 1, []string{full}, 3, []string{"8191 bytes are free"}, nil},
		"just enough":            {nil, leastDisk, []string{full}, 0, nil, []string{full}},
		"what is free not known": {nil, -1, []string{full + "=1GiB"}, 0, nil, []string{full}},
		"a share of the unknown": {nil, -1, []string{full + "=50%"}, 2, []string{"--disk FULL"}, nil},
		"not to be written":      {syscall.EACCES, 1 << 30, []string{full}, 2, []string{"not writable: permission denied", "name a directory that you may write to"}, nil},
		"another has room":       {syscall.ENOSPC, 1 << 30, []string{full, other}, 0, []string{"left out: --disk FULL: there is no room"}, []string{other}},
		"another, with sizes":    {nil, 0, []string{other + "=1GiB", full + "=95%"}, 0, []string{"left out: --disk FULL"}, []string{other}},
		"both are full":          {syscall.ENOSPC, 1 << 30, []string{full, full}, 3, []string{"--disk FULL: there is no room"}, nil},
		"another is closed":      {syscall.ENOSPC, 1 << 30, []string{full, closed}, 2, []string{"--disk CLOSED: not writable"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			var e engineFlags
			for _, d := range c.disks {
				if err := e.disks.add(d); err != nil {
					t.Fatal(err)
				}
			}
			e.probe = func(dir string) error {
				switch {
				case dir == closed:
					return &fs.PathError{Op: "open", Path: dir, Err: syscall.EROFS}
				case dir == full && c.probe != nil:
					return &fs.PathError{Op: "open", Path: dir, Err: c.probe}
				}
				return nil
			}
			e.diskOf = func(_ context.Context, dir string, _ topology.Options) (topology.Location, error) {
				if dir == full {
					return topology.Location{FreeBytes: c.free}, nil
				}
				return topology.Location{FreeBytes: 1 << 40}, nil
			}
			m := e.newMachine(new(topology.Topology))
			err := e.addDisks(t.Context(), m, 0)
			told := strings.Join(m.notes.lines(), "\n")
			if err != nil {
				told = fail.Line(err)
			}
			var dirs []string
			for _, d := range m.opened.Disks {
				dirs = append(dirs, d.Dir)
			}
			if fail.Status(err) != c.status || !slices.Equal(dirs, c.left) {
				t.Errorf("status %d, want %d, with %q: %s", fail.Status(err), c.status, dirs, told)
			}
			for _, want := range c.says {
				want = strings.NewReplacer("FULL", full, "CLOSED", closed).Replace(want)
				if !strings.Contains(told, want) {
					t.Errorf("%q does not say %q", told, want)
				}
			}
		})
	}
}

// TestFullTempDirectory is the machine's fault, too.
func TestFullTempDirectory(t *testing.T) {
	e := engineFlags{probe: func(dir string) error { return &fs.PathError{Op: "open", Path: dir, Err: syscall.ENOSPC} }}
	t.Setenv("TMPDIR", t.TempDir())
	err := e.addDisks(t.Context(), e.newMachine(new(topology.Topology)), 0)
	if fail.Status(err) != 3 || !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), os.TempDir()) {
		t.Errorf("got %v", err)
	}
}

// TestLeftOutDiskIsNotReported: the document has the directories that are used.
func TestLeftOutDiskIsNotReported(t *testing.T) {
	full, other := t.TempDir(), t.TempDir()
	f := flagsOf(t, "--gpu-memory=1MiB", "--host-memory=1MiB")
	f.disks = diskFlags{{dir: full}, {dir: other}}
	f.probe = func(dir string) error {
		if dir == full {
			return &fs.PathError{Op: "open", Path: dir, Err: syscall.ENOSPC}
		}
		return probeDir(dir)
	}
	m, err := f.open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := m.engine.Close(); err != nil {
		t.Error(err)
	}
	if len(m.config.Disks) != 1 || m.config.Disks[0].Dir != other || m.config.Disks[0].CapacityBytes <= 0 {
		t.Errorf("%+v", m.config.Disks)
	}
}
