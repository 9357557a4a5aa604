package volumes

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"syscall"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/fsinfo"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/topology"
)

// maxWarnings bounds what a volume remembers; the first ones say most.
const maxWarnings = 32

// overlay is what statfs(2) says of a container's own layer.
const overlay = "overlayfs"

// spareFiles is how many open files are left to the rest of the program: the standard
// streams, other volumes, connections.
const spareFiles = 64

// warn notes a warning once.
func (v *Volume) warn(c diag.Cause, format string, args ...any) {
	v.add(causes.Warn(c, format, args...))
}

func (v *Volume) add(w diag.Warning) {
	w.Space, w.What = v.cfg.Space.String(), fmt.Sprintf("volume %s: %s", v.cfg.Dir, w.What)
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.mu.warnings) < maxWarnings && !slices.Contains(v.mu.warnings, w) {
		v.mu.warnings = append(v.mu.warnings, w)
	}
}

// Warnings lists what was asked for and could not be had.
func (v *Volume) Warnings() []diag.Warning {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.Clone(v.mu.warnings)
}

// warnOfOverlay reports a directory that ends with its container. That matters only for what is to
// persist.
func (v *Volume) warnOfOverlay() {
	w := causes.Warn(causes.Overlay, "the directory is on %s, a container's own layer: it shares its room, and goes with the container", overlay)
	if v.cfg.Persist {
		w.What, w.Info = w.What+" together with what persists", false
	}
	v.add(w)
}

// overMemory reports whether a directory is on an overlay that writes to memory, as far as that is
// seen: see topology.Location.InMemory.
func overMemory(dir string) bool {
	l, err := topology.DiskOf(context.Background(), dir, topology.Options{})
	return err == nil && l.FileSystem == "overlay" && l.InMemory()
}

// warnOfFiles compares how many files the volume may have open with how many it may.
func (v *Volume) warnOfFiles() {
	files := (v.cfg.Capacity-1)/v.cfg.SegmentSize + 1
	if limit := fsinfo.OpenLimit(); files > limit-spareFiles {
		v.warn(causes.FileLimit, "of %d bytes in files of %d each the volume has up to %d open, and the process may have %d in all: when there are no more, there is no room for what is to be spilled",
			v.cfg.Capacity, v.cfg.SegmentSize, files, limit)
	}
}

// advised returns an error with a remedy in brackets, if the system's error has one.
func advised(err error) error {
	if a := advice(err); a != "" {
		return fmt.Errorf("%w (%s)", err, a)
	}
	return err
}

func advice(err error) string {
	switch {
	case err == nil:
	case errors.Is(err, errNoDir), errors.Is(err, fs.ErrNotExist):
		return "make it, or name another directory"
	case errors.Is(err, fs.ErrPermission):
		return "see to it that this process may make files there, or name another directory"
	case errors.Is(err, tier.ErrNoSpace), outOfRoom(err):
		return fullAdvice
	case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
		return "raise the limit of open files"
	case errors.Is(err, errNotDir), errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.EROFS):
		return "name another directory"
	case errors.Is(err, syscall.EIO):
		return "the disk fails: name another directory, on one that works"
	}
	return ""
}

// fullAdvice is for a file system that is full: a larger capacity of the volume would not
// help, as it does where that is what is full.
const fullAdvice = "make room there, or name another directory"

var (
	errNoDir  = errors.New("the directory does not exist")
	errNotDir = errors.New("not a directory")
)
