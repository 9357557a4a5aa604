package spillway

import (
	"cmp"
	"log/slog"
	"slices"

	"github.com/spillway-db/spillway/internal/gpuid"
	"github.com/spillway-db/spillway/internal/leases"
	"github.com/spillway-db/spillway/tier/cuda"
	"github.com/spillway-db/spillway/topology"
)

// leastLoaded orders interchangeable GPUs by load. First is the one with the fewest bytes in use,
// or promised by the node's ledger if that is more, then by how many processes hold some, then by
// UUID. So processes that start one after the other do not all take the first. It changes nothing.
func (e *Engine) leastLoaded(gpus []cuda.DeviceInfo) []cuda.DeviceInfo {
	if len(gpus) < 2 {
		return gpus
	}
	var held []leases.Holder
	if dir := e.limits.settings.Ledger; dir != "" {
		var err error
		if held, err = leases.Holders(dir); err != nil { // which joining the ledger returns, if it lasts
			held = nil
			e.cfg.Logger.Debug("spillway: the ledger does not report the load of GPUs", slog.Any("error", err))
		}
	}
	name := func(g cuda.DeviceInfo) string { return cmp.Or(g.UUID, g.PCI) } // as deviceName has it
	load := func(g cuda.DeviceInfo) (bytes int64, holders int) {
		for _, h := range held {
			if gpuid.SameUUID(h.Device, name(g)) {
				bytes += h.Live
				holders++
			}
		}
		return max(bytes, usedOn(e.topo.GPUs, g.UUID, g.PCI)), holders
	}
	gpus = slices.Clone(gpus)
	slices.SortStableFunc(gpus, func(a, b cuda.DeviceInfo) int {
		aBytes, aHolders := load(a)
		bBytes, bHolders := load(b)
		return cmp.Or(cmp.Compare(aBytes, bBytes), cmp.Compare(aHolders, bHolders), cmp.Compare(name(a), name(b)))
	})
	return gpus
}

// usedOn returns how many bytes of a GPU, or of its instance, all processes use; 0 if that is not
// known.
func usedOn(gpus []topology.GPU, uuid, pci string) int64 {
	for _, g := range gpus {
		for _, m := range g.MIG {
			if gpuid.SameUUID(m.UUID, uuid) {
				return max(0, m.MemoryBytes-m.FreeBytes)
			}
		}
		if gpuid.SameUUID(g.UUID, uuid) || gpuid.SameAddress(g.PCIAddress, pci) {
			return max(0, g.MemoryBytes-g.FreeBytes)
		}
	}
	return 0
}

// leastUsed returns the n GPUs of which the fewest bytes are in use, in the order given.
func leastUsed(gpus []topology.GPU, n int) []topology.GPU {
	if n <= 0 || n >= len(gpus) {
		return gpus
	}
	order := make([]int, len(gpus))
	for i := range gpus {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		x, y := gpus[a], gpus[b]
		return cmp.Or(
			cmp.Compare(usedOn(gpus[a:a+1], idOf(x), x.PCIAddress), usedOn(gpus[b:b+1], idOf(y), y.PCIAddress)),
			cmp.Compare(idOf(x), idOf(y)),
		)
	})
	chosen := order[:n]
	slices.Sort(chosen)
	least := make([]topology.GPU, n)
	for i, at := range chosen {
		least[i] = gpus[at]
	}
	return least
}
