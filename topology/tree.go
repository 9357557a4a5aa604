package topology

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/causes"
)

// Files and directories of Linux.
const (
	selfStatus   = "/proc/self/status"
	selfMounts   = "/proc/self/mountinfo"
	selfCgroups  = "/proc/self/cgroup"
	systemMemory = "/proc/meminfo"
	systemCPUs   = "/proc/cpuinfo"
	onlineCPUs   = "/sys/devices/system/cpu/online"
	systemNodes  = "/sys/devices/system/node"
	blockDevices = "/sys/block"
	pciDevices   = "/sys/bus/pci/devices"
)

// theDriver is the subject of warnings about what the GPUs' driver returns.
const theDriver = "gpus"

// Limits on everything that a broken tree could make large. They are far above what real machines
// have.
const (
	maxNodes     = 1024     // the kernel's MAX_NUMNODES at its largest
	maxLinks     = 40       // in one path, as the kernel's own limit
	maxWarnings  = 200      // a broken tree has thousands of reasons for one
	maxFileBytes = 16 << 20 // of one file; mountinfo of a busy host is the longest
	maxLineBytes = 1024     // of a warning: names may be as long as their makers like
	maxPathBytes = 4096     // of a path in a file; the kernel's PATH_MAX
)

// tree reads files below one root and collects warnings. It is made for one call of Discover or
// DiskOf, and used by one goroutine. Paths are absolute, with slashes, as if the root were "/".
//
// It reads through an os.Root, which refuses links that lead outside of the root. When the root is
// a recorded machine, its absolute links must be followed inside of the root, and os.Root refuses
// those too: resolve follows them itself.
//
// No method returns an error for a file: need, want and the functions made of them warn, and return
// false. So callers go on with what they have.
type tree struct {
	ctx  context.Context
	root *os.Root
	// live means that the root is this machine's own, so that its environment, its addresses and
	// its driver may be asked too.
	live     bool
	warned   []diag.Warning
	unlisted int // warnings beyond the limit

	// top is what was found so far, and what Discover returns. DiskOf sets only Nodes.
	top    *Topology
	mounts []mount

	// fromDriver and partial are for visible: whether a UUID that no GPU has can be the UUID of one
	// that was not listed.
	fromDriver bool // the driver listed the GPUs: UUIDs and MIG instances are known
	partial    bool // there are GPUs that it did not list
}

var (
	errNotRegular = errors.New("not a regular file")
	errTooLong    = fmt.Errorf("longer than %d MiB", maxFileBytes>>20)
	errLoop       = errors.New("too many links")
	errLongPath   = fmt.Errorf("a path longer than %d bytes", maxPathBytes)
)

// openTree opens the tree at root; "" means "/". The caller must close tree.root.
func openTree(ctx context.Context, root string) (*tree, error) {
	if err := context.Cause(ctx); err != nil {
		return nil, fmt.Errorf("topology: %w", err)
	}
	if root == "" {
		root = "/"
	}
	root = filepath.Clean(root) // "//" is this machine, too
	r, err := os.OpenRoot(root)
	if err != nil {
		return nil, fmt.Errorf("topology: root: %w", err)
	}
	return &tree{ctx: ctx, root: r, live: root == "/", top: &Topology{}}, nil
}

// warnf adds a warning about the file p, or another subject. It chooses the cause by the file: what
// to do about a warning depends on what is hidden, /proc, /sys, or the driver. docs/machine.md
// explains causes.
func (t *tree) warnf(p, format string, args ...any) {
	below := func(dir string) bool { return strings.HasPrefix(p, dir+"/") }
	cause := causes.UnknownPlace
	switch {
	case p == theDriver:
		cause = causes.Driver
	case p == visibleDevices:
		cause = causes.VisibleDevices
	case strings.Contains(p, "cgroup"):
		cause = causes.UnknownLimits
	case below("/proc"):
		cause = causes.HiddenProc
	case below("/sys/devices/system"), below("/sys") && !below("/sys/devices") &&
		!below(blockDevices) && !below(pciDevices) && !below(rdmaDevices):
		cause = causes.HiddenSys
	}
	t.warnOf(cause, p, format, args...)
}

// warnOf adds a warning with a given cause about the file p, unless it is there already.
func (t *tree) warnOf(c diag.Cause, p, format string, args ...any) {
	// When the context ends, every file after that fails. The context is the error of the call.
	if t.ctx.Err() != nil {
		return
	}
	line := printable(p + ": " + fmt.Sprintf(format, args...))
	if len(line) > maxLineBytes {
		line = strings.ToValidUTF8(line[:maxLineBytes], "") + "…"
	}
	switch w := causes.Warn(c, "%s", line); {
	// Many devices may lack the same file of a switch above them.
	case slices.Contains(t.warned, w):
	case len(t.warned) == maxWarnings:
		t.unlisted++
	default:
		t.warned = append(t.warned, w)
	}
}

// warn adds a warning for an error about the file p. Errors of package os have the path too, but
// below the root, so only the inner error is printed.
func (t *tree) warn(p string, err error) {
	if inner, ok := errors.AsType[*fs.PathError](err); ok {
		err = inner.Err
	}
	t.warnf(p, "%v", err)
}

// warnings returns the collected warnings, never nil.
func (t *tree) warnings() []diag.Warning {
	warned := append([]diag.Warning{}, t.warned...)
	if t.unlisted > 0 {
		warned = append(warned, causes.Warn(causes.HiddenSys, "and %d more", t.unlisted))
	}
	return warned
}

// rel makes the name that os.Root wants: relative, and "." for the root itself.
func rel(p string) string {
	if p = strings.TrimLeft(path.Clean(p), "/"); p == "" {
		return "."
	}
	return p
}

// openFile opens p below the root. With O_NONBLOCK, opening a named pipe for reading returns at
// once and does not wait for a writer (fifo(7)); read then refuses it, because it is no regular
// file.
func (t *tree) openFile(p string, flag int) (*os.File, error) {
	if err := t.ctx.Err(); err != nil {
		return nil, err
	}
	return t.root.OpenFile(rel(p), flag|syscall.O_NONBLOCK, 0)
}

// read returns the text of the file p, without white space around it. Files in /proc and /sys
// report a size of 0 or of a page, so read reads up to the end, and at most maxFileBytes.
func (t *tree) read(p string) (string, error) {
	f, err := t.openFile(p, os.O_RDONLY)
	if err != nil {
		return "", err
	}
	defer f.Close()
	// Opening a directory or a device succeeds as well; reading some devices has effects.
	if info, err := f.Stat(); err != nil {
		return "", err
	} else if !info.Mode().IsRegular() {
		return "", errNotRegular
	}
	b, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err == nil && len(b) > maxFileBytes {
		err = errTooLong
	}
	return strings.TrimSpace(string(b)), err
}

// need returns the text of a file that every machine of this kind has; if it cannot be read, that
// is a warning. The path is in one part or in several, as of all functions below.
func (t *tree) need(file ...string) (text string, ok bool) {
	p := path.Join(file...)
	text, err := t.read(p)
	if err != nil {
		t.warn(p, err)
	}
	return text, err == nil
}

// want returns the text of a file that a machine may lack. It warns like need, except if the file
// is missing. A link whose target is missing is a warning: something should be there.
func (t *tree) want(file ...string) (text string, ok bool) {
	p := path.Join(file...)
	text, err := t.read(p)
	if missing(err) {
		// A link that is there and leads nowhere is a defect of the tree, and not a missing file.
		if _, absent := t.root.Lstat(rel(p)); absent != nil {
			return "", false
		}
		err = errors.New("a link to what is not there")
	}
	if err != nil {
		t.warn(p, err)
	}
	return text, err == nil
}

// parsed reads p by need or want and parses its text. An error of parse is a warning. ok reports
// whether v is valid.
func parsed[T any](t *tree, p string, read func(...string) (string, bool), parse func(string) (T, error)) (v T,
	ok bool) {
	text, ok := read(p)
	if !ok {
		return v, false
	}
	v, err := parse(text)
	if err != nil {
		t.warn(p, err)
	}
	return v, err == nil
}

// count returns the number, 0 or above, in a file that may be missing. ok is false if it is
// missing, which is no warning, or makes no sense.
func (t *tree) count(file ...string) (int64, bool) {
	return parsed(t, path.Join(file...), t.want, parseCount)
}

// set returns the set in a file, which may be missing.
func (t *tree) set(file ...string) (Set, bool) {
	return parsed(t, path.Join(file...), t.want, parseSet)
}

// list returns the names in a directory, in alphabetical order. ok reports whether it is there; a
// directory that cannot be read is there and empty, with a warning.
func (t *tree) list(dir ...string) (names []string, ok bool) {
	p := path.Join(dir...)
	f, err := t.openFile(p, os.O_RDONLY)
	if err == nil {
		defer f.Close()
		names, err = f.Readdirnames(-1)
	}
	if missing(err) {
		return nil, false
	}
	if err != nil {
		t.warn(p, err)
	}
	// Directories in /sys come in no order that can be relied on.
	slices.Sort(names)
	return names, true
}

// resolve returns p without links: what realpath(1) prints, had the root been changed to the
// tree's. A link's absolute target is below the root; ".." at the root stays there. From the first
// component that is missing on, the rest of the path is taken as it is, and the error matches
// fs.ErrNotExist. Other errors return no path.
func (t *tree) resolve(p string) (string, error) {
	if len(p) > maxPathBytes {
		return "", errLongPath // following one of a million names takes as long as all of them together
	}
	// done is the resolved part, which has no links. todo is the components after it; the target of
	// a link is put in front of them.
	done, todo := "/", strings.Split(path.Clean("/"+p), "/")
	var absent error
	for links := 0; len(todo) > 0; {
		above, name := done, todo[0]
		done, todo = path.Join(done, name), todo[1:] // "" and "." change nothing
		if done == above || name == ".." || absent != nil {
			continue
		}
		// Each component is a call of the system, which may hang on a network file system.
		if err := t.ctx.Err(); err != nil {
			return "", err
		}
		info, err := t.root.Lstat(rel(done))
		target := ""
		if err == nil && info.Mode()&fs.ModeSymlink != 0 {
			target, err = t.root.Readlink(rel(done))
		}
		if missing(err) || errors.Is(err, syscall.ENOTDIR) {
			absent = fs.ErrNotExist
		} else if err != nil {
			return "", err
		}
		if target == "" {
			continue
		}
		// Links may form a cycle.
		if links++; links > maxLinks {
			return "", errLoop
		}
		if done = above; strings.HasPrefix(target, "/") {
			done = "/"
		}
		todo = append(strings.Split(target, "/"), todo...)
	}
	return done, absent
}

// follow returns the directory that p leads to, without links. what names it in the warning if
// there is none.
func (t *tree) follow(p, what string) (dir string, ok bool) {
	dir, err := t.resolve(p)
	if err == nil && t.isDir(dir) {
		return dir, true
	}
	t.warnf(p, "%s that is not there", what)
	return "", false
}

// missing reports whether err is for something that is not there.
func missing(err error) bool { return errors.Is(err, fs.ErrNotExist) }

// isDir reports whether p is there and a directory.
func (t *tree) isDir(p string) bool {
	info, err := t.root.Stat(rel(p))
	return err == nil && info.IsDir()
}
