package host

import (
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/tier"
)

// errHugeOff says that the kernel has huge pages and gives nobody any.
var errHugeOff = errors.New("switched off")

func (a *Arena) warn(c tier.Cause, format string, args ...any) {
	w := c.Warning(format, args...)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.warnings = append(a.mu.warnings, w)
}

// Warnings lists what was asked for and could not be had. Their Space is not set: an
// arena does not know its own.
func (a *Arena) Warnings() []tier.Warning { return a.Stats().Warnings }

func (a *Arena) warnOfHuge(err error) {
	cause := tier.CauseHugePagesMissing
	switch {
	case err == nil:
		return
	case errors.Is(err, errHugeOff):
		cause = tier.CauseHugePagesOff
	case errors.Is(err, errors.ErrUnsupported):
		cause = tier.CauseSystem
	}
	a.warn(cause, "huge pages were refused (%v): %d bytes are in small ones, and making them present and copying them is slower", err, a.cfg.Capacity)
}

func (a *Arena) warnOfNode(err error) {
	if err == nil {
		return
	}
	cause := tier.CauseMemoryNode
	if mayNotBind(err) {
		cause = tier.CauseMemoryPolicy
	}
	a.warn(cause, "the memory could not be bound to NUMA node %d (%v): it may come from any node, and copies between nodes are slower", a.cfg.Node, err)
}

func (a *Arena) warnOfLock(err error) {
	cause, limit := tier.CauseLockLimit, fmt.Sprintf("; the limit is %s", lockLimit())
	if errors.Is(err, errors.ErrUnsupported) {
		cause, limit = tier.CauseSystem, ""
	}
	a.warn(cause, "%d of %d bytes are locked (%v%s): the rest may be swapped out, and then waits for the swap device", a.locked.Load(), a.cfg.Capacity, err, limit)
}
