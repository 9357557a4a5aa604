// Package procfs reads the texts that Linux has in /proc and /sys, and in its cgroups. It opens no
// file, and takes no lock.
//
// The formats are those of proc(5), proc_pid_mountinfo(5), proc_pid_cgroup(5) and the kernel's
// Documentation/admin-guide/cgroup-v2.rst.
package procfs

import (
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
		key, rest, ok := strings.Cut(line, ":")
		if !ok {
			continue
		}
		if words := strings.Fields(key); len(words) > 0 {
			key = words[len(words)-1]
		}
		if _, again := values[key]; again || !slices.Contains(keys, key) {
			continue
		}
		n, err := parseKilobytes(rest)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", key, err))
			continue
		}
		values[key] = n
	}
	return values, errs
}

// parseKilobytes reads "123 kB"; the kernel's kB are 1024 bytes.
func parseKilobytes(s string) (int64, error) {
	number, unit, _ := strings.Cut(strings.TrimSpace(s), " ")
	n, err := Count(number)
	if err != nil {
		return 0, err
	}
	if strings.TrimSpace(unit) != "kB" {
		return 0, fmt.Errorf("%s is not a number of kB", Quote(strings.TrimSpace(s)))
	}
	if n > math.MaxInt64>>10 {
		return 0, fmt.Errorf("%s is out of range", Quote(number))
	}
	return n << 10, nil
}

// CPUInfo returns the first processor's model and the numbers of all.
func CPUInfo(text string) (model string, cpus []int) {
	cpus = []int{}
	var implementer, part string
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(line, ":")
		value = strings.TrimSpace(value)
		switch strings.TrimSpace(key) {
		case "processor":
			if n, err := Member(value); err == nil {
				cpus = append(cpus, n)
			}
		case "model name", "cpu model", "cpu": // x86 and ARM; MIPS; POWER
			if model == "" {
				model = Label(value)
			}
		case "CPU implementer":
			implementer = value
		case "CPU part":
			part = value
		}
	}
	if model == "" && implementer != "" {
		model = Label("ARM implementer " + implementer + " part " + part) // all that arm64 has
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

// Status returns the lists of CPUs and of memory nodes that
// /proc/self/status allows; nil where it does not say.
func Status(text string) (cpus, nodes []int, errs []error) {
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(line, ":")
		var set *[]int
		switch key {
		case "Cpus_allowed_list":
			set = &cpus
		case "Mems_allowed_list":
			set = &nodes
		default:
			continue
		}
		s, err := List(value)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", key, err))
		} else if len(s) > 0 {
			*set = s
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

// Option returns the value of an option of the file system.
func (m Mount) Option(name string) (string, bool) {
	for _, o := range m.Options {
		if v, ok := strings.CutPrefix(o, name+"="); ok {
			return v, true
		}
	}
	return "", false
}

// OnBlockDevice reports whether the device's number is that of a block device: a
// file system that has none of its own is given a number with major 0.
func (m Mount) OnBlockDevice() bool { return !strings.HasPrefix(m.Device, "0:") }

// Mountinfo returns the mounts in the order of the text. Invalid lines are reported in errs.
func Mountinfo(text string) (mounts []Mount, errs []error) {
	for line := range strings.Lines(text) {
		if strings.TrimSpace(line) == "" {
			continue
		}
		m, err := parseMount(line)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		mounts = append(mounts, m)
	}
	return mounts, errs
}

func parseMount(line string) (Mount, error) {
	// 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue
	fields := strings.Fields(line)
	dash := slices.Index(fields, "-") // the optional fields end at it
	if dash < 6 || len(fields) < dash+3 {
		return Mount{}, fmt.Errorf("%s is not a mount", Quote(strings.TrimSpace(line)))
	}
	m := Mount{
		Device:     fields[2],
		Root:       unescape(fields[3]),
		Point:      unescape(fields[4]),
		FileSystem: unescape(fields[dash+1]),
		Source:     unescape(fields[dash+2]),
	}
	if !IsDeviceNumber(m.Device) || !strings.HasPrefix(m.Point, "/") {
		return Mount{}, fmt.Errorf("%s is not a mount", Quote(strings.TrimSpace(line)))
	}
	if len(fields) > dash+3 {
		m.Options = strings.Split(unescape(fields[dash+3]), ",")
	}
	m.ReadOnly = slices.Contains(strings.Split(fields[5], ","), "ro") || slices.Contains(m.Options, "ro")
	return m, nil
}

// MountOf returns the mount that dir is on: the deepest, and of several at the
// same place the last, because it hides the others.
func MountOf(mounts []Mount, dir string) (Mount, bool) {
	best := -1
	for i, m := range mounts {
		point := strings.TrimSuffix(m.Point, "/")
		if rest, ok := strings.CutPrefix(dir, point); !ok || rest != "" && rest[0] != '/' {
			continue
		}
		if best < 0 || len(m.Point) >= len(mounts[best].Point) {
			best = i
		}
	}
	if best < 0 {
		return Mount{}, false
	}
	return mounts[best], true
}

// IsDeviceNumber reports whether s is major:minor.
func IsDeviceNumber(s string) bool {
	major, minor, ok := strings.Cut(s, ":")
	if !ok {
		return false
	}
	_, err1 := strconv.ParseUint(major, 10, 32)
	_, err2 := strconv.ParseUint(minor, 10, 32)
	return err1 == nil && err2 == nil
}

// unescape undoes the kernel's \040 for space, tab, newline, # and backslash.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// Group is one line of /proc/self/cgroup.
type Group struct {
	Controllers []string // empty: the one hierarchy of version 2
	Path        string   // seen from the root of the cgroup namespace
}

// Cgroup returns the process's place in each hierarchy. Invalid lines are reported in errs.
func Cgroup(text string) (groups []Group, errs []error) {
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		if line == "" {
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

// NoLimit is what the parsers of limits return for "max" and its like.
const NoLimit = math.MaxInt64

// Limit reads a limit of a cgroup in bytes: a number, "max", or the largest number of whole pages,
// which is how version 1 spells "max"; no machine has half of that.
func Limit(s string) (int64, error) {
	if s == "max" {
		return NoLimit, nil
	}
	n, err := strconv.ParseUint(s, 10, 64)
	switch {
	case err != nil:
		return 0, fmt.Errorf("%s is not a limit", Quote(s))
	case n == 0:
		return 0, fmt.Errorf("a limit of 0 bytes, under which nothing could run")
	case n > math.MaxInt64/2:
		return NoLimit, nil
	}
	return int64(n), nil
}

// Quota reads the cpu.max of version 2, "quota period" in microseconds or "max period". It returns
// the equivalent number of CPUs; 0 is none.
func Quota(s string) (float64, error) {
	fields := strings.Fields(s)
	if len(fields) == 1 {
		fields = append(fields, "100000") // the kernel's default period
	}
	if len(fields) != 2 {
		return 0, fmt.Errorf("%s is not a quota", Quote(s))
	}
	period, err := Count(fields[1])
	if err != nil || period == 0 {
		return 0, fmt.Errorf("%s is not a quota", Quote(s))
	}
	if fields[0] == "max" || fields[0] == "-1" { // -1 is version 1's word for it
		return 0, nil
	}
	quota, err := Count(fields[0])
	if err != nil || quota == 0 {
		return 0, fmt.Errorf("%s is not a quota", Quote(s))
	}
	return float64(quota) / float64(period), nil
}

// Distances reads the distances of a node, of which there must be n.
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

// LinkSpeed returns the PCIe generation of a speed such as "16.0 GT/s
// PCIe", and 0 for any other.
func LinkSpeed(s string) int {
	speed, _, _ := strings.Cut(s, " ")
	switch strings.TrimSuffix(speed, ".0") {
	case "2.5":
		return 1
	case "5":
		return 2
	case "8":
		return 3
	case "16":
		return 4
	case "32":
		return 5
	case "64":
		return 6
	case "128":
		return 7
	}
	return 0
}

// Network is a network that an interface is on.
type Network struct {
	Prefix    netip.Prefix
	Interface string
}

// Routes returns the networks of /proc/net/route that need no gateway.
func Routes(text string) []Network {
	const gateway = 2 // RTF_GATEWAY
	var networks []Network
	for line := range strings.Lines(text) {
		f := strings.Fields(line) // Iface Destination Gateway Flags RefCnt Use Metric Mask …
		if len(f) < 8 {
			continue
		}
		to, ok1 := parseHostOrder(f[1])
		mask, ok2 := parseHostOrder(f[7])
		flags, err := strconv.ParseUint(f[3], 16, 32)
		if !ok1 || !ok2 || err != nil || flags&gateway != 0 {
			continue
		}
		if ones, bits := net.IPMask(mask[:]).Size(); bits == 32 && ones > 0 {
			networks = append(networks, Network{netip.PrefixFrom(netip.AddrFrom4(to), ones).Masked(), f[0]})
		}
	}
	return networks
}

// parseHostOrder reads an IPv4 address as the kernel of a little-endian machine
// prints it.
func parseHostOrder(s string) (a [4]byte, ok bool) {
	n, err := strconv.ParseUint(s, 16, 32)
	if err != nil || len(s) != 8 {
		return a, false
	}
	return [4]byte{byte(n), byte(n >> 8), byte(n >> 16), byte(n >> 24)}, true
}

func HexAddress(s string) (netip.Addr, bool) {
	if len(s) != 32 {
		return netip.Addr{}, false
	}
	var parts []string
	for i := 0; i < len(s); i += 4 {
		parts = append(parts, s[i:i+4])
	}
	a, err := netip.ParseAddr(strings.Join(parts, ":"))
	return a, err == nil
}

// LocalAddresses returns the machine's own IPv4 addresses in
// /proc/net/fib_trie: each is followed by a line that says "host LOCAL".
func LocalAddresses(text string) []netip.Addr {
	var last netip.Addr
	var local []netip.Addr
	seen := map[netip.Addr]bool{}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if name, ok := strings.CutPrefix(line, "|-- "); ok {
			last, _ = netip.ParseAddr(name)
		} else if strings.HasPrefix(line, "/32 host LOCAL") && last.Is4() && !seen[last] {
			seen[last] = true
			local = append(local, last)
		}
	}
	return local
}
