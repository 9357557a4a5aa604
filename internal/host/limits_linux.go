//go:build linux

package host

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

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
