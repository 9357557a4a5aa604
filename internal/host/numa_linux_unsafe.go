//go:build linux && !race

package host

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"unsafe"

	"github.com/spillway-db/spillway/internal/address"
	"golang.org/x/sys/unix"
)

// memoryNodes returns the NUMA nodes that have memory; node 0 alone where the
// kernel knows no nodes.
func memoryNodes() (map[int]bool, error) {
	b, err := os.ReadFile("/sys/devices/system/node/has_memory")
	if os.IsNotExist(err) {
		return map[int]bool{0: true}, nil
	}
	if err != nil {
		return nil, err
	}
	return parseNodes(strings.TrimSpace(string(b)))
}

// parseNodes parses the kernel's list format: "0-3,8".
func parseNodes(s string) (map[int]bool, error) {
	nodes := make(map[int]bool)
	for part := range strings.SplitSeq(s, ",") {
		lo, hi, isRange := strings.Cut(part, "-")
		if !isRange {
			hi = lo
		}
		from, err := strconv.ParseUint(lo, 10, 16)
		if err != nil {
			return nil, fmt.Errorf("list of NUMA nodes %q: %w", s, err)
		}
		to, err := strconv.ParseUint(hi, 10, 16)
		if err != nil {
			return nil, fmt.Errorf("list of NUMA nodes %q: %w", s, err)
		}
		for n := from; n <= to; n++ {
			nodes[int(n)] = true
		}
	}
	return nodes, nil
}

// bindTo makes the pages of b come from node, and from no other: the kernel
// reclaims its page cache there before it fails. MPOL_PREFERRED would take pages
// of other nodes without a word as soon as this one's are full of cache.
func bindTo(b []byte, node int) error {
	const wordBits = 64
	mask := make([]uint64, node/wordBits+1)
	mask[node/wordBits] = 1 << (node % wordBits)
	// maxnode counts one more than the bits that the kernel reads.
	_, _, errno := unix.Syscall6(unix.SYS_MBIND, address.Of(b), uintptr(len(b)), unix.MPOL_BIND,
		uintptr(unsafe.Pointer(&mask[0])), uintptr(len(mask)*wordBits+1), 0)
	if errno != 0 {
		return fmt.Errorf("mbind: %w", errno)
	}
	return nil
}

// lockOnFault is mlock2 with MLOCK_ONFAULT, which x/sys does not wrap.
func lockOnFault(b []byte) error {
	const onFault = 1 // MLOCK_ONFAULT
	_, _, errno := unix.Syscall(unix.SYS_MLOCK2, address.Of(b), uintptr(len(b)), onFault)
	if errno != 0 {
		return fmt.Errorf("mlock2: %w", errno)
	}
	return nil
}
