//go:build !linux

// Package system has the functions of spillbench that need Linux. On this system the functions for
// files return errors.ErrUnsupported, and MapRegion returns memory of Go's heap.
package system

import (
	"errors"
	"os"
)

// OpenNameless returns an error.
func OpenNameless(string) (*os.File, error) { return nil, errors.ErrUnsupported }

// GiveName returns an error.
func GiveName(*os.File, string) error { return errors.ErrUnsupported }

// DropCache returns an error.
func DropCache(*os.File, int64) error { return errors.ErrUnsupported }

// MapRegion returns memory of Go's heap. It need not be aligned, because there is no direct I/O here.
func MapRegion(n int64) ([]byte, error) { return make([]byte, n), nil }

// UnmapRegion does nothing.
func UnmapRegion([]byte) error { return nil }
