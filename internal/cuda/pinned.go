package cuda

import (
	"slices"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/lockrank"
)

// ranges is the host memory that is pinned. It changes when arenas grow and is read for every copy,
// so reading takes no lock.
type ranges struct {
	mu  lockrank.Mutex[lockrank.Device] // guards changes
	all atomic.Pointer[[]hostRange]     // by address; never changed in place
}

type hostRange struct {
	addr uintptr
	n    int64
}

func (r *ranges) load() []hostRange {
	if p := r.all.Load(); p != nil {
		return *p
	}
	return nil
}

// search returns where a range at addr is, or would be.
func search(all []hostRange, addr uintptr) (int, bool) {
	return slices.BinarySearchFunc(all, addr, func(x hostRange, addr uintptr) int {
		switch {
		case x.addr < addr:
			return -1
		case x.addr > addr:
			return 1
		}
		return 0
	})
}

// hold reports whether all n bytes at addr lie in one range. No bytes do.
func (r *ranges) hold(addr uintptr, n int64) bool {
	all := r.load()
	i, found := search(all, addr)
	if !found {
		i--
	}
	if n <= 0 {
		return n == 0
	}
	if i < 0 {
		return false
	}
	off := uint64(addr - all[i].addr) // may be beyond any int64
	return off <= uint64(all[i].n) && uint64(n) <= uint64(all[i].n)-off
}

// change replaces the list.
func (r *ranges) change(edit func(all []hostRange) []hostRange) {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := edit(slices.Clone(r.load()))
	r.all.Store(&all)
}

func (r *ranges) add(addr uintptr, n int64) {
	r.change(func(all []hostRange) []hostRange {
		i, _ := search(all, addr)
		return slices.Insert(all, i, hostRange{addr, n})
	})
}

func (r *ranges) remove(addr uintptr) {
	r.change(func(all []hostRange) []hostRange {
		if i, found := search(all, addr); found {
			return slices.Delete(all, i, i+1)
		}
		return all
	})
}
