package spillway

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/gpuid"
	"github.com/spillway-db/spillway/internal/host"
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
	return fmt.Sprintf("the ID of a GPU space is the beginning of several GPUs' UUIDs: %s may be each of %s: write more of the one that is meant", e.ID, strings.Join(e.UUIDs, ", "))
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

// shownByDriver returns the GPUs that the driver shows, Config.MostGPUs at most, with what the
// topology knows of them. If there is no driver, chooseGPUs warns of that.
func (e *Engine) shownByDriver() []topology.GPU {
	shown := e.loadDriver().gpus
	if most := e.cfg.MostGPUs; most > 0 && most < len(shown) {
		shown = e.leastLoaded(shown)[:most]
		slices.SortFunc(shown, func(a, b cuda.DeviceInfo) int { return a.Ordinal - b.Ordinal })
	}
	gpus := make([]topology.GPU, len(shown))
	for i, g := range shown {
		gpus[i] = topology.GPU{Index: g.Ordinal, UUID: g.UUID, PCIAddress: g.PCI, MemoryBytes: g.Memory, Node: e.nodeOfGPU(g)}
		gpus[i].MemoryNode = gpus[i].Node
	}
	return gpus
}

// chosen is what serves a GPU space: a GPU of the driver, or what the configuration has, or a
// simulated one.
type chosen struct {
	real bool
	gpu  cuda.DeviceInfo // if it is real
}

// chooseGPUs decides that for each space, before anything is opened. Those with an ID come first:
// the others have what is left, the least loaded first.
func (e *Engine) chooseGPUs() error {
	e.gpus = make([]chosen, len(e.cfg.GPUs))
	e.cfg.GPUs = slices.Clone(e.cfg.GPUs) // the program's, in which shares become bytes
	var left []cuda.DeviceInfo
	if slices.ContainsFunc(e.cfg.GPUs, func(g GPUConfig) bool { return g.Device == nil && g.Open == nil && g.Backend != Sim }) {
		left = slices.Clone(e.leastLoaded(e.loadDriver().gpus))
	}
	for _, named := range []bool{true, false} {
		for i, g := range e.cfg.GPUs {
			if g.Device != nil || g.Open != nil || (g.ID != "") != named {
				continue
			}
			at, err := 0, errSimulated
			if g.Backend != Sim {
				if err = e.driver.err; err == nil {
					at, err = pick(e.driver.gpus, left, g.ID)
				}
			}
			if err == nil {
				e.gpus[i] = chosen{real: true, gpu: left[at]}
				if g.Memory.Share != 0 {
					n, _ := g.Memory.Of(left[at].Memory) // if that is less than a byte, a page
					e.cfg.GPUs[i].Memory = Amount{Bytes: max(tier.Page, n/tier.Page*tier.Page)}
				}
				left = slices.Delete(left, at, at+1)
				continue
			}
			if err := e.standIn(tier.ID{Kind: tier.GPU, Ordinal: i}, g, err); err != nil {
				return err
			}
		}
	}
	return nil
}

// errSimulated is why a space is simulated that is meant to be.
var errSimulated = errors.New("it was asked for")

// standIn reports whether a simulated GPU may serve a space for which no other can be had.
func (e *Engine) standIn(space tier.ID, g GPUConfig, why error) error {
	_, ambiguous := errors.AsType[*AmbiguousGPUError](why)
	switch {
	case g.Backend == CUDA || ambiguous: // it is not known which GPU another would replace
		return fmt.Errorf("%s: %w", space, why)
	case g.Memory.Share != 0:
		return fmt.Errorf("%s: %w: %w", space, ErrShareOfSimulated, why)
	case g.Backend == Auto:
		w := causes.Warn(causes.Simulated, "a simulated GPU replaces a real one: %v", why)
		w.Space = space.String()
		e.warn(w)
	}
	return nil
}

// pick returns which of the GPUs that are left has an ID, of all that there are; the first, without
// one.
func pick(all, left []cuda.DeviceInfo, id string) (int, error) {
	if id == "" {
		if len(left) == 0 {
			return 0, fmt.Errorf("the CUDA driver shows no GPU that is not another space's: %w", tier.ErrNotSupported)
		}
		return 0, nil
	}
	named, err := find(all, id)
	if err != nil {
		return 0, err
	}
	for i, g := range left {
		if named != nil && g.Ordinal == named.Ordinal {
			return i, nil
		}
	}
	return 0, fmt.Errorf("the CUDA driver shows no GPU %s, or it is another space's: %w", id, tier.ErrNotSupported)
}

// find returns the GPU that id names: by its UUID, its PCI address, or the beginning of one UUID
// only. Nil: there is none.
func find(all []cuda.DeviceInfo, id string) (*cuda.DeviceInfo, error) {
	var begin []string
	var found *cuda.DeviceInfo
	for i, g := range all {
		if gpuid.SameUUID(id, g.UUID) || gpuid.SameAddress(id, g.PCI) {
			return &all[i], nil
		}
		if gpuid.BeginsUUID(id, g.UUID) {
			begin, found = append(begin, g.UUID), &all[i]
		}
	}
	if len(begin) > 1 {
		return nil, &AmbiguousGPUError{ID: id, UUIDs: begin}
	}
	return found, nil
}

// simulated reports whether the engine makes a simulated GPU for the space.
func (e *Engine) simulated(i int) bool {
	g := e.cfg.GPUs[i]
	return g.Device == nil && g.Open == nil && !e.gpus[i].real
}

// openCUDA opens the GPU of a space.
func (e *Engine) openCUDA(i int, g GPUConfig) (tier.Device, error) {
	gpu := e.gpus[i].gpu
	dev, err := e.driver.Open(cuda.Config{Ordinal: gpu.Ordinal, Node: e.nodeOfGPU(gpu), Memory: g.Memory.Bytes})
	if err != nil {
		return nil, err
	}
	return dev, nil
}

// nodeOfGPU returns the NUMA node that a GPU is on, as far as it is known.
func (e *Engine) nodeOfGPU(gpu cuda.DeviceInfo) int {
	if g, ok := lookUp(e.topo.GPUs, gpu.UUID, gpu.PCI); ok {
		return nodeOf(g)
	}
	return topology.Unknown
}

// checkPeers has GPUs that are said to reach each other's memory prove it, before their
// memory is given out. Those that do not copy through pinned host memory.
func (e *Engine) checkPeers() {
	cuda.CheckPeers(e.wrapped, func(from, to int, why error) {
		e.warn(causes.Warn(causes.PeerAccess, "the driver promises that gpu:%d and gpu:%d reach each other, but %v: copies between them go through pinned host memory, which is slower", from, to, why))
	})
}

// pinners lists what wants host memory pinned, one for each GPU: devices of one driver do
// it once for all.
func (e *Engine) pinners() (list []tier.Pinner) {
	for _, d := range e.wrapped {
		if p, ok := tier.As[tier.Pinner](d); ok {
			list = append(list, p)
		}
	}
	return list
}

// pin has the GPUs' drivers pin the memory of a host space. Without that everything works, but
// slowly, and the memory is locked as it is where there is no GPU.
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
		w := causes.Warn(cause, "the driver does not pin the %d bytes of host memory: %v: what GPUs copy goes by way of other memory, which is slower", arena.Stats().Capacity, err)
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
	gpus := e.gpuSpaces()
	if len(gpus) == 0 {
		return
	}
	tick := time.NewTicker(watchPeriod)
	defer tick.Stop()
	for {
		for i, s := range gpus {
			var n int64
			var ok bool
			e.panics.Do("Device.MemInfo or FreeBytes", func() { n, ok = s.ForeignOn(e.wrapped[i]) })
			if ok {
				s.SetForeign(n)
			}
			s.Pool().(*devpool.Memory).Retry()
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// gpuSpaces returns the GPU spaces, by number.
func (e *Engine) gpuSpaces() []*tier.Space {
	var gpus []*tier.Space
	for _, s := range e.spaces {
		if s.Kind() == tier.GPU {
			gpus = append(gpus, s)
		}
	}
	return gpus
}
