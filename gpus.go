package spillway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/host"
	"github.com/spillway-db/spillway/internal/named"
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
	gpus []topology.GPU // Index is the driver's ordinal
	err  error          // why there is none
}

// loadDriver loads the driver, once. It adds the node of each GPU and its bytes in use, from the
// topology.
func (e *Engine) loadDriver() *driver {
	if e.driver != nil {
		return e.driver
	}
	e.driver = &driver{}
	var shown []cuda.DeviceInfo
	if e.driver.Driver, e.driver.err = cuda.Load(e.cfg.CUDALibrary); e.driver.err == nil {
		shown, e.driver.err = e.driver.Devices()
	}
	for _, info := range shown {
		g := topology.GPU{
			Index: info.Ordinal, UUID: info.UUID, PCIAddress: info.PCI, Node: topology.Unknown,
			MemoryNode: topology.Unknown, MemoryBytes: info.Memory, FreeBytes: info.Memory,
		}
		if known, ok := lookUp(e.topo.GPUs, info.UUID, info.PCI); ok {
			used := known.MemoryBytes - known.FreeBytes
			for _, m := range known.MIG {
				if named.SameUUID(m.UUID, info.UUID) {
					used = m.MemoryBytes - m.FreeBytes
				}
			}
			g.Node, g.FreeBytes = nodeOf(known), g.MemoryBytes-max(0, used)
		}
		e.driver.gpus = append(e.driver.gpus, g)
	}
	return e.driver
}

// chooseGPUs decides which GPU of the driver serves each space, before anything is opened. Spaces with
// an ID come first: the others have what is left, the least loaded first. A simulated GPU replaces one
// that is not to be had, unless the configuration wants no other.
func (e *Engine) chooseGPUs() error {
	e.gpus = make([]*topology.GPU, len(e.cfg.GPUs))
	e.cfg.GPUs = slices.Clone(e.cfg.GPUs) // the program's, in which shares become bytes
	needsOne := func(g GPUConfig) bool { return g.Device == nil && g.Open == nil && g.Backend != Sim }
	var left []topology.GPU
	if slices.ContainsFunc(e.cfg.GPUs, needsOne) {
		left = e.machine.byLoad(e.loadDriver().gpus)
	}
	for _, named := range []bool{true, false} {
		for i := range e.cfg.GPUs {
			g := &e.cfg.GPUs[i]
			if !needsOne(*g) || (g.ID != "") != named {
				continue
			}
			at, err := 0, e.driver.err
			if err == nil {
				at, err = pick(e.driver.gpus, left, g.ID)
			}
			_, ambiguous := errors.AsType[*AmbiguousGPUError](err)
			space := tier.ID{Kind: tier.GPU, Ordinal: i}
			switch {
			case err == nil:
				gpu := left[at]
				e.gpus[i], left = &gpu, slices.Delete(left, at, at+1)
				if g.Memory.Share != 0 {
					n, _ := g.Memory.Of(gpu.MemoryBytes) // if that is less than a byte, a page
					g.Memory = Amount{Bytes: max(tier.Page, wholePages(n))}
				}
			case g.Backend == CUDA || ambiguous: // it is not known which GPU another would replace
				return fmt.Errorf("%s: %w", space, err)
			case g.Memory.Share != 0:
				return fmt.Errorf("%s: %w: %w", space, ErrShareOfSimulated, err)
			default:
				w := causes.Warn(causes.Simulated, "a simulated GPU replaces a real one: %v", err)
				w.Space = space.String()
				e.warn(w)
			}
		}
	}
	return nil
}

// pick returns which of the GPUs that are left has an ID, of all that there are. Without an ID it is
// the first.
func pick(all, left []topology.GPU, id string) (int, error) {
	meant, what := left, "that is not another space's"
	if id != "" {
		meant, what = meantBy(all, id), id+", or it is another space's"
		if len(meant) > 1 {
			err := &AmbiguousGPUError{ID: id}
			for _, g := range meant {
				err.UUIDs = append(err.UUIDs, g.UUID)
			}
			return 0, err
		}
	}
	for i, g := range left {
		if len(meant) > 0 && g.Index == meant[0].Index {
			return i, nil
		}
	}
	return 0, fmt.Errorf("the CUDA driver shows no GPU %s: %w", what, tier.ErrNotSupported)
}

// lookUp returns the GPU with that UUID or address, or of which an instance has the UUID.
func lookUp(gpus []topology.GPU, uuid, address string) (topology.GPU, bool) {
	i := slices.IndexFunc(gpus, func(g topology.GPU) bool {
		return named.SameUUID(g.UUID, uuid) || named.SameAddress(g.PCIAddress, address) ||
			slices.ContainsFunc(g.MIG, func(m topology.MIGInstance) bool { return named.SameUUID(m.UUID, uuid) })
	})
	if i < 0 {
		return topology.GPU{}, false
	}
	return gpus[i], true
}

// meantBy returns the GPUs that an ID may mean: the one with that UUID or PCI address, or else all whose
// UUID, or an instance's, begins with it.
func meantBy(gpus []topology.GPU, id string) (meant []topology.GPU) {
	if g, ok := lookUp(gpus, id, id); ok {
		return []topology.GPU{g}
	}
	for _, g := range gpus {
		begins := func(m topology.MIGInstance) bool { return named.BeginsUUID(id, m.UUID) }
		if named.BeginsUUID(id, g.UUID) || slices.ContainsFunc(g.MIG, begins) {
			meant = append(meant, g)
		}
	}
	return meant
}

// simulated reports whether the engine makes a simulated GPU for the space.
func (e *Engine) simulated(i int) bool {
	g := e.cfg.GPUs[i]
	return g.Device == nil && g.Open == nil && e.gpus[i] == nil
}

// byLoad returns GPUs that may replace each other, the least loaded first: by bytes that are in use, or
// promised by the node's ledger if that is more, by holders there, by id. So processes that start one
// after the other do not all take the first.
func (m machine) byLoad(gpus []topology.GPU) []topology.GPU {
	load := func(g topology.GPU) (bytes int64, holders int) {
		for _, h := range m.held {
			if named.SameUUID(h.Device, idOf(g)) {
				bytes += h.Live
				holders++
			}
		}
		return max(bytes, g.MemoryBytes-g.FreeBytes), holders
	}
	gpus = slices.Clone(gpus)
	slices.SortStableFunc(gpus, func(a, b topology.GPU) int {
		ofA, holdersA := load(a)
		ofB, holdersB := load(b)
		return cmp.Or(cmp.Compare(ofA, ofB), holdersA-holdersB, cmp.Compare(idOf(a), idOf(b)))
	})
	return gpus
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

// lookAtGPUs keeps what others hold on the GPUs in the books of the spaces there, and has frees tried
// again that a device refused.
func (e *Engine) lookAtGPUs() {
	for i, s := range e.reservations.Spaces().InTier(tier.GPU) { // by number, as e.wrapped
		var n int64
		var ok bool
		e.panics.Do("Device.MemInfo", func() { n, ok = s.ExternalOn(e.wrapped[i]) })
		if ok {
			s.SetExternal(n)
		}
		e.panics.Do("Stream.Err", s.Pool.(*devpool.Memory).Retry)
	}
}

// every calls look now and once in each watchPeriod until ctx ends.
func every(ctx context.Context, look func()) {
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
