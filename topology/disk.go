package topology

import (
	"fmt"
	"math"
	"path"
	"slices"
	"strings"
)

// disks returns the whole disks that have a medium, with what is mounted of each, and the mounts
// that are on none of them. Disks are by name, and mounts in the kernel's order. A disk without
// mounts is listed too, because it may be mounted in another namespace.
func (t *tree) disks() (disks []Disk, others []Mount) {
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
		if d, ok := t.disk(dir); ok {
			disks = append(disks, d)
		}
	}
	// Then the mounts: each goes to all disks that it is on.
	for _, m := range t.mounts {
		if slices.Contains(ofTheKernel, m.FileSystem) {
			continue
		}
		// Container runtimes mount single files, such as /etc/hosts.
		if info, err := t.root.Stat(rel(m.Point)); err == nil && !info.IsDir() {
			continue
		}
		// A file system may be on several disks, and is listed at each.
		on, onOne := t.disksBelowMount(m), false
		for i := range disks {
			if slices.Contains(on, disks[i].Name) {
				disks[i].Mounts = append(disks[i].Mounts, m.Mount)
				onOne = true
			}
		}
		if !onOne {
			others = append(others, m.Mount)
		}
	}
	return disks, others
}

// ofTheKernel are types of file systems that hold no users' files. tmpfs is not one of them:
// programs write to it.
var ofTheKernel = []string{
	"autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs", "efivarfs",
	"fusectl", "hugetlbfs", "mqueue", "nfsd", "nsfs", "proc", "pstore", "rpc_pipefs", "securityfs", "selinuxfs",
	"sysfs", "tracefs",
}

// notDisks are the prefixes of block devices that no data stays on (ram), or that consist of other
// devices or files, even if nothing shows of which.
var notDisks = []string{"loop", "ram", "zram", "sr", "fd", "md", "dm-"}

// sectorBytes is the unit of sizes in sysfs, whatever the disk's own sectors are (see
// Documentation/ABI/stable/sysfs-block of the kernel).
const sectorBytes = 512

// disk reads the block device in dir, a resolved directory of /sys. ok reports whether it is a disk
// with a medium.
func (t *tree) disk(dir string) (d Disk, ok bool) {
	d = Disk{Name: path.Base(dir), Node: t.nowhere(), Bus: []string{}, Mounts: []Mount{}}
	hidden, _ := t.count(dir, "hidden") // one path of several to a disk that is listed too
	below, _ := t.list(dir, "slaves")   // made of others (bcache)
	// A prefix only counts with a number behind it, because names such as sr and sram begin alike.
	named := slices.ContainsFunc(notDisks, func(prefix string) bool { return isNumbered(d.Name, prefix) })
	if named || hidden == 1 || len(below) > 0 {
		return d, false
	}
	sectors, known := t.count(dir, "size")
	// An empty card reader has the size 0: it is a disk only when it has a medium.
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

	// NVMe has no vendor here, and virtio neither vendor nor model; all of these may be missing.
	vendor, _ := t.want(dir, "device/vendor")
	model, _ := t.want(dir, "device/model")
	d.Model = label(model)
	d.Device, _ = parsed(t, path.Join(dir, "dev"), t.want, func(text string) (string, error) {
		if !isDeviceNumber(text) {
			return "", fmt.Errorf("%s is not the number of a device", quote(text))
		}
		return text, nil
	})
	rotates, known := t.count(dir, "queue/rotational")
	d.Rotational = rotates == 1
	controllers := t.controllers(dir)
	d.Kind = diskKind(dir, vendor+" "+model, d.Rotational, known)
	if slices.ContainsFunc(controllers, func(c string) bool { return strings.Contains(c, "/nvme-fabrics/") }) {
		d.Kind = VirtualDisk // NVMe over a network
	}
	if d.Kind == UnknownDisk {
		t.warnf(path.Join(dir, "queue/rotational"), "it is not known whether the disk rotates")
	}
	// The place of a disk is that of the PCI device which is its controller: a SATA disk has none
	// of its own.
	for _, c := range controllers {
		if bus := busAbove(c); bus != "" {
			d.PCIAddress, d.Bus, d.Node = path.Base(bus), busPath(bus), t.nodeOf(bus)
			break
		}
	}
	return d, true
}

// isNumbered reports whether name is prefix and a number.
func isNumbered(name, prefix string) bool {
	number, ok := strings.CutPrefix(name, prefix)
	return ok && number != "" && strings.Trim(number, "0123456789") == ""
}

// hypervisors are words in the vendors and models of emulated disks, and of the disks of clouds
// that are over a network. Those look like NVMe or SSD devices, and their speed depends on the
// contract.
var hypervisors = []string{"QEMU", "VBOX", "VMWARE", "VIRTUAL", "MSFT", "PERSISTENTDISK", "AMAZON ELASTIC BLOCK STORE",
	"NVME_CARD-PD"}

// diskKind returns the kind of the disk in dir. model is its vendor and model. known is whether the
// kernel reports that it rotates or not. Words of hypervisors come first, because they also emulate
// NVMe.
func diskKind(dir, model string, rotational, known bool) DiskKind {
	name, model := path.Base(dir), strings.ToUpper(model)
	words := strings.Split(dir, "/")
	switch {
	case slices.ContainsFunc(hypervisors, func(h string) bool { return strings.Contains(model, h) }):
		return VirtualDisk
	case strings.HasPrefix(name, "nvme"):
		return NVMe
	case slices.Contains(words, "virtual"),
		slices.ContainsFunc(words, func(w string) bool { return isNumbered(w, "virtio") }),
		strings.HasPrefix(name, "xvd"):
		// Devices without a bus are below /sys/devices/virtual; virtio and Xen (xvd) are made by
		// hypervisors.
		return VirtualDisk
	case !known:
		return UnknownDisk
	case rotational:
		return HDD
	}
	return SSD
}

// controllers returns the directories of the controllers of the disk in dir. As a rule that is dir
// itself, which is below its controller's PCI device. With native multipath (CONFIG_NVME_MULTIPATH)
// an NVMe disk is below a virtual subsystem instead, which links to its controllers.
func (t *tree) controllers(dir string) (controllers []string) {
	subsystem, err := t.resolve(path.Join(dir, "device"))
	if busAbove(dir) != "" || err != nil || !strings.Contains(subsystem, "/nvme-subsystem/") {
		return []string{dir}
	}
	names, _ := t.list(subsystem)
	for _, name := range names {
		// Other entries of a subsystem are its namespaces (nvme0n1) and attributes.
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

// disksBelowMount returns the names of the whole disks that m is on, in alphabetical order: the
// device that is mounted, or the disk of which that is a partition, or the disks below a device
// that is stacked on others (LVM, LUKS, RAID). It is empty for file systems without a device. A
// loop device counts as a disk here; disksUnder follows it to its file.
func (t *tree) disksBelowMount(m mount) (names []string) {
	// First find the directory of the mounted device in /sys. A device number of 0:n is one that
	// the kernel made up for a file system without a device.
	var candidates []string
	if !strings.HasPrefix(m.device, "0:") {
		candidates = append(candidates, path.Join("/sys/dev/block", m.device))
	}
	// Btrfs has no device number of its own, because it may be on several devices; the mount names
	// one, or a link to it. A container may lack the node in /dev, so the name itself is tried too.
	if device, isPath := strings.CutPrefix(m.Source, "/dev/"); isPath {
		if target, err := t.resolve(m.Source); err == nil {
			candidates = append(candidates, path.Join("/sys/class/block", path.Base(target)))
		}
		if !strings.Contains(device, "/") {
			candidates = append(candidates, path.Join("/sys/class/block", device))
		}
	}
	// Then walk down: from a partition to its disk, and from a stacked device to those in its
	// "slaves". A device with neither is a disk. Devices may share a disk, so each is visited once.
	var todo []string // directories of devices
	// The first candidate that is there: a device number is exact, a name may belong to another
	// namespace.
	for _, c := range candidates {
		if target, err := t.resolve(c); err == nil && t.isDir(target) {
			todo = append(todo, target)
			break
		}
	}
	// follow adds the devices that a directory of /sys has links to.
	follow := func(list string, names []string) {
		for _, name := range names {
			if target, ok := t.follow(path.Join(list, name), "a device"); ok {
				todo = append(todo, target)
			}
		}
	}
	// The mount names one device of several: /sys/fs/btrfs lists the others.
	if m.FileSystem == "btrfs" && len(todo) > 0 {
		systems, _ := t.list("/sys/fs/btrfs")
		for _, id := range systems {
			list := path.Join("/sys/fs/btrfs", id, "devices")
			if devices, _ := t.list(list); slices.Contains(devices, path.Base(todo[0])) {
				follow(list, devices)
				break
			}
		}
	}
	// again is a device that was reached twice. If the walk finds no disk at all, there was a
	// cycle.
	visited, again := map[string]bool{}, ""
	for len(todo) > 0 {
		dir := todo[0]
		todo = todo[1:]
		if visited[dir] {
			again = dir
			continue
		}
		visited[dir] = true
		// A partition's directory has a file with that name, and is inside of its disk's directory.
		if _, err := t.root.Stat(rel(path.Join(dir, "partition"))); err == nil {
			todo = append(todo, path.Dir(dir))
			continue
		}
		slaves, _ := t.list(dir, "slaves")
		follow(path.Join(dir, "slaves"), slaves)
		if len(slaves) == 0 {
			names = append(names, path.Base(dir))
		}
	}
	if len(names) == 0 && again != "" {
		t.warnf(again, "the device is stacked on itself")
	}
	slices.Sort(names)
	return names
}
