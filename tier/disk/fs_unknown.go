//go:build !linux && !darwin

package disk

import "errors"

// Usage is not known here: a volume relies on its capacity alone.
func (osFS) Usage(string) (Usage, error) { return Usage{}, errors.ErrUnsupported }
