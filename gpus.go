package spillway

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/cuda"
	"github.com/spillway-db/spillway/tier/host"
	"github.com/spillway-db/spillway/topology"
)

// chosen is what serves a GPU space: a GPU of driver, or what the configuration has, or a simulated one.
type chosen struct {
	driver *cuda.Driver // nil: none
	gpu    cuda.DeviceInfo
}

// chooseGPUs decides that for each space, before anything is opened. Those with an ID come first: the others have what
// is left, in order.
func (e *Engine) chooseGPUs() error {
	e.gpus = make([]chosen, len(e.cfg.GPUs))
	var driver *cuda.Driver
	var left []cuda.DeviceInfo
	var missing error
	choose := func(i int, g GPU) error {
		if driver == nil && missing == nil {
			driver, left, missing = loadCUDA(e.cfg.CUDALibrary)
		}
		err := missing
		if err == nil {
			var at int
			if at, err = pick(left, g.ID); err == nil {
				e.gpus[i] = chosen{driver, left[at]}
				left = slices.Delete(left, at, at+1)
				return nil
			}
		}
		space := tier.ID{Kind: tier.GPU, Ordinal: i}
		if g.Backend == CUDA {
			return fmt.Errorf("%s: %w", space, err)
		}
		w := tier.CauseSimulated.Warning("a simulated GPU stands in for a real one: %v", err)
		w.Space = space
		e.warn(w)
		return nil
	}
	for _, named := range []bool{true, false} {
		for i, g := range e.cfg.GPUs {
			if g.Device != nil || g.Open != nil || g.Backend == Sim || (g.ID != "") != named {
				continue
			}
			if err := choose(i, g); err != nil {
				return err
			}
		}
	}
	return nil
}

func loadCUDA(path string) (*cuda.Driver, []cuda.DeviceInfo, error) {
	driver, err := cuda.Load(path)
	if err != nil {
		return nil, nil, err
	}
	found, err := driver.Devices()
	return driver, found, err
}

// pick returns which of the GPUs that are left has an ID; the first, without one.
func pick(left []cuda.DeviceInfo, id string) (int, error) {
	for i, g := range left {
		if id == "" || sameID(id, g.UUID) || strings.EqualFold(id, g.PCI) {
			return i, nil
		}
	}
	if id == "" {
		return 0, fmt.Errorf("the CUDA driver shows no GPU that is not another space's: %w", tier.ErrNotSupported)
	}
	return 0, fmt.Errorf("the CUDA driver shows no GPU %s, or it is another space's: %w", id, tier.ErrNotSupported)
}

// sameID compares UUIDs without what is written before them: NVML calls an instance MIG-… that
// CUDA calls GPU-….
func sameID(a, b string) bool {
	_, x, _ := strings.Cut(a, "-")
	_, y, _ := strings.Cut(b, "-")
	return x != "" && strings.EqualFold(x, y)
}

// simulated says whether the engine makes a simulated GPU for the space.
func (e *Engine) simulated(i int) bool {
	g := e.cfg.GPUs[i]
	return g.Device == nil && g.Open == nil && e.gpus[i].driver == nil
}

// openCUDA opens the GPU of a space.
func (e *Engine) openCUDA(i int, g GPU) (tier.Device, error) {
	c := e.gpus[i]
	dev, err := c.driver.Open(cuda.Config{Ordinal: c.gpu.Ordinal, Node: nodeOr(g.Node, e.nodeOfGPU(c.gpu)), Memory: g.Memory})
	if err != nil {
		return nil, err
	}
	return dev, nil
}

// nodeOfGPU returns the NUMA node that a GPU is on, as far as it is known.
func (e *Engine) nodeOfGPU(gpu cuda.DeviceInfo) int {
	for _, g := range e.topo.GPUs {
		if strings.EqualFold(g.PCIAddress, gpu.PCI) && g.PCIAddress != "" || sameID(g.UUID, gpu.UUID) {
			if g.Node == topology.Unknown {
				return g.MemoryNode
			}
			return g.Node
		}
	}
	return topology.Unknown
}

// pinners lists what wants host memory pinned, one for each GPU: devices of one driver do
// it once for all.
func (e *Engine) pinners() (list []tier.Pinner) {
	for _, d := range e.wrapped {
		if p, ok := tier.PinnerOf(d); ok {
			list = append(list, p)
		}
	}
	return list
}

// pin has the GPUs' drivers pin the memory of a host space. Without that everything works, but slowly, and the memory
// is locked as it is where there is no GPU.
func (e *Engine) pin(id tier.ID, arena *host.Arena, pinners []tier.Pinner) {
	pinned := false
	for _, p := range pinners {
		err := arena.Pin(p)
		if err == nil {
			pinned = true
			continue
		}
		cause := tier.CauseNotPinned
		if errors.Is(err, tier.ErrNotSupported) {
			cause = tier.CauseSystem
		}
		w := cause.Warning("the driver does not pin the %d bytes of host memory: %v: what GPUs copy goes by way of other memory, which is slower", arena.Stats().Capacity, err)
		w.Space = id
		e.warn(w)
	}
	if len(pinners) > 0 && !pinned {
		arena.Lock()
	}
}
