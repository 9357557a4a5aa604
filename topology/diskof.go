package topology

import (
	"context"
	"errors"
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/fsinfo"
)

// Location is where the files of a directory are: a file system, and the disks below it. The slices
// are never nil.
type Location struct {
	Dir        string `json:"dir"`         // absolute, below Options.Root, without links
	Mount      string `json:"mount"`       // where its file system is mounted; empty: not known
	FileSystem string `json:"file_system"` // its type, as ext4; empty: not known
	Source     string `json:"source"`      // what was mounted, as /dev/nvme0n1p2
	ReadOnly   bool   `json:"read_only"`
	// TotalBytes and FreeBytes are those of the file system (statfs(2)); FreeBytes is what an
	// unprivileged process can take, without the blocks that are reserved for root. Both are -1 if
	// not known, as for a recorded machine.
	TotalBytes int64 `json:"total_bytes"`
	FreeBytes  int64 `json:"free_bytes"`
	// Disks are the whole disks that have the files, by name: several below RAID and LVM, none if
	// not known. Node is the one that all of them are on, or Unknown.
	Disks    []Disk         `json:"disks"`
	Node     int            `json:"node"`
	Warnings []diag.Warning `json:"warnings"`

	below bool // what it is stacked on is in memory
}

// InMemory reports whether the file system keeps its files in memory, so that they count as memory
// of the process that writes them. Spilling to such a directory frees nothing. InMemory follows
// overlays and loop devices. In a container that does not see the directory that its overlay writes
// to, it returns false even if that is in memory.
func (l Location) InMemory() bool { return l.below || inMemory(l.FileSystem) }

// inMemory is InMemory for the type of one file system.
func inMemory(fileSystem string) bool {
	return fileSystem == "tmpfs" || fileSystem == "ramfs" || fileSystem == "devtmpfs"
}

// DiskOf returns the file system and the disks of the directory dir. If dir does not exist, DiskOf
// looks at its nearest parent that does, because dir would be made there. A relative dir is below
// the working directory, and makes sense only with a Root of "/".
//
// It follows links, partitions, LUKS, LVM, RAID and loop devices, and overlays if the directory
// that they write to is visible. In a container it is not: then Disks is empty, with a warning.
// Guesses are warnings too.
//
// The error is for options that make no sense and for a context that ended. DiskOf calls no driver.
// With a Root of "/" it asks the file system for its room (statfs(2)), which blocks while a network
// file system does not answer.
func DiskOf(ctx context.Context, dir string, o Options) (Location, error) {
	if dir == "" {
		return Location{}, errors.New("topology: the name of the directory is empty")
	}
	t, err := openTree(ctx, o.Root)
	if err != nil {
		return Location{}, err
	}
	defer t.root.Close() // which was only ever read from
	if !path.IsAbs(filepath.ToSlash(dir)) {
		if !t.live {
			return Location{}, fmt.Errorf("topology: %s is relative, and the root is %s: want an absolute path", dir,
				o.Root)
		}
		if dir, err = filepath.Abs(dir); err != nil {
			return Location{}, fmt.Errorf("topology: %w", err)
		}
	}
	dir = filepath.ToSlash(dir)

	// nodeOf checks the numbers of nodes against these.
	t.top.Nodes = t.readNodes(CPU{}, Memory{})
	l := Location{Dir: path.Clean(dir), TotalBytes: -1, FreeBytes: -1, Disks: []Disk{}}
	// Find the place of the directory, or where it would be made. resolve keeps the rest of a path
	// that is missing, and the deepest mount above it is the one that counts.
	target, err := t.resolve(dir)
	switch {
	case err == nil:
		l.Dir = target
	case missing(err):
		l.Dir = target
		t.warnf(dir, "not there: what follows is of the place where it would be made")
	default:
		t.warn(dir, err)
	}
	t.readMounts()
	if m, ok := t.mountOf(l.Dir); ok {
		l.Mount, l.FileSystem, l.Source, l.ReadOnly = m.Point, m.FileSystem, m.Source, m.ReadOnly
		l.Disks, l.below = t.disksUnder(m)
	} else {
		t.warnf(l.Dir, "it is not known what is mounted there")
	}
	l.Node = commonNode(l.Disks)
	// Only this machine's file systems can be asked.
	if t.live {
		at := l.Dir // or the nearest directory that is there
		for at != "/" && !t.isDir(at) {
			at = path.Dir(at)
		}
		if info, err := fsinfo.Of(at); err != nil {
			t.warnf(at, "statfs: %v", err)
		} else {
			l.TotalBytes, l.FreeBytes = info.Total, info.Free
		}
	}
	l.Warnings = t.warnings()
	if err := context.Cause(ctx); err != nil {
		return Location{}, fmt.Errorf("topology: %w", err)
	}
	return l, nil
}

// disksUnder returns the disks that the files of m are on, each once and by name, and whether some
// are in memory. It follows an overlay to the directory that it writes to, and loop devices to the
// file systems of their files, which may be overlays again. Each file system is followed once: one
// may be on many loop devices, whose files may be on itself.
func (t *tree) disksUnder(m mount) (disks []Disk, memory bool) {
	disks = []Disk{}
	// todo are the file systems to look at. Those before i are done; they stay, to be recognized.
	todo, again := []mount{m}, false
	follow := func(file, why string) {
		target, err := t.resolve(file)
		on, ok := t.mountOf(target)
		if err != nil && !missing(err) || !ok {
			t.warnf(file, "%s: it is not known on what disk", why)
			return
		}
		t.warnf(target, "%s: taken to be on the disk of %s", why, on.Point)
		// A mount is the same if its point and its device are.
		if slices.ContainsFunc(todo, func(o mount) bool {
			return o.Point == on.Point && o.device == on.device
		}) {
			again = true
		} else {
			todo = append(todo, on)
		}
	}
	for i := 0; i < len(todo); i++ {
		m := todo[i]
		switch {
		case inMemory(m.FileSystem):
			t.warnf(m.Point, "%s is memory, not a disk", m.FileSystem)
			memory = true
			continue
		case m.FileSystem == "overlay":
			// The lower directories of an overlay are only read; what is written goes to upperdir.
			upper := ""
			for _, o := range m.options {
				if dir, ok := strings.CutPrefix(o, "upperdir="); ok {
					upper = dir
				}
			}
			switch {
			case upper == "":
				t.warnf(m.Point, "an overlay that is not written to: its disk is not known")
			case !t.isDir(upper):
				t.warnf(m.Point, "the overlay writes to %s, which is not visible here: its disk is not known",
					quote(upper))
			default:
				follow(upper, "an overlay writes to it")
			}
			continue
		}
		names := t.disksBelowMount(m)
		if len(names) == 0 {
			t.warnf(m.Point, "%s of %s is on no block device that is known", m.FileSystem, quote(m.Source))
			continue
		}
		all, _ := t.disks()
		for _, name := range names {
			if file, _ := t.want("/sys/class/block", name, "loop/backing_file"); file != "" {
				follow(file, name+" is a file")
			} else if i := slices.IndexFunc(all, func(d Disk) bool { return d.Name == name }); i >= 0 {
				disks = append(disks, all[i])
			} else {
				t.warnf(path.Join(blockDevices, name), "it is not a disk")
			}
		}
	}
	// A loop device whose file is on the file system that is on the loop device.
	if again && len(disks) == 0 && !memory {
		t.warnf(m.Point, "the file system is stacked on itself")
	}
	slices.SortFunc(disks, func(a, b Disk) int { return strings.Compare(a.Name, b.Name) })
	return slices.CompactFunc(disks, func(a, b Disk) bool { return a.Name == b.Name }), memory
}

// commonNode returns the node of all the disks; Unknown if there are none, or on several nodes.
func commonNode(disks []Disk) int {
	if len(disks) == 0 || slices.ContainsFunc(disks, func(d Disk) bool { return d.Node != disks[0].Node }) {
		return Unknown
	}
	return disks[0].Node
}
