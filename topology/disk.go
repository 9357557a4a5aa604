package topology

import (
	"math"
	"path"
	"slices"
	"strings"

	"github.com/spillway-db/spillway/internal/procfs"
)

// disks returns the whole disks that have a medium, with what is mounted of
// each, and what is mounted of none.
func (t *tree) disks(w placing) (disks []Disk, others []Mount) {
	disks, others = []Disk{}, []Mount{}
	names, ok := t.list(blockDevices)
	if !ok {
		t.warnf(blockDevices, "not there: no disk is known")
	}
	for _, name := range names {
		dir, ok := t.follow(path.Join(blockDevices, name), "a device")
		if !ok {
			continue
		}
		if d, ok := t.disk(w, dir); ok {
			disks = append(disks, d)
		}
	}
	for _, m := range t.directories() {
		if !t.addMount(disks, m) {
			others = append(others, asMount(m))
		}
	}
	return disks, others
}

// directories returns the mounts that files are kept in.
func (t *tree) directories() []procfs.Mount {
	var kept []procfs.Mount
	for _, m := range t.mounts() {
		if slices.Contains(ofTheKernel, m.FileSystem) {
			continue
		}
		if info, err := t.root.Stat(rel(m.Point)); err == nil && !info.IsDir() {
			continue // single files are mounted into containers
		}
		kept = append(kept, m)
	}
	return kept
}

// ofTheKernel are file systems that hold no users' files.
var ofTheKernel = []string{
	"autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs", "efivarfs", "fusectl",
	"hugetlbfs", "mqueue", "nfsd", "nsfs", "proc", "pstore", "rpc_pipefs", "securityfs", "selinuxfs", "sysfs", "tracefs",
}

// addMount adds m to those of the disks that it is on, and reports whether it is on any.
func (t *tree) addMount(disks []Disk, m procfs.Mount) (ok bool) {
	if !m.OnBlockDevice() && !strings.HasPrefix(m.Source, "/dev/") {
		return false
	}
	// DiskOf reports it if none is known: it matters there.
	for _, name := range t.disksBelowMount(m) {
		i := slices.IndexFunc(disks, func(d Disk) bool { return d.Name == name })
		if i >= 0 {
			disks[i].Mounts = append(disks[i].Mounts, asMount(m))
			ok = true
		}
	}
	return ok
}

// notDisks are block devices that no data stays on, or that are other devices
// in disguise, also where nothing says of which they are made.
var notDisks = []string{"loop", "ram", "zram", "sr", "fd", "md", "dm-"}

// disk reads the block device in dir, which has no links in it. ok says
// whether it is a disk.
func (t *tree) disk(w placing, dir string) (d Disk, ok bool) {
	d = Disk{Name: path.Base(dir), Node: w.nowhere(), Bus: []string{}, Mounts: []Mount{}}
	if slices.ContainsFunc(notDisks, func(prefix string) bool { return isNumbered(d.Name, prefix) }) {
		return d, false
	}
	if hidden, _ := t.number(path.Join(dir, "hidden")); hidden == 1 {
		return d, false // one path of several to a disk that is listed too
	}
	if below, _ := t.list(path.Join(dir, "slaves")); len(below) > 0 {
		return d, false // made of others (bcache)
	}
	sectors, known := t.number(path.Join(dir, "size"))
	switch {
	case known && sectors == 0:
		return d, false // an empty card reader
	case known && sectors > math.MaxInt64/sectorBytes:
		t.warnf(path.Join(dir, "size"), "%d sectors are more than a disk can have", sectors)
	case known:
		d.SizeBytes = sectors * sectorBytes
	default:
		t.warnf(path.Join(dir, "size"), "the disk's size is not known")
	}

	vendor, _ := t.want(path.Join(dir, "device/vendor"))
	model, _ := t.want(path.Join(dir, "device/model"))
	d.Model = procfs.Label(model)
	if number, ok := t.want(path.Join(dir, "dev")); procfs.IsDeviceNumber(number) {
		d.Device = number
	} else if ok {
		t.warnf(path.Join(dir, "dev"), "%s is not the number of a device", procfs.Quote(number))
	}
	rotates, known := t.number(path.Join(dir, "queue/rotational"))
	d.Rotational = rotates == 1
	controllers := t.controllers(dir)
	d.Kind = diskKind(dir, vendor+" "+model, d.Rotational, known)
	if slices.ContainsFunc(controllers, func(c string) bool { return strings.Contains(c, "/nvme-fabrics/") }) {
		d.Kind = VirtualDisk // NVMe over a network
	}
	if d.Kind == UnknownDisk {
		t.warnf(path.Join(dir, "queue/rotational"), "it is not known whether the disk rotates")
	}
	// The first of several represents all.
	if i := slices.IndexFunc(controllers, func(c string) bool { return busAbove(c) != "" }); i >= 0 {
		bus := busAbove(controllers[i])
		d.PCIAddress = path.Base(bus)
		d.Bus = busPath(bus)
		d.Node = t.nodeOf(w, bus)
	}
	return d, true
}

// sectorBytes is what sysfs counts sizes in, whatever the disk's own sectors.
const sectorBytes = 512

// isNumbered reports whether name is prefix and a number.
func isNumbered(name, prefix string) bool {
	number, ok := strings.CutPrefix(name, prefix)
	return ok && number != "" && strings.Trim(number, "0123456789") == ""
}

// hypervisors are words in what emulated disks, and those of clouds that are over a network, say of
// themselves.
var hypervisors = []string{"QEMU", "VBOX", "VMWARE", "VIRTUAL", "MSFT", "PERSISTENTDISK", "AMAZON ELASTIC BLOCK STORE", "NVME_CARD-PD"}

func diskKind(dir, says string, rotational, known bool) DiskKind {
	name, says := path.Base(dir), strings.ToUpper(says)
	words := strings.Split(dir, "/")
	switch {
	case slices.ContainsFunc(hypervisors, func(h string) bool { return strings.Contains(says, h) }):
		return VirtualDisk
	case strings.HasPrefix(name, "nvme"):
		return NVMe
	case slices.Contains(words, "virtual"),
		slices.ContainsFunc(words, func(w string) bool { return isNumbered(w, "virtio") }),
		strings.HasPrefix(name, "xvd"):
		return VirtualDisk
	case !known:
		return UnknownDisk
	case rotational:
		return HDD
	}
	return SSD
}

// controllers returns the directories of what the disk in dir hangs on: its own, or, as an NVMe
// disk with more than one path belongs to a subsystem, which is virtual, those of the subsystem's
// controllers.
func (t *tree) controllers(dir string) []string {
	subsystem, err := t.resolve(path.Join(dir, "device"))
	if busAbove(dir) != "" || err != nil || !strings.Contains(subsystem, "/nvme-subsystem/") {
		return []string{dir}
	}
	var controllers []string
	names, _ := t.list(subsystem)
	for _, name := range names {
		if !isNumbered(name, "nvme") {
			continue
		}
		controller, err := t.resolve(path.Join(subsystem, name))
		if err != nil || !t.isDir(controller) || path.Dir(controller) == subsystem {
			t.warnf(path.Join(subsystem, name), "a controller that is not there")
			continue
		}
		controllers = append(controllers, controller)
	}
	return controllers
}

// busAbove returns the longest path above dir that ends with a PCI address.
func busAbove(dir string) string {
	for ; dir != "/"; dir = path.Dir(dir) {
		if isBusAddress(path.Base(dir)) {
			return dir
		}
	}
	return ""
}

// disksBelowMount returns the names of the whole disks that m is on.
func (t *tree) disksBelowMount(m procfs.Mount) []string {
	dir, ok := t.blockDevice(m)
	if !ok {
		return nil
	}
	names := slices.Clone(t.disksBelow(dir))
	if m.FileSystem == "btrfs" { // what was mounted names one of several
		for _, other := range t.btrfsBeside(path.Base(dir)) {
			names = append(names, t.disksBelow(other)...)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// btrfsBeside returns the directories of the block devices that a file system of Btrfs has beside
// one of them.
func (t *tree) btrfsBeside(device string) (dirs []string) {
	const all = "/sys/fs/btrfs"
	systems, _ := t.list(all)
	for _, id := range systems {
		list := path.Join(all, id, "devices")
		names, _ := t.list(list)
		if !slices.Contains(names, device) {
			continue
		}
		for _, name := range names {
			if target, ok := t.follow(path.Join(list, name), "a device"); ok {
				dirs = append(dirs, target)
			}
		}
	}
	return dirs
}

// blockDevice returns the directory of the block device that m is on, without
// links.
func (t *tree) blockDevice(m procfs.Mount) (dir string, ok bool) {
	var candidates []string
	if m.OnBlockDevice() {
		candidates = append(candidates, path.Join("/sys/dev/block", m.Device))
	}
	// Btrfs has no device number of its own; what was mounted names it.
	if device, isPath := strings.CutPrefix(m.Source, "/dev/"); isPath {
		if target, err := t.resolve(m.Source); err == nil {
			candidates = append(candidates, path.Join("/sys/class/block", path.Base(target)))
		}
		if !strings.Contains(device, "/") {
			candidates = append(candidates, path.Join("/sys/class/block", device))
		}
	}
	for _, c := range candidates {
		if target, err := t.resolve(c); err == nil && t.isDir(target) {
			return target, true
		}
	}
	return "", false
}

// disksBelow returns the names of the whole disks that the block device in dir
// is on: itself, the disk of which it is a partition, or those below a device
// that is stacked on others.
func (t *tree) disksBelow(dir string) []string {
	if names, ok := t.below[dir]; ok {
		return names
	}
	names := t.walkBelow(dir, maxStacked, map[string]bool{})
	slices.Sort(names)
	names = slices.Compact(names)
	t.below[dir] = names
	return names
}

// walkBelow visits each device once, as few that stand on each other in a ring would otherwise be
// millions of ways: visited is true of those on the way to dir, false of those that are done.
func (t *tree) walkBelow(dir string, levels int, visited map[string]bool) []string {
	if onTheWay, before := visited[dir]; onTheWay {
		t.warnf(dir, "the device is stacked on itself")
		return nil
	} else if before {
		return nil
	}
	if levels == 0 {
		t.warnf(dir, "more than %d devices stacked on each other", maxStacked)
		return nil
	}
	visited[dir] = true
	defer func() { visited[dir] = false }()
	if t.exists(path.Join(dir, "partition")) {
		return t.walkBelow(path.Dir(dir), levels-1, visited)
	}
	slaves, _ := t.list(path.Join(dir, "slaves"))
	if len(slaves) == 0 {
		return []string{path.Base(dir)}
	}
	var names []string
	for _, s := range slaves {
		if target, ok := t.follow(path.Join(dir, "slaves", s), "a device"); ok {
			names = append(names, t.walkBelow(target, levels-1, visited)...)
		}
	}
	return names
}

func asMount(m procfs.Mount) Mount {
	return Mount{Point: m.Point, FileSystem: m.FileSystem, Source: m.Source, ReadOnly: m.ReadOnly}
}
