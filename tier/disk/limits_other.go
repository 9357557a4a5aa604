//go:build !(linux || darwin)

package disk

import "math"

// fileLimit is how many files the process may have open: more than any volume has.
func fileLimit() int64 { return math.MaxInt64 }
