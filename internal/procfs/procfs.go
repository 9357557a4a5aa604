// Package procfs parses the texts that Linux has in /proc and /sys, and in its cgroups. It opens no
// file, and takes no lock.
//
// The formats are those of proc(5), proc_pid_mountinfo(5), proc_pid_cgroup(5) and the kernel's
// Documentation/admin-guide/cgroup-v2.rst. Decision 0061 compares this with libraries.
package procfs

import (
	"encoding/hex"
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Meminfo returns, in bytes, those of the keys that the text has. The text is that of
// /proc/meminfo, or of a node, whose lines begin with "Node 0". Impossible values are left out and
// reported in errs.
func Meminfo(text string, keys ...string) (values map[string]int64, errs []error) {
	values = map[string]int64{}
	for line := range strings.Lines(text) {
		key, value, ok := strings.Cut(line, ":")
		if words := strings.Fields(key); len(words) > 0 {
			key = words[len(words)-1]
		}
		if _, again := values[key]; !ok || again || !slices.Contains(keys, key) {
			continue
		}
		value = strings.TrimSpace(value)
		number, unit, _ := strings.Cut(value, " ")
		n, err := Count(number)
		if err == nil && strings.TrimSpace(unit) != "kB" { // of 1024 bytes
			err = fmt.Errorf("%s is not a number of kB", Quote(value))
		} else if err == nil && n > math.MaxInt64>>10 {
			err = fmt.Errorf("%s is out of range", Quote(number))
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", key, err))
			continue
		}
		values[key] = n << 10
	}
	return values, errs
}

// CPUInfo returns the first processor's model and the numbers of all.
func CPUInfo(text string) (model string, cpus []int) {
	cpus = []int{}
	arm := map[string]string{}
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(line, ":")
		switch key, value = strings.TrimSpace(key), strings.TrimSpace(value); key {
		case "processor":
			if n, err := Member(value); err == nil {
				cpus = append(cpus, n)
			}
		case "model name", "cpu model", "cpu": // x86 and ARM; MIPS; POWER
			if model == "" {
				model = Label(value)
			}
		case "CPU implementer", "CPU part":
			arm[key] = value
		}
	}
	if model == "" && arm["CPU implementer"] != "" { // all that arm64 has
		model = Label("ARM implementer " + arm["CPU implementer"] + " part " + arm["CPU part"])
	}
	slices.Sort(cpus)
	return model, slices.Compact(cpus)
}

// CPUTime is the time of a CPU since the system started, in ticks; see Tick.
type CPUTime struct {
	Busy int64 // with processes, the kernel, interrupts, and other virtual machines of the host (steal)
	Idle int64 // also while waiting for I/O
}

// Tick is the unit of CPUTime: USER_HZ is 100 for all programs.
const Tick = 10 * time.Millisecond

// CPUTimes returns the times of the online CPUs, by number. The text is that of /proc/stat; lines that
// are not understood are left out.
func CPUTimes(text string) map[int]CPUTime {
	times := map[int]CPUTime{}
	for line := range strings.Lines(text) {
		fields := strings.Fields(line) // cpu0 user nice system idle iowait irq softirq steal guest guest_nice
		if len(fields) < 5 {
			continue
		}
		name, ok := strings.CutPrefix(fields[0], "cpu")
		cpu, err := Member(name)
		if !ok || err != nil {
			continue
		}
		var t CPUTime
		for i, field := range fields[1:min(len(fields), 9)] { // user has the time of guests
			n, err := Count(field)
			switch {
			case err != nil:
				ok = false
			case i == 3 || i == 4:
				t.Idle += n
			default:
				t.Busy += n
			}
		}
		if ok {
			times[cpu] = t
		}
	}
	return times
}

// Status returns the lists of CPUs and of memory nodes that /proc/self/status allows; nil if it has
// no such list.
func Status(text string) (cpus, nodes []int, errs []error) {
	lists := map[string]*[]int{"Cpus_allowed_list": &cpus, "Mems_allowed_list": &nodes}
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(line, ":")
		list := lists[key]
		if list == nil {
			continue
		}
		s, err := List(value)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", key, err))
		} else if len(s) > 0 {
			*list = s
		}
	}
	return cpus, nodes, errs
}

// Mount is one line of /proc/self/mountinfo.
type Mount struct {
	Device     string // major:minor
	Root       string // directory of the file system that is mounted
	Point      string // where
	FileSystem string // its type
	Source     string
	Options    []string // of the file system
	ReadOnly   bool
}

// OnBlockDevice reports whether the device's number is that of a block device: a file system that
// has no device of its own is given a number with major 0.
func (m Mount) OnBlockDevice() bool { return !strings.HasPrefix(m.Device, "0:") }

// unescape undoes the kernel's escapes of white space, backslashes, and what separates options.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`, `\043`, "#", `\054`, ",",
	`\075`, "=")

// Mountinfo returns the mounts in the order of the text. Invalid lines are reported in errs.
func Mountinfo(text string) (mounts []Mount, errs []error) {
	for line := range strings.Lines(text) {
		// 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		dash := slices.Index(fields, "-") // the optional fields end at it
		if dash < 6 || len(fields) < dash+3 || !IsDeviceNumber(fields[2]) || fields[4][0] != '/' {
			errs = append(errs, fmt.Errorf("%s is not a mount", Quote(strings.TrimSpace(line))))
			continue
		}
		m := Mount{
			Device:     fields[2],
			Root:       unescape.Replace(fields[3]),
			Point:      unescape.Replace(fields[4]),
			FileSystem: unescape.Replace(fields[dash+1]),
			Source:     unescape.Replace(fields[dash+2]),
		}
		if len(fields) > dash+3 {
			m.Options = strings.Split(unescape.Replace(fields[dash+3]), ",")
		}
		m.ReadOnly = slices.Contains(append(strings.Split(fields[5], ","), m.Options...), "ro")
		mounts = append(mounts, m)
	}
	return mounts, errs
}

// MountOf returns the mount that dir is on: the deepest, and of several at the same place the last,
// because it hides the others.
func MountOf(mounts []Mount, dir string) (on Mount, ok bool) {
	for _, m := range mounts {
		if _, below := CutDir(dir, m.Point); below && len(m.Point) >= len(on.Point) {
			on, ok = m, true
		}
	}
	return on, ok
}

// CutDir returns the path from the directory top to dir, and whether dir is top or below it.
func CutDir(dir, top string) (rest string, ok bool) {
	rest, ok = strings.CutPrefix(dir, strings.TrimSuffix(top, "/"))
	return rest, ok && (rest == "" || rest[0] == '/')
}

// IsDeviceNumber reports whether s is major:minor.
func IsDeviceNumber(s string) bool {
	major, minor, _ := strings.Cut(s, ":")
	_, err1 := strconv.ParseUint(major, 10, 32)
	_, err2 := strconv.ParseUint(minor, 10, 32)
	return err1 == nil && err2 == nil
}

// Group is one line of /proc/self/cgroup.
type Group struct {
	Controllers []string // empty: the one hierarchy of version 2
	Path        string   // seen from the root of the cgroup namespace
}

// Cgroup returns the process's place in each hierarchy. Invalid lines are reported in errs.
func Cgroup(text string) (groups []Group, errs []error) {
	for line := range strings.Lines(text) {
		if line = strings.TrimRight(line, "\n"); line == "" {
			continue
		}
		fields := strings.SplitN(line, ":", 3)
		if len(fields) != 3 || !strings.HasPrefix(fields[2], "/") {
			errs = append(errs, fmt.Errorf("%s is not a cgroup", Quote(line)))
			continue
		}
		g := Group{Path: fields[2]}
		if fields[1] != "" {
			g.Controllers = strings.Split(fields[1], ",")
		}
		groups = append(groups, g)
	}
	return groups, errs
}

// NoLimit is what Limit returns for "max" and its like.
const NoLimit = math.MaxInt64

// Limit parses a limit of a cgroup in bytes: a number, "max", or the largest number of whole pages,
// which is how version 1 spells "max"; no machine has half of that.
func Limit(s string) (int64, error) {
	n, err := strconv.ParseUint(s, 10, 64)
	switch {
	case s == "max":
		return NoLimit, nil
	case err != nil:
		return 0, fmt.Errorf("%s is not a limit", Quote(s))
	case n == 0:
		return 0, fmt.Errorf("a limit of 0 bytes, under which nothing could run")
	case n > math.MaxInt64/2:
		return NoLimit, nil
	}
	return int64(n), nil
}

// Quota parses the cpu.max of version 2, "quota period" in microseconds or "max period". It returns
// the equivalent number of CPUs; 0 is none. -1 is version 1's word for "max".
func Quota(s string) (float64, error) {
	first, second, ok := strings.Cut(s, " ")
	if !ok {
		second = "100000" // the kernel's default period
	}
	quota, err1 := Count(first)
	period, err2 := Count(second)
	switch none := first == "max" || first == "-1"; {
	case err2 != nil, period == 0, !none && (err1 != nil || quota == 0):
		return 0, fmt.Errorf("%s is not a quota", Quote(s))
	case none:
		return 0, nil
	}
	return float64(quota) / float64(period), nil
}

// Distances parses the distances of a node, of which there must be n.
func Distances(s string, n int) ([]int, error) {
	fields := strings.Fields(s)
	if len(fields) != n {
		return nil, fmt.Errorf("%d distances for %d nodes", len(fields), n)
	}
	distances := make([]int, n)
	for i, f := range fields {
		d, err := strconv.ParseUint(f, 10, 8) // the firmware's table has a byte for each
		if err != nil || d == 0 {
			return nil, fmt.Errorf("%s is not a distance", Quote(f))
		}
		distances[i] = int(d)
	}
	return distances, nil
}

// LinkSpeed returns the PCIe generation of a speed such as "16.0 GT/s PCIe", and 0 for any other.
func LinkSpeed(s string) int {
	speed, _, _ := strings.Cut(s, " ")
	return 1 + slices.Index([]string{"2.5", "5", "8", "16", "32", "64", "128"}, strings.TrimSuffix(speed, ".0"))
}

// Addresses returns the machine's own addresses by interface. The texts are those of
// /proc/net/fib_trie, route and if_inet6. Only IPv6 addresses come with their interface; that of an
// IPv4 address is the interface of the smallest network it is in that needs no gateway.
func Addresses(trie, routes, inet6 string) map[string][]netip.Addr {
	const gateway = 2 // RTF_GATEWAY
	networks := map[netip.Prefix]string{}
	for line := range strings.Lines(routes) {
		f := strings.Fields(line) // Iface Destination Gateway Flags RefCnt Use Metric Mask …
		if len(f) < 8 {
			continue
		}
		to, mask := parseAddress(f[1]), parseAddress(f[7])
		flags, err := strconv.ParseUint(f[3], 16, 32)
		if err != nil || flags&gateway != 0 || !to.Is4() || !mask.Is4() {
			continue
		}
		bits, _ := net.IPMask(mask.AsSlice()).Size() // 0 if it is no mask
		if network, err := to.Prefix(bits); err == nil && networks[network] == "" {
			networks[network] = f[0]
		}
	}

	addresses := map[string][]netip.Addr{}
	seen := map[netip.Addr]bool{}
	var last netip.Addr
	for line := range strings.Lines(trie) {
		line = strings.TrimSpace(line)
		if name, ok := strings.CutPrefix(line, "|-- "); ok {
			last, _ = netip.ParseAddr(name)
			continue
		}
		if !strings.HasPrefix(line, "/32 host LOCAL") || !last.Is4() || seen[last] {
			continue
		}
		seen[last] = true
		for bits := 32; bits > 0; bits-- {
			network, _ := last.Prefix(bits) // which is an IPv4 address
			if iface := networks[network]; iface != "" {
				addresses[iface] = append(addresses[iface], last)
				break
			}
		}
	}
	for line := range strings.Lines(inet6) {
		if f := strings.Fields(line); len(f) == 6 {
			if a := parseAddress(f[0]); a.Is6() {
				addresses[f[5]] = append(addresses[f[5]], a)
			}
		}
	}
	return addresses
}

// parseAddress parses an address in hexadecimal digits. Those of IPv4 are in the byte order of a
// little-endian machine.
func parseAddress(s string) netip.Addr {
	b, err := hex.DecodeString(s)
	if err != nil {
		return netip.Addr{}
	}
	if len(b) == 4 {
		slices.Reverse(b)
	}
	a, _ := netip.AddrFromSlice(b) // invalid for any other length
	return a
}
