package topology

import (
	"slices"
	"strconv"
	"strings"
)

// mount is one line of /proc/self/mountinfo.
type mount struct {
	Mount
	device  string   // major:minor; 0:minor for a file system that has no device of its own
	root    string   // directory of the file system that is mounted
	options []string // of the file system
}

// unescape undoes the kernel's escapes of white space, backslashes, and what separates options.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`, `\043`, "#", `\054`, ",",
	`\075`, "=")

// readMounts reads the mounts of this process, in the kernel's order.
func (t *tree) readMounts() {
	text, _ := t.need(selfMounts)
	for line := range strings.Lines(text) {
		// 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		dash := slices.Index(fields, "-") // the optional fields end at it
		if dash < 6 || len(fields) < dash+3 || !isDeviceNumber(fields[2]) || fields[4][0] != '/' {
			t.warnf(selfMounts, "%s is not a mount", quote(strings.TrimSpace(line)))
			continue
		}
		m := mount{device: fields[2], root: unescape.Replace(fields[3])}
		m.Point, m.FileSystem = unescape.Replace(fields[4]), unescape.Replace(fields[dash+1])
		m.Source = unescape.Replace(fields[dash+2])
		if len(fields) > dash+3 {
			m.options = strings.Split(unescape.Replace(fields[dash+3]), ",")
		}
		m.ReadOnly = slices.Contains(append(strings.Split(fields[5], ","), m.options...), "ro")
		t.mounts = append(t.mounts, m)
	}
}

// mountOf returns the mount that dir is on: the deepest, and of several at the same place the last,
// because it hides the others.
func (t *tree) mountOf(dir string) (on mount, ok bool) {
	for _, m := range t.mounts {
		if _, below := cutDir(dir, m.Point); below && len(m.Point) >= len(on.Point) {
			on, ok = m, true
		}
	}
	return on, ok
}

// cutDir returns the path from the directory top to dir, and whether dir is top or below it.
func cutDir(dir, top string) (rest string, ok bool) {
	rest, ok = strings.CutPrefix(dir, strings.TrimSuffix(top, "/"))
	return rest, ok && (rest == "" || rest[0] == '/')
}

// isDeviceNumber reports whether s is major:minor.
func isDeviceNumber(s string) bool {
	major, minor, _ := strings.Cut(s, ":")
	_, err1 := strconv.ParseUint(major, 10, 32)
	_, err2 := strconv.ParseUint(minor, 10, 32)
	return err1 == nil && err2 == nil
}
