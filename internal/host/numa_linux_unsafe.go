//go:build linux && !race

package host

import (
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/topology"
)

// memoryNodes returns the NUMA nodes that have memory; node 0 alone where the
// kernel knows no nodes.
func memoryNodes() ([]int, error) {
	b, err := os.ReadFile("/sys/devices/system/node/has_memory")
	if os.IsNotExist(err) {
		return []int{0}, nil
	}
	if err != nil {
		return nil, err
	}
	var nodes topology.Set
	err = nodes.UnmarshalText(b)
	return nodes, err
}

// bindTo makes the pages of b come from node, and from no other: the kernel
// reclaims its page cache there before it fails. MPOL_PREFERRED would take pages
// of other nodes without a word as soon as this one's are full of cache.
func bindTo(b []byte, node int) error {
	const wordBits = 64
	mask := make([]uint64, node/wordBits+1)
	mask[node/wordBits] = 1 << (node % wordBits)
	// maxnode counts one more than the bits that the kernel reads.
	_, _, errno := unix.Syscall6(unix.SYS_MBIND, extent.Address(b), uintptr(len(b)), unix.MPOL_BIND,
		uintptr(unsafe.Pointer(&mask[0])), uintptr(len(mask)*wordBits+1), 0)
	if errno != 0 {
		return fmt.Errorf("mbind: %w", errno)
	}
	return nil
}

// lockOnFault is mlock2 with MLOCK_ONFAULT, which x/sys does not wrap.
func lockOnFault(b []byte) error {
	const onFault = 1 // MLOCK_ONFAULT
	_, _, errno := unix.Syscall(unix.SYS_MLOCK2, extent.Address(b), uintptr(len(b)), onFault)
	if errno != 0 {
		var limit unix.Rlimit
		_ = unix.Getrlimit(unix.RLIMIT_MEMLOCK, &limit) // 0 if it is not known
		return fmt.Errorf("mlock2: %w; the limit is %d bytes", errno, limit.Cur)
	}
	return nil
}
