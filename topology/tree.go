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
	"github.com/spillway-db/spillway/internal/procfs"
)

// Where Linux says what it has.
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

// theDriver is the subject of warnings about what the GPUs' driver says.
const theDriver = "gpus"

// A limit on everything that a broken tree could make large.
const (
	maxNodes     = 1024     // the kernel's MAX_NUMNODES at its largest
	maxStacked   = 8        // levels of dm, md, loop and overlay that are followed
	maxWarnings  = 200      // a broken tree has thousands of reasons for one
	maxFileBytes = 16 << 20 // of one file; mountinfo of a busy host is the longest
	maxLineBytes = 1024     // of a warning: names may be as long as their makers like
	maxPathBytes = 4096     // of a path in a file; the kernel's PATH_MAX
)

// tree reads below one root and collects what went wrong. It is made for one
// call of Discover or DiskOf, and used by one goroutine. Paths are absolute,
// with slashes, as if the root were "/".
type tree struct {
	ctx      context.Context
	root     *os.Root
	live     bool // the root is this machine's own
	warned   []diag.Warning
	unlisted int // warnings beyond the limit

	mounted  []procfs.Mount // what mounts returned, once it did
	hasMount bool
	below    map[string][]string // what disksBelow returned, by block device
	followed map[string]bool     // the mounts that disksOf knows: whether it is at them
	inMemory bool                // it has come to one that is in memory
}

var (
	errNotRegular = errors.New("not a regular file")
	errTooLong    = fmt.Errorf("longer than %d MiB", maxFileBytes>>20)
	errLoop       = errors.New("too many links")
	errLongPath   = fmt.Errorf("a path longer than %d bytes", maxPathBytes)
)

func openTree(ctx context.Context, root string) (*tree, error) {
	if err := context.Cause(ctx); err != nil {
		return nil, fmt.Errorf("topology: %w", err)
	}
	if root == "" {
		root = "/"
	}
	root = filepath.Clean(root) // "//" is this machine, too
	if info, err := os.Stat(root); err != nil {
		return nil, fmt.Errorf("topology: root: %w", err)
	} else if !info.IsDir() {
		return nil, fmt.Errorf("topology: root: %s is not a directory", root)
	}
	r, err := os.OpenRoot(root)
	if err != nil {
		return nil, fmt.Errorf("topology: root: %w", err)
	}
	return &tree{ctx: ctx, root: r, live: root == "/", below: map[string][]string{}, followed: map[string]bool{}}, nil
}

// warnf adds a warning about the file p, or another subject, with the cause that goes with it.
func (t *tree) warnf(p, format string, args ...any) { t.warnOf(causeOf(p), p, format, args...) }

// warnOf adds a warning of a cause about the file p.
func (t *tree) warnOf(c diag.Cause, p, format string, args ...any) {
	if t.ctx.Err() != nil {
		return // what follows is the fault of the context, which is the error
	}
	line := procfs.Printable(p + ": " + fmt.Sprintf(format, args...))
	if len(line) > maxLineBytes {
		line = strings.ToValidUTF8(line[:maxLineBytes], "") + "…"
	}
	switch w := causes.Warn(c, "%s", line); {
	case slices.Contains(t.warned, w):
	case len(t.warned) == maxWarnings:
		t.unlisted++
	default:
		t.warned = append(t.warned, w)
	}
}

// causeOf returns the cause if the file p, or another subject, is incomplete.
func causeOf(p string) diag.Cause {
	below := func(dir string) bool { return strings.HasPrefix(p, dir+"/") }
	switch {
	case p == theDriver:
		return causes.Driver
	case p == visibleDevices:
		return causes.VisibleDevices
	case strings.Contains(p, "cgroup"):
		return causes.UnknownLimits
	case below("/proc"):
		return causes.HiddenProc
	case below("/sys") && !below(blockDevices) && !below(pciDevices) && !below(rdmaDevices) && (!below("/sys/devices") || below("/sys/devices/system")):
		return causes.HiddenSys
	}
	return causes.UnknownPlace
}

// warn adds a warning for each error about the file p. It has only the innermost one: the others
// repeat the path.
func (t *tree) warn(p string, errs ...error) {
	for _, err := range errs {
		var inner *fs.PathError
		if errors.As(err, &inner) {
			err = inner.Err
		}
		t.warnf(p, "%v", err)
	}
}

func (t *tree) warnings() []diag.Warning {
	warned := append([]diag.Warning{}, t.warned...)
	if t.unlisted > 0 {
		warned = append(warned, causes.Warn(causes.HiddenSys, "and %d more", t.unlisted))
	}
	return warned
}

// rel makes the name that os.Root wants.
func rel(p string) string {
	if p = strings.TrimLeft(path.Clean(p), "/"); p == "" {
		return "."
	}
	return p
}

// openFile opens p, and does not wait for the other end of a pipe in its place.
func (t *tree) openFile(p string, flag int) (*os.File, error) {
	return t.root.OpenFile(rel(p), flag|syscall.O_NONBLOCK, 0)
}

// read returns the text of the file p.
func (t *tree) read(p string) (string, error) {
	if err := t.ctx.Err(); err != nil {
		return "", err
	}
	f, err := t.openFile(p, os.O_RDONLY)
	if err != nil {
		return "", err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil {
		return "", err
	} else if !info.Mode().IsRegular() {
		return "", errNotRegular
	}
	b, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err != nil {
		return "", err
	}
	if len(b) > maxFileBytes {
		return "", errTooLong
	}
	return string(b), nil
}

// need returns the text of p without the space around it; a file that cannot
// be read is a warning.
func (t *tree) need(p string) (string, bool) {
	text, err := t.read(p)
	if err != nil {
		t.warn(p, err)
	}
	return strings.TrimSpace(text), err == nil
}

// want is need, except that the file may be missing without a warning.
func (t *tree) want(p string) (string, bool) {
	text, err := t.read(p)
	if missing(err) {
		if _, err := t.root.Lstat(rel(p)); err == nil {
			t.warnf(p, "a link to what is not there")
		}
		return "", false
	}
	if err != nil {
		t.warn(p, err)
	}
	return strings.TrimSpace(text), err == nil
}

// number returns the number from 0 in p; a missing file is no warning.
func (t *tree) number(p string) (int64, bool) {
	text, ok := t.want(p)
	return parsed(t, p, text, ok, procfs.Count)
}

// parsed returns what parse makes of the text of p, if that was read; an error is a warning.
func parsed[T any](t *tree, p, text string, read bool, parse func(string) (T, error)) (value T, ok bool) {
	var none T
	if !read {
		return none, false
	}
	value, err := parse(text)
	if err != nil {
		t.warn(p, err)
		return none, false
	}
	return value, true
}

// id returns the number of so many hexadecimal digits in p, such as 0x10de; a missing file, or one
// that holds no such number, is a warning.
func (t *tree) id(p string, digits int) (string, bool) {
	text, ok := t.need(p)
	if !ok {
		return "", false
	}
	if hex, is := strings.CutPrefix(text, "0x"); !is || len(hex) != digits || strings.Trim(hex, "0123456789abcdef") != "" {
		t.warnf(p, "%s is not a number of %d hexadecimal digits", procfs.Quote(text), digits)
		return "", false
	}
	return text, true
}

// set returns the list in p; a missing file is no warning.
func (t *tree) set(p string) (Set, bool) {
	text, ok := t.want(p)
	return parsed(t, p, text, ok, parseSet)
}

// list returns the names in the directory p, in order. ok reports whether it is
// there; a directory that cannot be read is a warning.
func (t *tree) list(p string) (names []string, ok bool) {
	if t.ctx.Err() != nil {
		return nil, false
	}
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
	slices.Sort(names)
	return names, true
}

// resolve returns p without links: what realpath prints, had the root been
// changed to the tree's. From the first component that is missing on, the rest
// of the path is taken as it is, and the error matches fs.ErrNotExist.
func (t *tree) resolve(p string) (string, error) {
	const maxLinks = 40 // as the kernel's own limit
	if len(p) > maxPathBytes {
		return "", errLongPath // following one of a million names takes as long as all of them together
	}
	done, todo := "/", path.Clean("/"+p)
	var absent error
	for links := 0; ; {
		todo = strings.TrimLeft(todo, "/")
		if todo == "" || todo == "." {
			return done, absent
		}
		name, rest, _ := strings.Cut(todo, "/")
		if name == ".." {
			done, todo = path.Dir(done), rest
			continue
		}
		next := path.Join(done, name)
		if absent != nil {
			done, todo = next, rest
			continue
		}
		if err := t.ctx.Err(); err != nil {
			return "", err
		}
		info, err := t.root.Lstat(rel(next))
		target := ""
		if err == nil && info.Mode()&fs.ModeSymlink != 0 {
			target, err = t.root.Readlink(rel(next))
		}
		switch {
		case missing(err) || errors.Is(err, syscall.ENOTDIR):
			done, todo, absent = next, rest, fs.ErrNotExist
		case err != nil:
			return "", err
		case target == "":
			done, todo = next, rest
		default:
			if links++; links > maxLinks {
				return "", errLoop
			}
			if strings.HasPrefix(target, "/") {
				done = "/"
			}
			todo = target + "/" + rest
		}
	}
}

// follow returns the directory that p leads to, without links. If there is none, the warning says
// what is missing.
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

// exists reports whether there is anything at p.
func (t *tree) exists(p string) bool {
	_, err := t.root.Stat(rel(p))
	return err == nil
}

// mayUse reports whether this process may open the device at p to read and write: rights are
// not all that counts, because a container has a list of devices beside them.
func (t *tree) mayUse(p string) bool {
	f, err := t.openFile(p, os.O_RDWR)
	if err != nil {
		return false
	}
	return f.Close() == nil
}
