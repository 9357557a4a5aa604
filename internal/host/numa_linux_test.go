//go:build linux && !race

package host

import (
	"errors"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/spillway-db/spillway/internal/causes"
)

func TestNodeWithoutMemoryIsWarnedOf(t *testing.T) {
	a := open(t, Config{Capacity: 1 << 20, Node: 999})
	if w := a.Stats().Warnings; len(w) != 1 || !strings.Contains(w[0].What, "NUMA node 999") {
		t.Errorf("warnings: %q", w)
	}
	a = open(t, Config{Capacity: 1 << 20, Node: 0})
	if w := a.Stats().Warnings; len(w) != 0 {
		t.Errorf("warnings for node 0: %q", w)
	}
}

func TestBindTo(t *testing.T) {
	m, err := reserve(4 * step)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Release()
	err = bindTo(m.Bytes(), 0)
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOSYS) {
		t.Skip("needs mbind: ", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	m.Bytes()[0] = 1 // a page can be had from the node
	if err := bindTo(m.Bytes(), 1000); err == nil {
		t.Error("bound to node 1000")
	}
}

// TestLockWithoutPrivilege locks under a real limit, as a process without
// CAP_IPC_LOCK does.
func TestLockWithoutPrivilege(t *testing.T) {
	runtime.LockOSThread() // capabilities are the thread's
	defer runtime.UnlockOSThread()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	if err := unix.Capget(&header, &caps[0]); err != nil {
		t.Skip("needs to read its capabilities: ", err)
	}
	less := caps
	less[0].Effective &^= 1 << unix.CAP_IPC_LOCK
	if err := unix.Capset(&header, &less[0]); err != nil {
		t.Skip("needs to give a capability up: ", err)
	}
	defer unix.Capset(&header, &caps[0])
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &limit); err != nil {
		t.Skip("needs the limit of locked memory: ", err)
	}
	const allowed = 1 << 20
	if limit.Max < allowed {
		t.Skip("needs a hard limit that is not lower than the test's")
	}
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: allowed, Max: limit.Max}); err != nil {
		t.Skip("needs a limit that can be set: ", err)
	}
	defer unix.Setrlimit(unix.RLIMIT_MEMLOCK, &limit)

	a := open(t, Config{Capacity: 64 << 20, Node: -1, Lock: true})
	if s := a.Stats(); s.Locked != allowed || len(s.Warnings) != 1 || s.Warnings[0].Cause != causes.LockLimit ||
		!strings.Contains(s.Warnings[0].What, "the limit is 1048576 bytes") {
		t.Errorf("locked %d of %d allowed, warnings %q", s.Locked, allowed, s.Warnings)
	}
}
