package host

import (
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/causes"
)

// errHugeOff says that the kernel has huge pages and gives nobody any.
var errHugeOff = errors.New("switched off")

func (a *Arena) warn(c diag.Cause, format string, args ...any) {
	w := causes.Warn(c, format, args...)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.warnings = append(a.mu.warnings, w)
}

// Warnings lists what was asked for and could not be had. Their Space is not set: an
// arena does not know its own.
func (a *Arena) Warnings() []diag.Warning { return a.Stats().Warnings }

func (a *Arena) warnOfHuge(err error) {
	cause := causes.HugePagesMissing
	switch {
	case err == nil:
		return
	case errors.Is(err, errHugeOff):
		cause = causes.HugePagesOff
	case errors.Is(err, errors.ErrUnsupported):
		cause = causes.System
	}
	a.warn(cause, "huge pages were refused (%v): %d bytes are in small ones, and making them present and copying them is slower", err, a.cfg.Capacity)
}

func (a *Arena) warnOfNode(err error) {
	if err == nil {
		return
	}
	cause := causes.MemoryNode
	if mayNotBind(err) {
		cause = causes.MemoryPolicy
	}
	a.warn(cause, "the memory could not be bound to NUMA node %d (%v): it may come from any node, and copies between nodes are slower", a.cfg.Node, err)
}

func (a *Arena) warnOfLock(err error) {
	cause, limit := causes.LockLimit, fmt.Sprintf("; the limit is %s", lockLimit())
	if errors.Is(err, errors.ErrUnsupported) {
		cause, limit = causes.System, ""
	}
	a.warn(cause, "%d of %d bytes are locked (%v%s): the rest may be swapped out, and then waits for the swap device", a.locked.Load(), a.cfg.Capacity, err, limit)
}
