//go:build !linux && !darwin

package disk

import "errors"

// Usage cannot be told here; a volume then relies on its capacity alone.
func (osFS) Usage(string) (Usage, error) { return Usage{}, errors.ErrUnsupported }
