package cdevice

import (
	"fmt"
	"strings"

	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/tier"
)

// DeviceError reports that an array lies in the memory of another device than the space's. It
// matches convert.ErrInvalid.
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

// Is matches convert.ErrInvalid.
func (e *DeviceError) Is(target error) bool { return target == convert.ErrInvalid }

// path names the array that a walk is at.
type path []string

func (p *path) push(name string) { *p = append(*p, name) }
func (p *path) pop()             { *p = (*p)[:len(*p)-1] }

func (p path) invalid(format string, args ...any) error {
	return &convert.InvalidError{Path: strings.Join(p, "."), Problem: fmt.Sprintf(format, args...)}
}

func (p path) unsupported(format string, args ...any) error {
	what := fmt.Sprintf(format, args...)
	if len(p) > 0 {
		what = strings.Join(p, ".") + ": " + what
	}
	return fmt.Errorf("cdevice: %w: %s", tier.ErrNotSupported, what)
}
