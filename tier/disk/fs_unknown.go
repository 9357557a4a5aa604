//go:build !linux && !darwin

package disk

import (
	"errors"
	"math"
)

// Usage is not known here: a volume relies on its capacity alone.
func (osFS) Usage(string) (Usage, error) { return Usage{}, errors.ErrUnsupported }

// fileLimit is how many files the process may have open: more than any volume has.
func fileLimit() int64 { return math.MaxInt64 }
