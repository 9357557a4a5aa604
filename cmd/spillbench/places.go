package main

import (
	"os"
	"path/filepath"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
)

// place is a file of a command line, with what it is called there. The name may be empty or -.
type place struct{ what, name string }

// readings are places that are read.
func readings(names ...string) (all []place) {
	for _, name := range names {
		all = append(all, place{"the input " + name, name})
	}
	return all
}

// apart refuses a place that is written to and is another one as well: the result would be in the
// place of an input, or of another result. What is no regular file, such as a pipe, may be shared.
func apart(written, read []place) error {
	for i, w := range written {
		for _, other := range append(written[:i:i], read...) {
			if w.isSame(other) {
				return fail.Usagef("%s and %s are the same file (name another file)", w.what, other.what)
			}
		}
	}
	return nil
}

func (p place) isSame(other place) bool {
	if p.name == "" || p.name == "-" || other.name == "" || other.name == "-" {
		return false
	}
	a, errA := os.Stat(p.name)
	b, errB := os.Stat(other.name)
	switch {
	case errA == nil && errB == nil:
		return a.Mode().IsRegular() && os.SameFile(a, b)
	case errA == nil || errB == nil:
		return false
	}
	return whole(p.name) == whole(other.name)
}

// whole is the path of a file that need not be there, from the root on and without links. Where it
// leads through a link to nothing, that is followed too.
func whole(name string) string {
	if to, err := os.Readlink(name); err == nil {
		if !filepath.IsAbs(to) {
			to = filepath.Join(filepath.Dir(name), to)
		}
		if _, err := os.Readlink(to); err != nil { // no further: links may go in circles
			name = to
		}
	}
	dir := absolute(filepath.Dir(name))
	if real, err := filepath.EvalSymlinks(dir); err == nil {
		dir = real
	}
	return filepath.Join(dir, filepath.Base(name))
}

// absolute returns dir from the root on, or dir itself where the current directory is unknown.
func absolute(dir string) string {
	if abs, err := filepath.Abs(dir); err == nil {
		return abs
	}
	return dir
}
