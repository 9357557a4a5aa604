package spillway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/gpuid"
	"github.com/spillway-db/spillway/internal/host"
	"github.com/spillway-db/spillway/internal/leases"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/cuda"
	"github.com/spillway-db/spillway/topology"
)

// ErrShareOfSimulated: a GPU space whose size is a share of a card's memory would be served by a
// simulated GPU, which has as much as it is given.
var ErrShareOfSimulated = errors.New("a simulated GPU has no memory to take a share of")

// AmbiguousGPUError lists the GPUs that the ID of a GPU space may mean. Neither another GPU nor a
// simulated one replaces it then.
type AmbiguousGPUError struct {
	ID    string
	UUIDs []string // that begin with it
}

func (e *AmbiguousGPUError) Error() string {
	return fmt.Sprintf("the ID of a GPU space is the beginning of several GPUs' UUIDs: "+
		"%s may be each of %s: write more of the one that is meant", e.ID, strings.Join(e.UUIDs, ", "))
}

// driver is NVIDIA's, with the GPUs that it shows to the process.
type driver struct {
	*cuda.Driver
	gpus []cuda.DeviceInfo
	err  error // why there is none
}

// loadDriver loads the driver, once.
func (e *Engine) loadDriver() *driver {
	if e.driver == nil {
		d := &driver{}
		if d.Driver, d.err = cuda.Load(e.cfg.CUDALibrary); d.err == nil {
			d.gpus, d.err = d.Devices()
		}
		e.driver = d
	}
	return e.driver
}

// shownByDriver returns the GPUs that the driver shows, Config.MostGPUs at most, with their
// properties in the topology. If there is no driver, chooseGPUs warns of that.
func (e *Engine) shownByDriver() (gpus []topology.GPU) {
	for _, g := range leastLoaded(e.loadDriver().gpus, e.cfg.MostGPUs, e.loads()) {
		node := e.nodeOfGPU(g)
		gpus = append(gpus, topology.GPU{
			Index: g.Ordinal, UUID: g.UUID, PCIAddress: g.PCI, MemoryBytes: g.Memory, Node: node, MemoryNode: node,
		})
	}
	return gpus
}

// chooseGPUs decides which GPU of the driver serves each space, before anything is opened. Spaces with
// an ID come first: the others have what is left, the least loaded first. A simulated GPU replaces one
// that is not to be had, unless the configuration wants no other.
func (e *Engine) chooseGPUs() error {
	e.gpus = make([]*cuda.DeviceInfo, len(e.cfg.GPUs))
	e.cfg.GPUs = slices.Clone(e.cfg.GPUs) // the program's, in which shares become bytes
	made := func(g GPUConfig) bool { return g.Device != nil || g.Open != nil }
	var left []cuda.DeviceInfo
	if slices.ContainsFunc(e.cfg.GPUs, func(g GPUConfig) bool { return !made(g) && g.Backend != Sim }) {
		all := e.loadDriver().gpus
		for _, i := range byLoad(all, e.loads()) {
			left = append(left, all[i])
		}
	}
	for _, named := range []bool{true, false} {
		for i := range e.cfg.GPUs {
			g := &e.cfg.GPUs[i]
			if made(*g) || (g.ID != "") != named {
				continue
			}
			at, err := 0, errSimulated
			if g.Backend != Sim {
				if err = e.driver.err; err == nil {
					at, err = pick(e.driver.gpus, left, g.ID)
				}
			}
			_, ambiguous := errors.AsType[*AmbiguousGPUError](err)
			space := tier.ID{Kind: tier.GPU, Ordinal: i}
			switch {
			case err == nil:
				gpu := left[at]
				e.gpus[i], left = &gpu, slices.Delete(left, at, at+1)
				if g.Memory.Share != 0 {
					n, _ := g.Memory.Of(gpu.Memory) // if that is less than a byte, a page
					g.Memory = Amount{Bytes: max(tier.Page, n/tier.Page*tier.Page)}
				}
			case g.Backend == CUDA || ambiguous: // it is not known which GPU another would replace
				return fmt.Errorf("%s: %w", space, err)
			case g.Memory.Share != 0:
				return fmt.Errorf("%s: %w: %w", space, ErrShareOfSimulated, err)
			case g.Backend == Auto:
				w := causes.Warn(causes.Simulated, "a simulated GPU replaces a real one: %v", err)
				w.Space = space.String()
				e.warn(w)
			}
		}
	}
	return nil
}

// errSimulated is why a space is simulated that is meant to be.
var errSimulated = errors.New("it was asked for")

// pick returns which of the GPUs that are left has an ID, of all that there are: a UUID, a PCI
// address, or the beginning of one UUID only. Without an ID it is the first.
func pick(all, left []cuda.DeviceInfo, id string) (int, error) {
	if id == "" {
		if len(left) == 0 {
			return 0, fmt.Errorf("the CUDA driver shows no GPU that is not another space's: %w", tier.ErrNotSupported)
		}
		return 0, nil
	}
	named := func(g cuda.DeviceInfo) bool { return gpuid.SameUUID(id, g.UUID) || gpuid.SameAddress(id, g.PCI) }
	found := slices.IndexFunc(all, named)
	if found < 0 {
		var begin []string
		for i, g := range all {
			if gpuid.BeginsUUID(id, g.UUID) {
				begin, found = append(begin, g.UUID), i
			}
		}
		if len(begin) > 1 {
			return 0, &AmbiguousGPUError{ID: id, UUIDs: begin}
		}
	}
	for i, g := range left {
		if found >= 0 && g.Ordinal == all[found].Ordinal {
			return i, nil
		}
	}
	return 0, fmt.Errorf("the CUDA driver shows no GPU %s, or it is another space's: %w", id, tier.ErrNotSupported)
}

// simulated reports whether the engine makes a simulated GPU for the space.
func (e *Engine) simulated(i int) bool {
	g := e.cfg.GPUs[i]
	return g.Device == nil && g.Open == nil && e.gpus[i] == nil
}

// nodeOfGPU returns the NUMA node that a GPU is on, as far as it is known.
func (e *Engine) nodeOfGPU(gpu cuda.DeviceInfo) int {
	if g, ok := lookUp(e.topo.GPUs, gpu.UUID, gpu.PCI); ok {
		return nodeOf(g)
	}
	return topology.Unknown
}

// load is how much of a GPU is in use, or promised by the node's ledger if that is more.
type load struct {
	bytes   int64
	holders int // processes
	name    string
}

// byLoad returns the indexes of GPUs that may replace each other, the least loaded first: by bytes,
// by holders, by name. So processes that start one after the other do not all take the first.
func byLoad[T any](gpus []T, of func(T) load) []int {
	order, loads := make([]int, len(gpus)), make([]load, len(gpus))
	for i, g := range gpus {
		order[i], loads[i] = i, of(g)
	}
	slices.SortStableFunc(order, func(a, b int) int {
		x, y := loads[a], loads[b]
		return cmp.Or(cmp.Compare(x.bytes, y.bytes), x.holders-y.holders, cmp.Compare(x.name, y.name))
	})
	return order
}

// leastLoaded returns the n least loaded GPUs in the order given, or all if n is 0.
func leastLoaded[T any](gpus []T, n int, of func(T) load) []T {
	if n <= 0 || n >= len(gpus) {
		return gpus
	}
	order := byLoad(gpus, of)[:n]
	slices.Sort(order)
	least := make([]T, n)
	for i, at := range order {
		least[i] = gpus[at]
	}
	return least
}

// loads returns the loads of the driver's GPUs, by the topology and by the node's ledger.
func (e *Engine) loads() func(cuda.DeviceInfo) load {
	var held []leases.Holder
	if dir := e.limits.settings.Ledger; dir != "" {
		var err error
		if held, err = leases.Holders(dir); err != nil { // which joining the ledger returns, if it lasts
			held = nil
			e.cfg.Logger.Debug("spillway: the ledger does not report the load of GPUs", slog.Any("error", err))
		}
	}
	return func(g cuda.DeviceInfo) load {
		l := load{name: cmp.Or(g.UUID, g.PCI)} // as the ledger has it, see limited
		for _, h := range held {
			if gpuid.SameUUID(h.Device, l.name) {
				l.bytes += h.Live
				l.holders++
			}
		}
		l.bytes = max(l.bytes, usedOn(e.topo.GPUs, g.UUID, g.PCI))
		return l
	}
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

// pin has the GPUs' drivers pin the memory of a host space. Without that everything works, but
// slowly, and the memory is locked as it is if there is no GPU.
func (e *Engine) pin(id tier.ID, arena *host.Arena, pinners []tier.Pinner) {
	pinned := false
	for _, p := range pinners {
		err := arena.Pin(p)
		if err == nil {
			pinned = true
			continue
		}
		cause := causes.NotPinned
		if errors.Is(err, tier.ErrNotSupported) {
			cause = causes.System
		}
		w := causes.Warn(cause, "the driver does not pin the %d bytes of host memory: %v: "+
			"what GPUs copy goes by way of other memory, which is slower", arena.Stats().Capacity, err)
		w.Space = id.String()
		e.warn(w)
	}
	if len(pinners) > 0 && !pinned {
		arena.Lock()
	}
}

// watchPeriod is how often devices are queried for what others hold there. Asking NVIDIA's driver
// may take half a millisecond, which is then 0.05 % of a core for each GPU.
const watchPeriod = time.Second

// watchGPUs keeps what others hold on the GPUs in the books of the spaces there, and has frees
// tried again that a device refused, until ctx ends. It has a goroutine of its own, because a
// driver may take its time to answer.
func (e *Engine) watchGPUs(ctx context.Context) {
	gpus := e.reservations.Spaces().InTier(tier.GPU) // by number, as e.wrapped
	every(ctx, len(gpus) > 0, func() {
		for i, s := range gpus {
			var n int64
			var ok bool
			e.panics.Do("Device.MemInfo or FreeBytes", func() { n, ok = s.ForeignOn(e.wrapped[i]) })
			if ok {
				s.SetForeign(n)
			}
			e.panics.Do("Stream.Err", s.Pool().(*devpool.Memory).Retry)
		}
	})
}

// every calls look now and once in each watchPeriod until ctx ends, if there is anything to look at.
func every(ctx context.Context, anything bool, look func()) {
	if !anything {
		return
	}
	tick := time.NewTicker(watchPeriod)
	defer tick.Stop()
	for {
		look()
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
