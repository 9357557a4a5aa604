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
	"github.com/spillway-db/spillway/internal/procfs"
)

// Location is where a directory is. The slices are never nil.
type Location struct {
	Dir        string         `json:"dir"`         // absolute, below Options.Root, without links
	Mount      string         `json:"mount"`       // where its file system is mounted; empty: not known
	FileSystem string         `json:"file_system"` // its type, as ext4; empty: not known
	Source     string         `json:"source"`      // what was mounted, as /dev/nvme0n1p2
	ReadOnly   bool           `json:"read_only"`
	TotalBytes int64          `json:"total_bytes"` // of the file system; -1: not known
	FreeBytes  int64          `json:"free_bytes"`  // that an unprivileged process can take; -1: not known
	Disks      []Disk         `json:"disks"`       // by name; several below RAID and LVM, none if not known
	Node       int            `json:"node"`        // of all the disks, or Unknown
	Warnings   []diag.Warning `json:"warnings"`

	below bool // what it is stacked on is in memory
}

// InMemory reports whether the file system keeps its files in memory, so that they count as memory
// of the process that writes them. It follows overlays and loop devices. In a container that does
// not see the directory that its overlay writes to, it returns false even if that is in memory.
func (l Location) InMemory() bool { return l.below || inMemory(l.FileSystem) }

func inMemory(fileSystem string) bool {
	return fileSystem == "tmpfs" || fileSystem == "ramfs" || fileSystem == "devtmpfs"
}

// DiskOf returns what the directory dir is on. It need not exist: what is
// missing is taken to be made in what exists. The disks are followed through
// partitions, LUKS, LVM, RAID, loop devices and the overlays of containers; what
// is a guess is a warning. A relative dir is one of the working directory, and
// makes sense only with a Root of "/".
//
// The error is for options that make no sense and for a context that ended.
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

	t.nodes = []Node{{}} // as Discover; no disk needs their CPUs and memory
	if ids := t.nodeIDs(); len(ids) > 0 {
		t.nodes = nil
		for _, id := range ids {
			t.nodes = append(t.nodes, Node{ID: id})
		}
	}
	l := Location{Dir: path.Clean(dir), TotalBytes: -1, FreeBytes: -1, Disks: []Disk{}}
	switch target, err := t.resolve(dir); {
	case err == nil:
		l.Dir = target
	case missing(err):
		l.Dir = target
		t.warnf(dir, "not there: what follows is of the place where it would be made")
	default:
		t.warn(dir, err)
	}
	if m, ok := procfs.MountOf(t.mounts(), l.Dir); ok {
		l.Mount, l.FileSystem, l.Source, l.ReadOnly = m.Point, m.FileSystem, m.Source, m.ReadOnly
		l.Disks = append(l.Disks, t.disksOf(m, maxStacked, map[string]bool{})...)
		slices.SortFunc(l.Disks, func(a, b Disk) int { return strings.Compare(a.Name, b.Name) })
		l.Disks = slices.CompactFunc(l.Disks, func(a, b Disk) bool { return a.Name == b.Name })
		l.below = t.inMemory
	} else {
		t.warnf(l.Dir, "it is not known what is mounted there")
	}
	l.Node = commonNode(l.Disks)

	statfs := o.Statfs
	if statfs == nil && t.live {
		statfs = systemStatfs
	}
	if statfs != nil {
		at := l.Dir // or the nearest directory that is there
		for at != "/" && !t.isDir(at) {
			at = path.Dir(at)
		}
		total, free, err := statfs(at)
		if err == nil && (total < 0 || free < 0 || free > total) {
			err = fmt.Errorf("the file system has %d bytes, %d free", total, free)
		}
		if err != nil {
			t.warn(at, err)
		} else {
			l.TotalBytes, l.FreeBytes = total, free
		}
	}
	l.Warnings = t.warnings()
	if err := context.Cause(ctx); err != nil {
		return Location{}, fmt.Errorf("topology: %w", err)
	}
	return l, nil
}

// systemStatfs returns the sizes of a file system of this machine.
func systemStatfs(path string) (total, free int64, err error) {
	info, err := fsinfo.Of(path)
	if err != nil {
		return 0, 0, fmt.Errorf("statfs: %w", err)
	}
	return info.Total, info.Free, nil
}

// disksOf returns the disks that m is on. Each file system is followed once: one may be on many loop
// devices whose files are on itself.
func (t *tree) disksOf(m procfs.Mount, levels int, visited map[string]bool) (disks []Disk) {
	key := m.Device + " " + m.Point
	if !t.enter(visited, key, "file system", m.Point, levels) {
		return nil
	}
	defer func() { visited[key] = false }()
	if inMemory(m.FileSystem) {
		t.inMemory = true
		t.warnf(m.Point, "%s is memory, not a disk", m.FileSystem)
		return nil
	}
	if m.FileSystem == "overlay" {
		return t.disksOfOverlay(m, levels, visited)
	}
	names := t.disksBelowMount(m)
	if len(names) == 0 {
		t.warnf(m.Point, "%s of %s is on no block device that is known", m.FileSystem, procfs.Quote(m.Source))
	}
	for _, name := range names {
		device, err := t.resolve(path.Join("/sys/class/block", name))
		if err != nil {
			device, err = t.resolve(path.Join(blockDevices, name))
		}
		if err != nil {
			t.warnf(path.Join(blockDevices, name), "a device that is not there")
			continue
		}
		if file, ok := t.want(path.Join(device, "loop/backing_file")); ok {
			disks = append(disks, t.disksOfPath(file, name+" is a file", levels, visited)...)
			continue
		}
		d, ok := t.disk(device)
		if !ok {
			t.warnf(device, "%s is not a disk", name)
			continue
		}
		for _, m := range t.diskMounts() {
			if slices.Contains(m.disks, name) {
				d.Mounts = append(d.Mounts, m.Mount)
			}
		}
		disks = append(disks, d)
	}
	return disks
}

// disksOfPath returns the disks of a path that a file system is on, which has no device of its own.
func (t *tree) disksOfPath(p, why string, levels int, visited map[string]bool) []Disk {
	target, err := t.resolve(p)
	if err != nil && !missing(err) {
		t.warnf(p, "%s: it is not known on what disk: %v", why, err)
		return nil
	}
	m, ok := procfs.MountOf(t.mounts(), target)
	if !ok {
		t.warnf(target, "%s: it is not known on what disk", why)
		return nil
	}
	t.warnf(target, "%s: taken to be on the disk of %s", why, m.Point)
	return t.disksOf(m, levels-1, visited)
}

// disksOfOverlay returns the disks that an overlay writes to. Seen from the host, the directory it
// writes to is a path like any other. A container does not see that directory. But as a rule single
// files, such as /etc/hosts, are mounted into it from the same place of the host, and show the
// device.
func (t *tree) disksOfOverlay(m procfs.Mount, levels int, visited map[string]bool) []Disk {
	upper := ""
	for _, o := range m.Options {
		if dir, ok := strings.CutPrefix(o, "upperdir="); ok {
			upper = dir
		}
	}
	if upper == "" {
		t.warnf(m.Point, "an overlay that is not written to: its disk is not known")
		return nil
	}
	if t.isDir(upper) {
		return t.disksOfPath(upper, "an overlay writes to it", levels, visited)
	}
	var best procfs.Mount
	common, devices := -1, map[string]bool{}
	for _, other := range t.mounts() {
		if !other.OnBlockDevice() || other.Root == "/" {
			continue
		}
		devices[other.Device] = true
		if n := shared(strings.Split(other.Root, "/")[1:], strings.Split(upper, "/")[1:]); n > common {
			best, common = other, n
		}
	}
	// Two words, such as /var/lib, are a good sign; with a single device in sight there is no choice.
	if common < 2 && len(devices) != 1 {
		t.warnf(m.Point, "the overlay writes to %s, which is not visible here: its disk is not known",
			procfs.Quote(upper))
		return nil
	}
	t.warnf(m.Point, "the overlay writes to %s, which is not visible here: taken to be on the disk of %s",
		procfs.Quote(upper), best.Point)
	return t.disksOf(best, levels-1, visited)
}

// commonNode returns the node of all the disks; Unknown if there are none, or on several nodes.
func commonNode(disks []Disk) int {
	if len(disks) == 0 || slices.ContainsFunc(disks, func(d Disk) bool { return d.Node != disks[0].Node }) {
		return Unknown
	}
	return disks[0].Node
}
