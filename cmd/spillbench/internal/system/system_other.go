//go:build !linux

// Package system has what spillbench asks only Linux for. Files fail with errors.ErrUnsupported
// here, and memory is of the heap.
package system

import (
	"errors"
	"os"
	"time"
)

// OpenNameless fails: there are no files without names here.
func OpenNameless(string) (*os.File, error) { return nil, errors.ErrUnsupported }

// GiveName is not reached, as there is no file to name.
func GiveName(*os.File, string) error { return errors.ErrUnsupported }

// DropCache fails: the page cache keeps what it has here.
func DropCache(*os.File, int64) error { return errors.ErrUnsupported }

// MapRegion returns memory of the heap. There are neither huge pages to ask for nor direct I/O that
// wants aligned addresses here.
func MapRegion(n int64) ([]byte, error) { return make([]byte, n), nil }

// UnmapRegion does nothing.
func UnmapRegion([]byte) error { return nil }

// CPUTime returns 0: the processor time of the process is not known here.
func CPUTime() time.Duration { return 0 }
