//go:build linux

package host

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// lockRemedy says what allows more memory to be locked.
func lockRemedy() string {
	limit := "unknown"
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &r); err == nil {
		limit = fmt.Sprintf("%d bytes", r.Cur)
		if r.Cur == unix.RLIM_INFINITY {
			limit = "unlimited"
		}
	}
	return fmt.Sprintf("; the limit of locked memory is %s: raise it (ulimit -l, LimitMEMLOCK= in systemd, --ulimit memlock= in containers) or grant CAP_IPC_LOCK", limit)
}
