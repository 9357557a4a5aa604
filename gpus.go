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

// ErrShareOfSimulated: a GPU space whose size is a share of a card's memory would be served by a simulated GPU, which has as
// much as it is given.
var ErrShareOfSimulated = errors.New("a simulated GPU has no memory to take a share of")

// chosen is what serves a GPU space: a GPU of driver, or what the configuration has, or a simulated one.
type chosen struct {
	driver *cuda.Driver // nil: none
	gpu    cuda.DeviceInfo
}

// chooseGPUs decides that for each space, before anything is opened.
func (e *Engine) chooseGPUs() error {
	e.gpus = make([]chosen, len(e.cfg.GPUs))
	e.cfg.GPUs = slices.Clone(e.cfg.GPUs) // the program's, in which shares become bytes
	var driver *cuda.Driver
	var found []cuda.DeviceInfo
	var missing error
	for i, g := range e.cfg.GPUs {
		if g.Device != nil || g.Open != nil {
			continue
		}
		if g.Backend == Sim {
			if g.Share != 0 {
				return fmt.Errorf("gpu:%d: %w", i, ErrShareOfSimulated)
			}
			continue
		}
		if driver == nil && missing == nil {
			driver, found, missing = loadCUDA(e.cfg.CUDALibrary)
		}
		err := missing
		var gpu cuda.DeviceInfo
		if err == nil {
			gpu, err = pick(found, i, g.ID)
		}
		switch {
		case err == nil:
			e.gpus[i] = chosen{driver: driver, gpu: gpu}
			if g.Share != 0 {
				e.cfg.GPUs[i].Memory = max(tier.Page, Amount{Share: g.Share}.of(gpu.Memory)/tier.Page*tier.Page)
			}
		case g.Backend == CUDA:
			return fmt.Errorf("gpu:%d: %w", i, err)
		case g.Share != 0:
			return fmt.Errorf("gpu:%d: %w: %w", i, ErrShareOfSimulated, err)
		default:
			w := tier.CauseSimulated.Warning("a simulated GPU stands in for a real one: %v", err)
			w.Space = tier.ID{Kind: tier.GPU, Ordinal: i}
			e.warn(w)
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

// pick returns the GPU with an ID, or the one with a number.
func pick(found []cuda.DeviceInfo, number int, id string) (cuda.DeviceInfo, error) {
	if id == "" && number < len(found) {
		return found[number], nil
	}
	for _, f := range found {
		if id != "" && (sameID(id, f.UUID) || strings.EqualFold(id, f.PCI)) {
			return f, nil
		}
	}
	if id == "" {
		return cuda.DeviceInfo{}, fmt.Errorf("the CUDA driver shows %d GPUs: %w", len(found), tier.ErrNotSupported)
	}
	return cuda.DeviceInfo{}, fmt.Errorf("the CUDA driver shows no GPU %s: %w", id, tier.ErrNotSupported)
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

// pin has the GPUs' drivers pin the memory of a host space. Without that everything works, but slowly.
func (e *Engine) pin(id tier.ID, arena *host.Arena, pinners []tier.Pinner) {
	for _, p := range pinners {
		err := arena.Pin(p)
		if err == nil {
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
}
