package host

import (
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/causes"
)

// TestRefusalsHaveTheirCause: each way in which the kernel refuses has its remedy, and
// the arena works.
func TestRefusalsHaveTheirCause(t *testing.T) {
	locked := func(err error) *faulty {
		return &faulty{onLock: func([]byte) error { return fmt.Errorf("mlock2: %w", err) }}
	}
	for name, c := range map[string]struct {
		f     *faulty
		huge  bool
		node  int
		lock  bool
		cause diag.Cause
		info  bool
		says  []string
	}{
		"huge pages are off": {
			f: &faulty{onHuge: errHugeOff}, huge: true, cause: causes.HugePagesOff,
			says: []string{"switched off", "slower", "transparent_hugepage"},
		},
		"no huge pages in the kernel": {
			f: &faulty{onHuge: syscall.EINVAL}, huge: true, cause: causes.HugePagesMissing,
			says: []string{"invalid argument", "CONFIG_TRANSPARENT_HUGEPAGE"},
		},
		"no huge pages on this system": {
			f: &faulty{onHuge: errors.ErrUnsupported}, huge: true, cause: causes.System, info: true,
		},
		"mbind is filtered": {
			f: &faulty{onBind: fmt.Errorf("mbind: %w", syscall.EPERM)}, node: 2, cause: causes.MemoryPolicy,
			says: []string{"node 2", "operation not permitted", "SYS_NICE"},
		},
		"mbind is not known": {
			f: &faulty{onBind: fmt.Errorf("mbind: %w", syscall.ENOSYS)}, node: 2, cause: causes.MemoryPolicy,
			says: []string{"node 2", "seccomp"},
		},
		"the node is not in the cpuset": {
			f: &faulty{onBind: fmt.Errorf("mbind: %w", syscall.EINVAL)}, node: 2, cause: causes.MemoryNode,
			says: []string{"node 2", "cpuset"},
		},
		"the limit is 0": {
			f: locked(syscall.EPERM), lock: true, cause: causes.LockLimit,
			says: []string{
				"0 of 1048576 bytes", "swapped out", "ulimit -l", "LimitMEMLOCK=", "--ulimit memlock=", "CAP_IPC_LOCK",
			},
		},
		"the limit is low": {
			f: locked(syscall.ENOMEM), lock: true, cause: causes.LockLimit,
			says: []string{"cannot allocate memory"},
		},
		"mlock2 is not known": {f: locked(syscall.ENOSYS), lock: true, cause: causes.System, info: true},
	} {
		t.Run(name, func(t *testing.T) {
			if c.node == 0 {
				c.node = -1
			}
			a := openFaulty(t, Config{Capacity: 1 << 20, Node: c.node, Huge: c.huge, Lock: c.lock}, c.f)
			w := a.Stats().Warnings
			if len(w) != 1 || w[0].Cause != c.cause || w[0].Info != c.info || (w[0].Remedy == "") != c.info {
				t.Fatalf("warnings: %+v", w)
			}
			for _, want := range c.says {
				if !strings.Contains(w[0].String(), want) {
					t.Errorf("%q does not say %q", w[0], want)
				}
			}
			free(a, alloc(t, a, 100))
		})
	}
}

// TestNothingRefusedNothingTold: a machine that gives all that is asked for is not talked of.
func TestNothingRefusedNothingTold(t *testing.T) {
	a := openFaulty(t, Config{Capacity: 4 * step, Node: -1, Touch: true}, &faulty{})
	free(a, alloc(t, a, 4*step))
	<-a.touchDone
	if w := a.Stats().Warnings; len(w) != 0 {
		t.Errorf("%v", w)
	}
}
