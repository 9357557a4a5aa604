//go:build cgo && linux && !nonvml

package topology

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/spillway-db/spillway/internal/gpuid"
)

// NVMLLibrary is what is asked of NVIDIA's library: a part of nvml.Interface of
// github.com/NVIDIA/go-nvml, which its mocks have too.
type NVMLLibrary interface {
	Init() nvml.Return
	Shutdown() nvml.Return
	Extensions() nvml.ExtendedInterface
	DeviceGetCount() (int, nvml.Return)
	DeviceGetHandleByIndex(index int) (nvml.Device, nvml.Return)
}

// NVML returns the source that asks lib, which it initializes and shuts down at each
// call. It may be used by several goroutines at a time if lib may.
func NVML(lib NVMLLibrary) GPUSource { return nvmlSource{lib} }

// SystemGPUs returns the source that asks NVIDIA's library (NVML), which is looked for
// when it is asked: there is an error if the driver is not installed.
func SystemGPUs() GPUSource { return nvmlSource{systemNVML{}} }

// systemNVML is go-nvml's own library object. Others that nvml.New makes would each
// write the package's variables under a lock of their own.
type systemNVML struct{}

func (systemNVML) Init() nvml.Return                  { return nvml.Init() }
func (systemNVML) Shutdown() nvml.Return              { return nvml.Shutdown() }
func (systemNVML) Extensions() nvml.ExtendedInterface { return nvml.Extensions() }
func (systemNVML) DeviceGetCount() (int, nvml.Return) { return nvml.DeviceGetCount() }
func (systemNVML) DeviceGetHandleByIndex(i int) (nvml.Device, nvml.Return) {
	return nvml.DeviceGetHandleByIndex(i)
}

// maxGPUs bounds what a library that lies can make us ask; the driver's own limit
// is 64.
const maxGPUs = 256

type nvmlSource struct{ lib NVMLLibrary }

// GPUs lists the GPUs of the library.
func (s nvmlSource) GPUs(ctx context.Context) (gpus []GPU, err error) {
	switch ret := s.lib.Init(); ret {
	case nvml.SUCCESS:
	case nvml.ERROR_LIBRARY_NOT_FOUND:
		return nil, errors.New("NVIDIA's library libnvidia-ml.so.1 is not there (it comes with the driver): names, memory, MIG instances and NVLinks of the GPUs are not known")
	case nvml.ERROR_DRIVER_NOT_LOADED:
		return nil, errors.New("NVIDIA's library is there, but its kernel driver is not loaded (modprobe nvidia; in a container, run it with the GPUs)")
	default:
		return nil, fmt.Errorf("NVIDIA's library cannot be initialized: %w", ret)
	}
	defer s.lib.Shutdown()

	count, ret := s.lib.DeviceGetCount()
	if ret != nvml.SUCCESS || count < 0 || count > maxGPUs {
		return nil, fmt.Errorf("NVIDIA's library does not say how many GPUs there are: %d, %w", count, ret)
	}
	r := nvmlReader{lib: s.lib, has: map[string]bool{}}
	gpus = make([]GPU, 0, count)
	for i := range count {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		dev, ret := s.lib.DeviceGetHandleByIndex(i)
		if ret != nvml.SUCCESS || dev == nil {
			r.problems = append(r.problems, fmt.Errorf("GPU %d %w: %w", i, errNotListed, ret))
			continue
		}
		gpus = append(gpus, r.gpu(i, dev))
	}
	if len(gpus) == 0 && len(r.problems) == 0 {
		return gpus, nil
	}
	return gpus, errors.Join(r.problems...)
}

// nvmlReader reads GPUs and collects what cannot be read.
type nvmlReader struct {
	lib      NVMLLibrary
	has      map[string]bool
	problems []error
}

// try calls one function of the library for GPU i, if the library has it: one that a
// driver is too old for would end the process. That the GPU does not have the thing is no
// problem.
func (r *nvmlReader) try(i int, symbol string, call func() nvml.Return) (ok bool) {
	there, known := r.has[symbol]
	if !known {
		there = r.lib.Extensions().LookupSymbol(symbol) == nil
		r.has[symbol] = there
	}
	if !there {
		return false
	}
	defer func() {
		if p := recover(); p != nil {
			r.problems = append(r.problems, fmt.Errorf("GPU %d: %s panicked: %v", i, symbol, p))
			ok = false
		}
	}()
	switch ret := call(); ret {
	case nvml.SUCCESS:
		return true
	case nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_NOT_FOUND, nvml.ERROR_INVALID_ARGUMENT, nvml.ERROR_FUNCTION_NOT_FOUND:
		return false
	default:
		r.problems = append(r.problems, fmt.Errorf("GPU %d: %s: %w", i, symbol, ret))
		return false
	}
}

func (r *nvmlReader) gpu(i int, dev nvml.Device) GPU {
	g := GPU{Index: i}
	r.try(i, "nvmlDeviceGetName", func() (ret nvml.Return) { g.Name, ret = dev.GetName(); return ret })
	r.try(i, "nvmlDeviceGetUUID", func() (ret nvml.Return) { g.UUID, ret = dev.GetUUID(); return ret })
	var info nvml.PciInfo
	// go-nvml takes the newest version that the library has.
	if r.try(i, "nvmlDeviceGetPciInfo", func() (ret nvml.Return) { info, ret = dev.GetPciInfo(); return ret }) {
		g.PCIAddress = addressOf(info)
		if id := info.PciDeviceId; id != 0 {
			g.DeviceID = fmt.Sprintf("%04x:%04x", id&0xffff, id>>16)
		}
	}
	var memory nvml.Memory
	if r.try(i, "nvmlDeviceGetMemoryInfo", func() (ret nvml.Return) { memory, ret = dev.GetMemoryInfo(); return ret }) {
		g.MemoryBytes, g.FreeBytes = bytesFrom(memory.Total), bytesFrom(memory.Free)
	}
	r.try(i, "nvmlDeviceGetMaxPcieLinkGeneration", func() (ret nvml.Return) { g.PCIeGeneration, ret = dev.GetMaxPcieLinkGeneration(); return ret })
	r.try(i, "nvmlDeviceGetCurrPcieLinkWidth", func() (ret nvml.Return) { g.PCIeWidth, ret = dev.GetCurrPcieLinkWidth(); return ret })
	var own int
	if r.try(i, "nvmlDeviceGetNumaNodeId", func() (ret nvml.Return) { own, ret = dev.GetNumaNodeId(); return ret }) {
		g.OwnNodes = Set{own}
	}
	r.affinity(i, dev, &g)
	r.links(i, dev, &g)
	r.instances(i, dev, &g)
	return g
}

// How many nodes and CPUs the driver is asked about: as many as Linux can have.
const (
	askedNodes = 1024
	askedCPUs  = 8192
)

// affinity asks for the nodes and CPUs that are the nearest.
func (r *nvmlReader) affinity(i int, dev nvml.Device, g *GPU) {
	var words []uint
	if r.try(i, "nvmlDeviceGetMemoryAffinity", func() (ret nvml.Return) {
		words, ret = dev.GetMemoryAffinity(askedNodes, nvml.AFFINITY_SCOPE_NODE)
		return ret
	}) {
		g.NodeAffinity = setOf(words)
	}
	if r.try(i, "nvmlDeviceGetCpuAffinity", func() (ret nvml.Return) { words, ret = dev.GetCpuAffinity(askedCPUs); return ret }) {
		g.CPUAffinity = setOf(words)
	}
}

// setOf returns the bits that are set, of words as C has them.
func setOf(words []uint) Set {
	set := Set{}
	for i, w := range words {
		for ; w != 0; w &= w - 1 {
			set = append(set, i*bits.UintSize+bits.TrailingZeros(w))
		}
	}
	return set
}

// unknownKind is NVML_NVLINK_DEVICE_TYPE_UNKNOWN.
const unknownKind = nvml.IntNvLinkDeviceType(nvml.NVLINK_DEVICE_TYPE_UNKNOWN)

// links adds up the NVLinks that are up, by what is at their other end.
func (r *nvmlReader) links(i int, dev nvml.Device, g *GPU) {
	for link := range nvml.NVLINK_MAX_LINKS {
		var state nvml.EnableState
		if !r.try(i, "nvmlDeviceGetNvLinkState", func() (ret nvml.Return) { state, ret = dev.GetNvLinkState(link); return ret }) || state != nvml.FEATURE_ENABLED {
			continue // one that fails does not hide those behind it
		}
		l := Link{Count: 1}
		var remote nvml.PciInfo
		if r.try(i, "nvmlDeviceGetNvLinkRemotePciInfo_v2", func() (ret nvml.Return) { remote, ret = dev.GetNvLinkRemotePciInfo(link); return ret }) {
			l.Remote = addressOf(remote)
		}
		var kind nvml.IntNvLinkDeviceType
		if !r.try(i, "nvmlDeviceGetNvLinkRemoteDeviceType", func() (ret nvml.Return) { kind, ret = dev.GetNvLinkRemoteDeviceType(link); return ret }) {
			kind = unknownKind
		}
		if kind == nvml.NVLINK_DEVICE_TYPE_IBMNPU {
			continue // to a processor
		}
		// A virtual machine is not shown the switches. NCCL takes what is linked and not to be seen for one, too.
		l.Switch = kind == nvml.NVLINK_DEVICE_TYPE_SWITCH || kind == unknownKind && l.Remote == ""
		g.Links = addLink(g.Links, l)
	}
}

func addLink(links []Link, l Link) []Link {
	for i := range links {
		if links[i].Remote == l.Remote && links[i].Switch == l.Switch {
			links[i].Count++
			return links
		}
	}
	return append(links, l)
}

// instances lists the MIG instances.
func (r *nvmlReader) instances(i int, dev nvml.Device, g *GPU) {
	var mode, most int
	if !r.try(i, "nvmlDeviceGetMigMode", func() (ret nvml.Return) { mode, _, ret = dev.GetMigMode(); return ret }) || mode != nvml.DEVICE_MIG_ENABLE {
		return
	}
	g.MIGEnabled = true
	if !r.try(i, "nvmlDeviceGetMaxMigDeviceCount", func() (ret nvml.Return) { most, ret = dev.GetMaxMigDeviceCount(); return ret }) {
		return
	}
	for k := range min(most, maxGPUs) {
		var part nvml.Device
		if !r.try(i, "nvmlDeviceGetMigDeviceHandleByIndex", func() (ret nvml.Return) { part, ret = dev.GetMigDeviceHandleByIndex(k); return ret }) || part == nil {
			continue // places that no instance is in
		}
		m := MIGInstance{}
		r.try(i, "nvmlDeviceGetUUID", func() (ret nvml.Return) { m.UUID, ret = part.GetUUID(); return ret })
		r.try(i, "nvmlDeviceGetName", func() (ret nvml.Return) { m.Name, ret = part.GetName(); return ret })
		r.try(i, "nvmlDeviceGetGpuInstanceId", func() (ret nvml.Return) { m.GPUInstance, ret = part.GetGpuInstanceId(); return ret })
		r.try(i, "nvmlDeviceGetComputeInstanceId", func() (ret nvml.Return) { m.ComputeInstance, ret = part.GetComputeInstanceId(); return ret })
		var memory nvml.Memory
		if r.try(i, "nvmlDeviceGetMemoryInfo", func() (ret nvml.Return) { memory, ret = part.GetMemoryInfo(); return ret }) {
			m.MemoryBytes, m.FreeBytes = bytesFrom(memory.Total), bytesFrom(memory.Free)
		}
		g.MIG = append(g.MIG, m)
	}
}

// addressOf returns the PCI address of a device; empty if it is not told, or of one that is not to be seen.
func addressOf(info nvml.PciInfo) string {
	if info.Domain == math.MaxUint32 {
		return ""
	}
	var b strings.Builder
	for _, c := range info.BusId {
		if c == 0 {
			break
		}
		b.WriteByte(byte(c))
	}
	if s := gpuid.Address(b.String()); s != "" || info.Domain == 0 && info.Bus == 0 && info.Device == 0 {
		return s
	}
	return gpuid.Address(fmt.Sprintf("%08x:%02x:%02x.0", info.Domain, info.Bus, info.Device))
}

func bytesFrom(n uint64) int64 { return int64(min(n, math.MaxInt64)) }
