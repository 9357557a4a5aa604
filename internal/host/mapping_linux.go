//go:build linux && !race

package host

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/spillway-db/spillway/internal/extent"
)

const noReserve = unix.MAP_NORESERVE

func (m *mapped) huge() error {
	if err := unix.Madvise(m.mem, unix.MADV_HUGEPAGE); err != nil {
		return err
	}
	return hugeOff(hugeSettings)
}

func (m *mapped) bind(node int) error {
	nodes, err := memoryNodes()
	if err != nil {
		return err
	}
	if !slices.Contains(nodes, node) {
		return fmt.Errorf("the machine has no memory on it")
	}
	if len(nodes) == 1 {
		return nil
	}
	return bindTo(m.mem, node)
}

// lock uses MLOCK_ONFAULT: the limit is charged at once and no page is made
// present, which is the toucher's work.
func (m *mapped) lock(b []byte) error { return lockOnFault(b) }

// touch asks the kernel to make the pages present (Linux 5.14), else adds 0 to a
// word of each.
func (m *mapped) Touch(b []byte) error {
	err := unix.Madvise(b, unix.MADV_POPULATE_WRITE)
	if errors.Is(err, unix.EINVAL) {
		if !poison { // a hidden page would fault
			extent.Touch(b)
		}
		return nil
	}
	return err
}

// discard drops the pages. Locked ones need MADV_DONTNEED_LOCKED (Linux 5.18) or
// to be unlocked for as long.
func (m *mapped) discard(b []byte) error {
	err := unix.Madvise(b, unix.MADV_DONTNEED)
	if !errors.Is(err, unix.EINVAL) {
		return err
	}
	if err := unix.Madvise(b, unix.MADV_DONTNEED_LOCKED); !errors.Is(err, unix.EINVAL) {
		return err
	}
	if err := unix.Munlock(b); err != nil {
		return err
	}
	return errors.Join(unix.Madvise(b, unix.MADV_DONTNEED), m.lock(b))
}

// hugeSettings is where the kernel shows its policy for huge pages.
const hugeSettings = "/sys/kernel/mm/transparent_hugepage"

// hugeOff returns errHugeOff if the kernel grants no huge pages, although madvise succeeds. If the
// settings cannot be read it trusts madvise.
func hugeOff(settings string) error {
	if off, err := unix.PrctlRetInt(unix.PR_GET_THP_DISABLE, 0, 0, 0, 0); err == nil && off == 1 {
		return errHugeOff
	}
	chosen := func(name string) string {
		b, _ := os.ReadFile(filepath.Join(settings, name))
		_, rest, _ := strings.Cut(string(b), "[")
		word, _, _ := strings.Cut(rest, "]")
		return word
	}
	// Linux 6.8 has a setting for each size besides; most inherit the one of all.
	var kib int
	if b, err := os.ReadFile(filepath.Join(settings, "hpage_pmd_size")); err == nil {
		_, _ = fmt.Sscan(string(b), &kib)
		kib >>= 10
	}
	word := chosen(fmt.Sprintf("hugepages-%dkB/enabled", kib))
	if word == "" || word == "inherit" {
		word = chosen("enabled")
	}
	if word == "never" {
		return errHugeOff
	}
	return nil
}
