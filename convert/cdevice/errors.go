package cdevice

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spillway-db/spillway/tier"
)

// ErrInvalid matches every *InvalidError and *DeviceError.
var ErrInvalid = errors.New("invalid C array")

// InvalidError says what is wrong with a struct.
type InvalidError struct {
	Path    string // the column and what is in it; empty for the whole
	Problem string
}

func (e *InvalidError) Error() string { return located("cdevice: an invalid array", e.Path, e.Problem) }

// Is matches ErrInvalid.
func (e *InvalidError) Is(target error) bool { return target == ErrInvalid }

// UnsupportedError says what cannot be shared. It matches tier.ErrNotSupported.
type UnsupportedError struct {
	Path string
	What string
}

func (e *UnsupportedError) Error() string { return located("cdevice: not supported", e.Path, e.What) }

// Is matches tier.ErrNotSupported.
func (e *UnsupportedError) Is(target error) bool { return target == tier.ErrNotSupported }

// DeviceError reports that an array lies in the memory of another device than the space's.
type DeviceError struct {
	Space    tier.ID
	Type     DeviceType // the array's
	ID       int64
	WantType DeviceType // the space's
	WantID   int64
}

func (e *DeviceError) Error() string {
	return fmt.Sprintf("cdevice: an array on device %d of type %d cannot be in %s, which is device %d of type %d",
		e.ID, e.Type, e.Space, e.WantID, e.WantType)
}

// Is matches ErrInvalid.
func (e *DeviceError) Is(target error) bool { return target == ErrInvalid }

func located(what, path, problem string) string {
	if path == "" {
		return what + ": " + problem
	}
	return what + ": " + path + ": " + problem
}

// path names the array that a walk is at.
type path []string

func (p *path) push(name string) { *p = append(*p, name) }
func (p *path) pop()             { *p = (*p)[:len(*p)-1] }

func (p path) invalid(format string, args ...any) error {
	return &InvalidError{strings.Join(p, "."), fmt.Sprintf(format, args...)}
}

func (p path) unsupported(format string, args ...any) error {
	return &UnsupportedError{strings.Join(p, "."), fmt.Sprintf(format, args...)}
}
