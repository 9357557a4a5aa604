package topology

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// The formats are those of proc(5), proc_pid_mountinfo(5), proc_pid_cgroup(5)
// and the kernel's Documentation/admin-guide/cgroup-v2.rst.

// parseMeminfo returns, in bytes, those of the keys that the text has: that of
// /proc/meminfo, or of a node, whose lines begin with "Node 0". What cannot be
// right is left out and told in errs.
func parseMeminfo(text string, keys ...string) (values map[string]int64, errs []error) {
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
	n, err := parseCount(number)
	if err != nil {
		return 0, err
	}
	if strings.TrimSpace(unit) != "kB" {
		return 0, fmt.Errorf("%s is not a number of kB", quote(strings.TrimSpace(s)))
	}
	if n > math.MaxInt64>>10 {
		return 0, fmt.Errorf("%s is out of range", quote(number))
	}
	return n << 10, nil
}

// parseCPUInfo returns the first processor's model and the numbers of all.
func parseCPUInfo(text string) (model string, cpus Set) {
	cpus = Set{}
	var implementer, part string
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(line, ":")
		value = strings.TrimSpace(value)
		switch strings.TrimSpace(key) {
		case "processor":
			if n, err := parseMember(value); err == nil {
				cpus = append(cpus, n)
			}
		case "model name", "cpu model", "cpu": // x86 and ARM; MIPS; POWER
			if model == "" {
				model = label(value)
			}
		case "CPU implementer":
			implementer = value
		case "CPU part":
			part = value
		}
	}
	if model == "" && implementer != "" {
		model = label("ARM implementer " + implementer + " part " + part) // all that arm64 tells
	}
	slices.Sort(cpus)
	return model, slices.Compact(cpus)
}

// parseStatus returns the lists of CPUs and of memory nodes that
// /proc/self/status allows; nil where it does not say.
func parseStatus(text string) (cpus, nodes Set, errs []error) {
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(line, ":")
		var set *Set
		switch key {
		case "Cpus_allowed_list":
			set = &cpus
		case "Mems_allowed_list":
			set = &nodes
		default:
			continue
		}
		s, err := ParseSet(value)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", key, err))
		} else if len(s) > 0 {
			*set = s
		}
	}
	return cpus, nodes, errs
}

// mount is one line of /proc/self/mountinfo.
type mount struct {
	device     string // major:minor
	root       string // directory of the file system that is mounted
	point      string // where
	fileSystem string // its type
	source     string
	options    []string // of the file system
	readOnly   bool
}

// option returns the value of an option of the file system.
func (m mount) option(name string) (string, bool) {
	for _, o := range m.options {
		if v, ok := strings.CutPrefix(o, name+"="); ok {
			return v, true
		}
	}
	return "", false
}

func (m mount) public() Mount {
	return Mount{Point: m.point, FileSystem: m.fileSystem, Source: m.source, ReadOnly: m.readOnly}
}

// onBlockDevice says whether the device's number is that of a block device: a
// file system that has none of its own is given a number with major 0.
func (m mount) onBlockDevice() bool { return !strings.HasPrefix(m.device, "0:") }

// parseMountinfo returns the mounts in the order of the text. Lines that are
// none are told in errs.
func parseMountinfo(text string) (mounts []mount, errs []error) {
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

func parseMount(line string) (mount, error) {
	// 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue
	fields := strings.Fields(line)
	dash := slices.Index(fields, "-") // the optional fields end at it
	if dash < 6 || len(fields) < dash+3 {
		return mount{}, fmt.Errorf("%s is not a mount", quote(strings.TrimSpace(line)))
	}
	m := mount{
		device:     fields[2],
		root:       unescape(fields[3]),
		point:      unescape(fields[4]),
		fileSystem: unescape(fields[dash+1]),
		source:     unescape(fields[dash+2]),
	}
	if !isDeviceNumber(m.device) || !strings.HasPrefix(m.point, "/") {
		return mount{}, fmt.Errorf("%s is not a mount", quote(strings.TrimSpace(line)))
	}
	if len(fields) > dash+3 {
		m.options = strings.Split(unescape(fields[dash+3]), ",")
	}
	m.readOnly = slices.Contains(strings.Split(fields[5], ","), "ro") || slices.Contains(m.options, "ro")
	return m, nil
}

// isDeviceNumber says whether s is major:minor.
func isDeviceNumber(s string) bool {
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

// group is one line of /proc/self/cgroup.
type group struct {
	controllers []string // empty: the one hierarchy of version 2
	path        string   // seen from the root of the cgroup namespace
}

// parseCgroup returns the process's place in each hierarchy. Lines that are
// none are told in errs.
func parseCgroup(text string) (groups []group, errs []error) {
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		if line == "" {
			continue
		}
		fields := strings.SplitN(line, ":", 3)
		if len(fields) != 3 || !strings.HasPrefix(fields[2], "/") {
			errs = append(errs, fmt.Errorf("%s is not a cgroup", quote(line)))
			continue
		}
		g := group{path: fields[2]}
		if fields[1] != "" {
			g.controllers = strings.Split(fields[1], ",")
		}
		groups = append(groups, g)
	}
	return groups, errs
}

// noLimit is what the parsers of limits return for "max" and its like.
const noLimit = math.MaxInt64

// parseLimit reads a limit of a cgroup in bytes: a number, "max", or the largest number of whole pages, which is how
// version 1 spells "max"; no machine has half of that.
func parseLimit(s string) (int64, error) {
	if s == "max" {
		return noLimit, nil
	}
	n, err := strconv.ParseUint(s, 10, 64)
	switch {
	case err != nil:
		return 0, fmt.Errorf("%s is not a limit", quote(s))
	case n == 0:
		return 0, fmt.Errorf("a limit of 0 bytes, under which nothing could run")
	case n > math.MaxInt64/2:
		return noLimit, nil
	}
	return int64(n), nil
}

// parseQuota reads the cpu.max of version 2, "quota period" in microseconds
// or "max period", and returns the number of CPUs that it stands for; 0 is
// none.
func parseQuota(s string) (float64, error) {
	fields := strings.Fields(s)
	if len(fields) == 1 {
		fields = append(fields, "100000") // the kernel's default period
	}
	if len(fields) != 2 {
		return 0, fmt.Errorf("%s is not a quota", quote(s))
	}
	period, err := parseCount(fields[1])
	if err != nil || period == 0 {
		return 0, fmt.Errorf("%s is not a quota", quote(s))
	}
	if fields[0] == "max" || fields[0] == "-1" { // -1 is version 1's word for it
		return 0, nil
	}
	quota, err := parseCount(fields[0])
	if err != nil || quota == 0 {
		return 0, fmt.Errorf("%s is not a quota", quote(s))
	}
	return float64(quota) / float64(period), nil
}

// parseDistances reads the distances of a node, of which there must be n.
func parseDistances(s string, n int) ([]int, error) {
	fields := strings.Fields(s)
	if len(fields) != n {
		return nil, fmt.Errorf("%d distances for %d nodes", len(fields), n)
	}
	distances := make([]int, n)
	for i, f := range fields {
		d, err := strconv.ParseUint(f, 10, 8) // the firmware's table has a byte for each
		if err != nil || d == 0 {
			return nil, fmt.Errorf("%s is not a distance", quote(f))
		}
		distances[i] = int(d)
	}
	return distances, nil
}

// parseLinkSpeed returns the PCIe generation of a speed such as "16.0 GT/s
// PCIe", and 0 for any other.
func parseLinkSpeed(s string) int {
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
