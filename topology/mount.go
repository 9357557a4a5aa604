package topology

import (
	"slices"
	"strconv"
	"strings"
)

// mount is one line of /proc/self/mountinfo; see proc_pid_mountinfo(5).
type mount struct {
	Mount
	// device is major:minor. A major of 0 means that the file system has no block device of its
	// own.
	device string
	// root is the directory of the file system that appears at Point: "/" unless the mount is a
	// bind mount or that of a cgroup namespace.
	root    string
	options []string // of the file system
}

// unescape undoes the kernel's octal escapes of white space, backslashes, and characters that
// separate options. A strings.Replacer passes over the text once, so an escaped backslash is not
// unescaped again.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`, `\043`, "#", `\054`, ",",
	`\075`, "=")

// readMounts reads the mounts that this process sees into t.mounts, in the kernel's order, in which
// later ones hide earlier ones at the same place. A line that makes no sense is a warning.
func (t *tree) readMounts() {
	text, _ := t.need(selfMounts)
	for line := range strings.Lines(text) {
		// 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		// Field 7 and those after it are optional (shared:N and the like); a single dash ends them.
		dash := slices.Index(fields, "-")
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
		// The mount and the file system have options of their own, and either makes it read-only.
		m.ReadOnly = slices.Contains(append(strings.Split(fields[5], ","), m.options...), "ro")
		t.mounts = append(t.mounts, m)
	}
}

// mountOf returns the mount that dir, a resolved path, is on: the deepest, and of several at the
// same place the last, because it hides the others. ok is false if not even "/" is listed.
func (t *tree) mountOf(dir string) (on mount, ok bool) {
	for _, m := range t.mounts {
		if _, below := cutDir(dir, m.Point); below && len(m.Point) >= len(on.Point) {
			on, ok = m, true
		}
	}
	return on, ok
}

// cutDir returns the path from the directory top to dir, and whether dir is top or below it. It
// compares whole components: /a/bc is not below /a/b.
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
