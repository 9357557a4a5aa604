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
			return Location{}, fmt.Errorf("topology: %s is relative, and the root is %s: want an absolute path", dir, o.Root)
		}
		if dir, err = filepath.Abs(dir); err != nil {
			return Location{}, fmt.Errorf("topology: %w", err)
		}
	}

	w := t.diskPlacing()
	l, m, known := t.locate(filepath.ToSlash(dir))
	if known {
		l.Disks = t.disksOf(w, m, maxStacked)
		l.below = t.inMemory
	}
	l.Node = commonNode(l.Disks)
	t.measure(o.Statfs, &l)
	l.Warnings = t.warnings()
	if err := context.Cause(ctx); err != nil {
		return Location{}, fmt.Errorf("topology: %w", err)
	}
	return l, nil
}

// diskPlacing is a placing without the CPUs of the nodes, which no disk needs.
func (t *tree) diskPlacing() placing {
	if ids := t.nodeIDs(); len(ids) > 0 {
		return placing{nodes: ids}
	}
	return placing{nodes: Set{0}} // as Discover
}

// locate finds the mount that dir is on.
func (t *tree) locate(dir string) (l Location, m procfs.Mount, ok bool) {
	l = Location{Dir: path.Clean(dir), TotalBytes: -1, FreeBytes: -1, Disks: []Disk{}, Node: Unknown}
	switch target, err := t.resolve(dir); {
	case err == nil:
		l.Dir = target
	case missing(err):
		l.Dir = target
		t.warnf(dir, "not there: what follows is of the place where it would be made")
	default:
		t.warn(dir, err)
	}
	m, ok = procfs.MountOf(t.mounts(), l.Dir)
	if !ok {
		t.warnf(l.Dir, "it is not known what is mounted there")
		return l, m, false
	}
	l.Mount, l.FileSystem, l.Source, l.ReadOnly = m.Point, m.FileSystem, m.Source, m.ReadOnly
	return l, m, true
}

// disksOf returns the disks that m is on, or none if they were returned before: a file system on
// many loop devices whose files are on itself is followed once.
func (t *tree) disksOf(w placing, m procfs.Mount, levels int) []Disk {
	disks := []Disk{}
	key := m.Device + " " + m.Point
	if onTheWay, before := t.followed[key]; onTheWay {
		t.warnf(m.Point, "the file system is stacked on itself")
		return disks
	} else if before {
		return disks
	}
	t.followed[key] = true
	defer func() { t.followed[key] = false }()
	switch {
	case levels == 0:
		t.warnf(m.Point, "more than %d file systems stacked on each other", maxStacked)
		return disks
	case inMemory(m.FileSystem):
		t.inMemory = true
		t.warnf(m.Point, "%s is memory, not a disk", m.FileSystem)
		return disks
	case m.FileSystem == "overlay":
		return t.disksOfOverlay(w, m, levels)
	}
	names := t.disksBelowMount(m)
	if len(names) == 0 {
		t.warnf(m.Point, "%s of %s is on no block device that is known", m.FileSystem, procfs.Quote(m.Source))
	}
	directories := t.directories()
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
			disks = append(disks, t.disksOfPath(w, file, levels, name+" is a file")...)
			continue
		}
		d, ok := t.disk(w, device)
		if !ok {
			t.warnf(device, "%s is not a disk", name)
			continue
		}
		disks = append(disks, d)
		for _, m := range directories {
			t.addMount(disks[len(disks)-1:], m)
		}
	}
	return byName(disks)
}

// disksOfPath returns the disks of another path, for one that has no device of its own.
func (t *tree) disksOfPath(w placing, p string, levels int, why string) []Disk {
	target, err := t.resolve(p)
	if err != nil && !missing(err) {
		t.warnf(p, "%s: it is not known on what disk: %v", why, err)
		return nil
	}
	if m, ok := procfs.MountOf(t.mounts(), target); ok {
		t.warnf(target, "%s: taken to be on the disk of %s", why, m.Point)
		return t.disksOf(w, m, levels-1)
	}
	t.warnf(target, "%s: it is not known on what disk", why)
	return nil
}

// disksOfOverlay returns the disks that an overlay writes to. Seen from the host, the directory it
// writes to is a path like any other. A container does not see that directory. But as a rule single
// files, such as /etc/hosts, are mounted into it from the same place of the host, and show the
// device.
func (t *tree) disksOfOverlay(w placing, m procfs.Mount, levels int) []Disk {
	upper, ok := m.Option("upperdir")
	if !ok {
		t.warnf(m.Point, "an overlay that is not written to: its disk is not known")
		return []Disk{}
	}
	if t.isDir(upper) {
		return t.disksOfPath(w, upper, levels, "an overlay writes to it")
	}
	var best procfs.Mount
	most, devices := -1, map[string]bool{}
	for _, other := range t.mounts() {
		if !other.OnBlockDevice() || other.Root == "/" {
			continue
		}
		devices[other.Device] = true
		if n := shared(strings.Split(other.Root, "/")[1:], strings.Split(upper, "/")[1:]); n > most {
			best, most = other, n
		}
	}
	// Two words, such as /var/lib, are a good sign; with a single device in
	// sight there is no choice.
	if most < 2 && len(devices) != 1 {
		t.warnf(m.Point, "the overlay writes to %s, which is not visible here: its disk is not known", procfs.Quote(upper))
		return []Disk{}
	}
	t.warnf(m.Point, "the overlay writes to %s, which is not visible here: taken to be on the disk of %s", procfs.Quote(upper), best.Point)
	return t.disksOf(w, best, levels-1)
}

func byName(disks []Disk) []Disk {
	slices.SortFunc(disks, func(a, b Disk) int { return strings.Compare(a.Name, b.Name) })
	return slices.CompactFunc(disks, func(a, b Disk) bool { return a.Name == b.Name })
}

func commonNode(disks []Disk) int {
	if len(disks) == 0 || slices.ContainsFunc(disks, func(d Disk) bool { return d.Node != disks[0].Node }) {
		return Unknown
	}
	return disks[0].Node
}

// systemStatfs asks this machine.
func systemStatfs(path string) (total, free int64, err error) {
	info, err := fsinfo.Of(path)
	if err != nil {
		return 0, 0, fmt.Errorf("statfs: %w", err)
	}
	return info.Total, info.Free, nil
}

// measure asks for the size of the file system, at the nearest directory that
// is there.
func (t *tree) measure(statfs func(string) (total, free int64, err error), l *Location) {
	if statfs == nil && t.live {
		statfs = systemStatfs
	}
	if statfs == nil {
		return
	}
	dir := l.Dir
	for dir != "/" && !t.isDir(dir) {
		dir = path.Dir(dir)
	}
	total, free, err := statfs(dir)
	if err == nil && (total < 0 || free < 0 || free > total) {
		err = fmt.Errorf("the file system has %d bytes, %d free", total, free)
	}
	if err != nil {
		t.warn(dir, err)
		return
	}
	l.TotalBytes, l.FreeBytes = total, free
}
