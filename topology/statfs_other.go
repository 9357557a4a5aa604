//go:build !linux && !darwin

package topology

import (
	"errors"
	"fmt"
)

func systemStatfs(string) (total, free int64, err error) {
	return 0, 0, fmt.Errorf("statfs: %w", errors.ErrUnsupported)
}
