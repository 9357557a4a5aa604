//go:build gonvml && cgo && linux && (amd64 || arm64)

package nvml

import (
	"errors"
	"fmt"
	"os/exec"
	"reflect"
	"slices"
	"strings"
	"testing"

	oracle "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/spillway-db/spillway/internal/dynlib"
	"github.com/spillway-db/spillway/internal/nvml/nvmltest"
)

// Structs are as NVIDIA's header has them, field by field.
func TestOracleLayouts(t *testing.T) {
	for _, c := range []struct{ own, other any }{{pciInfo{}, oracle.PciInfo{}}, {Memory{}, oracle.Memory{}}} {
		own, other := reflect.TypeOf(c.own), reflect.TypeOf(c.other)
		if own.Size() != other.Size() || own.NumField() != other.NumField() {
			t.Errorf("%v has %d bytes and %d fields, %v has %d and %d", own, own.Size(), own.NumField(), other, other.Size(), other.NumField())
			continue
		}
		for i := range own.NumField() {
			a, b := own.Field(i), other.Field(i)
			if a.Offset != b.Offset || a.Type.Size() != b.Type.Size() {
				t.Errorf("%v.%s has %d bytes at %d, %v.%s has %d at %d", own, a.Name, a.Type.Size(), a.Offset, other, b.Name, b.Type.Size(), b.Offset)
			}
		}
	}
}

func TestOracleNumbers(t *testing.T) {
	for name, c := range map[string][2]int{
		"success":             {int(success), int(oracle.SUCCESS)},
		"ErrInvalidArgument":  {int(ErrInvalidArgument), int(oracle.ERROR_INVALID_ARGUMENT)},
		"ErrNotSupported":     {int(ErrNotSupported), int(oracle.ERROR_NOT_SUPPORTED)},
		"ErrNotFound":         {int(ErrNotFound), int(oracle.ERROR_NOT_FOUND)},
		"ErrInsufficientSize": {int(ErrInsufficientSize), int(oracle.ERROR_INSUFFICIENT_SIZE)},
		"ErrDriverNotLoaded":  {int(ErrDriverNotLoaded), int(oracle.ERROR_DRIVER_NOT_LOADED)},
		"ErrFunctionNotFound": {int(ErrFunctionNotFound), int(oracle.ERROR_FUNCTION_NOT_FOUND)},
		"ErrTimeout":          {int(ErrTimeout), int(oracle.ERROR_TIMEOUT)},
		"EventXID":            {int(EventXID), oracle.EventTypeXidCriticalError},
		"EventDoubleBitECC":   {int(EventDoubleBitECC), oracle.EventTypeDoubleBitEccError},
		"LinkToGPU":           {int(LinkToGPU), int(oracle.NVLINK_DEVICE_TYPE_GPU)},
		"LinkToProcessor":     {int(LinkToProcessor), int(oracle.NVLINK_DEVICE_TYPE_IBMNPU)},
		"LinkToSwitch":        {int(LinkToSwitch), int(oracle.NVLINK_DEVICE_TYPE_SWITCH)},
		"LinkUnknown":         {int(LinkUnknown), int(oracle.NVLINK_DEVICE_TYPE_UNKNOWN)},
		"MaxLinks":            {MaxLinks, oracle.NVLINK_MAX_LINKS},
		"linkEnabled":         {linkEnabled, int(oracle.FEATURE_ENABLED)},
		"migEnabled":          {migEnabled, oracle.DEVICE_MIG_ENABLE},
		"scopeNode":           {scopeNode, oracle.AFFINITY_SCOPE_NODE},
		"usualText, names":    {usualText, oracle.DEVICE_NAME_V2_BUFFER_SIZE},
		"usualText, UUIDs":    {usualText, oracle.DEVICE_UUID_V2_BUFFER_SIZE},
	} {
		if c[0] != c[1] {
			t.Errorf("%s is %d, want %d", name, c[0], c[1])
		}
	}
}

// The library of the other tests has NVIDIA's functions, types and constants: the compiler says so.
func TestOracleHeader(t *testing.T) {
	dir, err := exec.Command("go", "list", "-f", "{{.Dir}}", "github.com/NVIDIA/go-nvml/pkg/nvml").Output()
	if err != nil {
		t.Fatal(err)
	}
	header := fmt.Sprintf("-DNVIDIA_HEADER=%q", strings.TrimSpace(string(dir))+"/nvml.h")
	if _, err := nvmltest.Source.Compile("-Werror", header); err != nil {
		t.Error(err)
	}
}

// go-nvml gets the same answers from a library: the machine's, or else that of the other tests.
func TestOracleAnswers(t *testing.T) {
	path := DefaultPath
	own, err := Open(path)
	if err != nil {
		path = nvmltest.New(t).Path
		own, err = Open(path)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	other := oracle.New(oracle.WithLibraryPath(path)) // never shut down: what was bound lazily stays bound
	if ret := other.Init(); ret != oracle.SUCCESS {
		t.Fatal(ret)
	}
	n, err := own.Count()
	count, ret := other.DeviceGetCount()
	agree(t, "count", n, err, count, ret)
	for i := range n {
		a, err := own.Device(i)
		b, ret := other.DeviceGetHandleByIndex(i)
		if err != nil || ret != oracle.SUCCESS {
			agree(t, fmt.Sprintf("GPU %d", i), 0, err, 0, ret)
			continue
		}
		compare(t, fmt.Sprintf("GPU %d", i), own, a, b)
		places, _ := own.MaxInstances(a)
		for k := range places {
			part, err := own.Instance(a, k)
			instance, ret := b.GetMigDeviceHandleByIndex(k)
			name := fmt.Sprintf("GPU %d, instance %d", i, k)
			agree(t, name, err == nil, err, ret == oracle.SUCCESS, ret)
			if err == nil && ret == oracle.SUCCESS {
				compare(t, name, own, part, instance)
			}
		}
	}
}

// agree compares an answer: what is told, and how the call failed if it did.
func agree[T any](t *testing.T, what string, own T, err error, other T, ret oracle.Return) {
	t.Helper()
	code := success
	var failed *Error
	if errors.As(err, &failed) {
		code = failed.Code
	}
	if int(code) != int(ret) || ret == oracle.SUCCESS && !reflect.DeepEqual(own, other) {
		t.Errorf("%s: %v, %v; go-nvml is told %v, %v", what, own, err, other, ret)
	}
}

func compare(t *testing.T, who string, l *Library, a Device, b oracle.Device) {
	name, err := l.Name(a)
	nameB, ret := b.GetName()
	agree(t, who+": name", name, err, nameB, ret)
	uuid, err := l.UUID(a)
	uuidB, ret := b.GetUUID()
	agree(t, who+": UUID", uuid, err, uuidB, ret)
	pci, err := l.PCI(a)
	pciB, ret := b.GetPciInfo()
	agree(t, who+": PCI", pci, err, toldBy(pciB), ret)
	memory, err := l.Memory(a)
	memoryB, ret := b.GetMemoryInfo()
	// What is free changes by and by.
	agree(t, who+": memory", memory.Total, err, memoryB.Total, ret)
	near := func(x, y uint64) bool { return max(x, y)-min(x, y) < 1<<30 }
	if ret == oracle.SUCCESS && !(near(memory.Free, memoryB.Free) && near(memory.Used, memoryB.Used)) {
		t.Errorf("%s: %+v, go-nvml is told %+v", who, memory, memoryB)
	}
	nodes, err := l.NodeAffinity(a)
	nodesB, ret := b.GetMemoryAffinity(len(nodes)*8, oracle.AFFINITY_SCOPE_NODE) // it takes a word for 8 of them
	agree(t, who+": nodes", nodes, err, words(nodesB), ret)
	cpus, err := l.CPUAffinity(a)
	cpusB, ret := b.GetCpuAffinity(len(cpus) * 8)
	agree(t, who+": CPUs", cpus, err, words(cpusB), ret)
	mig, err := l.MIG(a)
	migB, _, ret := b.GetMigMode()
	agree(t, who+": MIG", mig, err, migB == oracle.DEVICE_MIG_ENABLE, ret)
	for what, c := range map[string]struct {
		own   func(Device) (int, error)
		other func() (int, oracle.Return)
	}{
		"generation":       {l.PCIeGeneration, b.GetMaxPcieLinkGeneration},
		"width":            {l.PCIeWidth, b.GetCurrPcieLinkWidth},
		"node":             {l.Node, b.GetNumaNodeId},
		"minor":            {l.Minor, b.GetMinorNumber},
		"instances":        {l.MaxInstances, b.GetMaxMigDeviceCount},
		"GPU instance":     {l.GPUInstance, b.GetGpuInstanceId},
		"compute instance": {l.ComputeInstance, b.GetComputeInstanceId},
	} {
		n, err := c.own(a)
		other, ret := c.other()
		agree(t, who+": "+what, n, err, other, ret)
	}
	for k := range MaxLinks + 1 {
		link := fmt.Sprintf("%s, link %d", who, k)
		up, err := l.LinkUp(a, k)
		state, ret := b.GetNvLinkState(k)
		agree(t, link, up, err, state == oracle.FEATURE_ENABLED, ret)
		remote, err := l.LinkRemote(a, k)
		info, ret := b.GetNvLinkRemotePciInfo(k)
		agree(t, link+": remote", remote, err, toldBy(info), ret)
		kind, err := l.LinkKind(a, k)
		kindB, ret := b.GetNvLinkRemoteDeviceType(k)
		agree(t, link+": kind", kind, err, LinkKind(kindB), ret)
	}
}

func toldBy(p oracle.PciInfo) PCI {
	var address []byte
	for _, c := range p.BusId {
		address = append(address, byte(c))
	}
	return PCI{Address: dynlib.Text(address), Domain: p.Domain, Bus: p.Bus, Device: p.Device, DeviceID: p.PciDeviceId}
}

func words(of []uint) (w []uint64) {
	for _, x := range of {
		w = append(w, uint64(x))
	}
	return slices.Clip(w)
}
