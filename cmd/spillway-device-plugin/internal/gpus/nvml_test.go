package gpus

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxa100"
)

// fake is go-nvml's mock of a machine with eight GPUs, with what the plugin needs besides: NUMA nodes,
// MIG instances, events, and functions that fail. GPU i has the minor number 30+i and is near node i%2.
type fake struct {
	*dgxa100.Server
	devices []*dgxa100.Device

	events  chan nvml.EventData
	waiting chan struct{} // closed when something waits for events for the first time
	waits   sync.Once

	mu          sync.Mutex
	count       int
	ret         map[string]nvml.Return // by function: what it fails with
	missing     map[string]bool        // functions that the library does not have
	initialized int
	sets        int               // of events, that are not freed
	registered  map[string]uint64 // kinds of events, by UUID
}

func newFake(count int) *fake {
	f := &fake{
		Server: dgxa100.New(), count: count, events: make(chan nvml.EventData), waiting: make(chan struct{}),
		ret: map[string]nvml.Return{}, missing: map[string]bool{}, registered: map[string]uint64{},
	}
	f.LookupSymbolFunc = func(name string) error {
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.missing[name] {
			return errors.New("no symbol")
		}
		return nil
	}
	f.InitFunc = func() nvml.Return { return f.counted("Init", &f.initialized, 1) }
	f.ShutdownFunc = func() nvml.Return { return f.counted("Shutdown", &f.initialized, -1) }
	f.DeviceGetCountFunc = func() (int, nvml.Return) {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.count, f.ret["Count"]
	}
	f.EventSetCreateFunc = func() (nvml.EventSet, nvml.Return) {
		return &mock.EventSet{WaitFunc: f.wait, FreeFunc: func() nvml.Return { return f.counted("", &f.sets, -1) }},
			f.counted("EventSetCreate", &f.sets, 1)
	}
	for i, d := range f.Devices {
		d := d.(*dgxa100.Device)
		d.Minor = 30 + i
		f.extend(&d.Device, d.UUID, i)
		f.devices = append(f.devices, d)
	}
	return f
}

// fail makes all calls of a function fail with ret, until that is SUCCESS.
func (f *fake) fail(function string, ret nvml.Return) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ret[function] = ret
}

func (f *fake) result(function string) nvml.Return {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.ret[function]
}

// counted adds by to n, unless the function fails.
func (f *fake) counted(function string, n *int, by int) nvml.Return {
	f.mu.Lock()
	defer f.mu.Unlock()
	if ret := f.ret[function]; ret != nvml.SUCCESS {
		return ret
	}
	*n += by
	return nvml.SUCCESS
}

// extend adds functions that a GPU and a MIG instance of one have in common.
func (f *fake) extend(d *mock.Device, uuid string, gpu int) {
	memory := d.GetMemoryInfoFunc
	d.GetMemoryInfoFunc = func() (nvml.Memory, nvml.Return) {
		m, _ := memory()
		return m, f.result("Memory")
	}
	d.GetMemoryAffinityFunc = func(int, nvml.AffinityScope) ([]uint, nvml.Return) {
		return []uint{1 << (gpu % 2)}, nvml.SUCCESS
	}
	d.GetSupportedEventTypesFunc = func() (uint64, nvml.Return) {
		return 0x1f, f.result("SupportedEventTypes")
	}
	d.RegisterEventsFunc = func(kinds uint64, _ nvml.EventSet) nvml.Return {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.registered[uuid] |= kinds
		return nvml.SUCCESS
	}
}

// divide makes two MIG instances of a GPU, in places 0 and 2 of 7: 1 and 3 GiB, GPU instances 11 and 13.
func (f *fake) divide(gpu int) {
	d := f.devices[gpu]
	d.MigMode = nvml.DEVICE_MIG_ENABLE
	d.GetMaxMigDeviceCountFunc = func() (int, nvml.Return) { return 7, nvml.SUCCESS }
	d.GetMigDeviceHandleByIndexFunc = func(k int) (nvml.Device, nvml.Return) {
		if k != 0 && k != 2 {
			return nil, nvml.ERROR_NOT_FOUND
		}
		uuid := fmt.Sprintf("MIG-e0e1e2e3-e4e5-e6e7-e8e9-eaebeceded%02d", k)
		part := &mock.Device{
			GetUUIDFunc: func() (string, nvml.Return) { return uuid, nvml.SUCCESS },
			GetNameFunc: func() (string, nvml.Return) { return "MIG", nvml.SUCCESS },
			GetMemoryInfoFunc: func() (nvml.Memory, nvml.Return) {
				return nvml.Memory{Total: uint64(k+1) << 30}, nvml.SUCCESS
			},
			GetGpuInstanceIdFunc:     func() (int, nvml.Return) { return 11 + k, nvml.SUCCESS },
			GetComputeInstanceIdFunc: func() (int, nvml.Return) { return 21 + k, nvml.SUCCESS },
		}
		f.extend(part, uuid, gpu)
		return part, nvml.SUCCESS
	}
}

func (f *fake) wait(ms uint32) (nvml.EventData, nvml.Return) {
	f.waits.Do(func() { close(f.waiting) })
	if ret := f.result("Wait"); ret != nvml.SUCCESS {
		return nvml.EventData{}, ret
	}
	select {
	case e := <-f.events:
		return e, nvml.SUCCESS
	case <-time.After(time.Duration(ms) * time.Millisecond):
		return nvml.EventData{}, nvml.ERROR_TIMEOUT
	}
}

// happen makes something happen to a GPU, in the given GPU instance.
func (f *fake) happen(gpu int, instance uint32, kind, data uint64) {
	f.events <- nvml.EventData{Device: f.devices[gpu], EventType: kind, EventData: data, GpuInstanceId: instance}
}

// open opens a driver with the GPUs of a fake.
func open(t *testing.T, f *fake) (*Driver, *Inventory) {
	t.Helper()
	d, err := Open(f, Options{Reserve: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		d.Close()
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.initialized != 0 || f.sets != 0 {
			t.Errorf("the library is left initialized %d times, with %d sets of events", f.initialized, f.sets)
		}
	})
	list, err := d.List()
	if err != nil {
		t.Fatal(err)
	}
	return d, NewInventory(list)
}

// watch runs Watch until the test ends or stop is called, which returns its error. It returns when Watch
// waits for events.
func watch(t *testing.T, f *fake, d *Driver, v *Inventory) (stop func() error, log *logged) {
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	log = &logged{}
	go func() { ended <- d.Watch(ctx, v, slog.New(slog.NewTextHandler(log, nil))) }()
	stop = sync.OnceValue(func() error { cancel(); return <-ended })
	t.Cleanup(func() { _ = stop() })
	<-f.waiting
	return stop, log
}

type logged struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// sick returns when a GPU is sick.
func sick(v *Inventory, uuid string) {
	for {
		changed := v.Changed()
		if v.Sick(uuid) != "" {
			return
		}
		<-changed
	}
}

func TestList(t *testing.T) {
	f := newFake(2)
	f.divide(0)
	_, v := open(t, f)
	list := v.GPUs()
	if len(list) != 3 {
		t.Fatalf("%+v", list)
	}
	gpu := GPU{UUID: f.devices[1].UUID, Name: f.devices[1].Name, Index: 1, Memory: 40<<30 - 1<<20, Minor: 31, Node: 1}
	part := GPU{
		UUID: "MIG-e0e1e2e3-e4e5-e6e7-e8e9-eaebeceded02", Name: f.devices[0].Name, Memory: 3<<30 - 1<<20, Minor: 30,
		Parent: f.devices[0].UUID, GPUInstance: 13, ComputeInstance: 23,
	}
	if list[1] != part || list[2] != gpu {
		t.Errorf("%+v\nwant %+v and %+v", list, part, gpu)
	}
}

// A GPU counts as having no more memory than Physical, after the reserve.
func TestPhysical(t *testing.T) {
	for physical, want := range map[int64]int64{0: 39 << 30, 8 << 30: 8 << 30, 39 << 30: 39 << 30, 40 << 30: 39 << 30} {
		d, err := Open(newFake(1), Options{Reserve: 1 << 30, Physical: physical})
		if err != nil {
			t.Fatal(err)
		}
		if list, err := d.List(); err != nil || list[0].Memory != want {
			t.Errorf("%d: %+v, %v; want %d bytes", physical, list, err, want)
		}
		d.Close()
	}
}

// A driver that is older than MIG has GPUs all the same: its functions are not called.
func TestListWithoutMIG(t *testing.T) {
	f := newFake(2)
	f.missing["nvmlDeviceGetMigMode"], f.missing["nvmlDeviceGetMemoryAffinity"] = true, true
	f.devices[0].GetMigModeFunc, f.devices[0].GetMemoryAffinityFunc = nil, nil
	_, v := open(t, f)
	if list := v.GPUs(); len(list) != 2 || list[0].Node != -1 {
		t.Errorf("%+v", list)
	}
}

// TestListFails: if a query fails, the error of List names the query, the GPU and the cause.
func TestListFails(t *testing.T) {
	f := newFake(2)
	d, _ := open(t, f)
	f.fail("Memory", nvml.ERROR_GPU_IS_LOST)
	_, err := d.List()
	if !errors.Is(err, nvml.ERROR_GPU_IS_LOST) || !strings.Contains(err.Error(), "GPU 0: nvmlDeviceGetMemoryInfo: ERROR_GPU_IS_LOST") {
		t.Error(err)
	}
}

// One of eight GPUs fails while the plugin runs.
func TestOneOfEightFails(t *testing.T) {
	f := newFake(8)
	d, v := open(t, f)
	list := v.GPUs()
	if len(list) != 8 {
		t.Fatalf("%+v", list)
	}
	stop, log := watch(t, f, d, v)
	for _, g := range list {
		if kinds := f.registered[g.UUID]; kinds != nvml.EventTypeXidCriticalError|nvml.EventTypeDoubleBitEccError {
			t.Errorf("%s: the events %#x are registered", g.UUID, kinds)
		}
	}
	for _, xid := range applications {
		f.happen(2, noInstance, nvml.EventTypeXidCriticalError, xid)
	}
	f.happen(3, noInstance, nvml.EventTypeXidCriticalError, 79)
	sick(v, list[3].UUID)
	f.happen(5, noInstance, nvml.EventTypeDoubleBitEccError, 0)
	sick(v, list[5].UUID)
	for i, g := range list {
		if why := v.Sick(g.UUID); (why != "") != (i == 3 || i == 5) {
			t.Errorf("GPU %d: %q", i, why)
		}
	}
	if why := v.Sick(list[3].UUID); why != "its driver reports XID 79" {
		t.Error(why)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
	if n := strings.Count(log.String(), "a program failed"); n != len(applications) {
		t.Errorf("%d of %d faults of programs are logged", n, len(applications))
	}
	// It still answers, and stays sick.
	if err := d.poll(v, slog.New(slog.DiscardHandler)); err != nil || v.Sick(list[3].UUID) == "" {
		t.Errorf("a broken GPU is healthy again: %v", err)
	}
}

// What happens in one MIG instance concerns no other, and what happens to the GPU concerns all.
func TestInstanceFails(t *testing.T) {
	f := newFake(2)
	f.divide(0)
	d, v := open(t, f)
	list := v.GPUs()
	stop, _ := watch(t, f, d, v)
	f.happen(0, 13, nvml.EventTypeXidCriticalError, 94)
	sick(v, list[1].UUID)
	if v.Sick(list[0].UUID) != "" || v.Sick(list[2].UUID) != "" {
		t.Error("others are sick")
	}
	f.happen(0, noInstance, nvml.EventTypeXidCriticalError, 79)
	sick(v, list[0].UUID)
	if v.Sick(list[2].UUID) != "" {
		t.Error("another GPU is sick")
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}

// The driver goes away, and comes back as it was, with other GPUs, or in another version.
func TestDriverIsLost(t *testing.T) {
	for name, c := range map[string]struct {
		back func(*fake)
		want error
	}{
		"as it was":       {func(*fake) {}, nil},
		"one GPU less":    {func(f *fake) { f.count = 7 }, ErrOtherGPUs},
		"another version": {func(f *fake) { f.ret["Init"] = nvml.ERROR_LIB_RM_VERSION_MISMATCH }, ErrOtherDriver},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake(8)
			d, v := open(t, f)
			log := slog.New(slog.DiscardHandler)
			all := func(sick bool) {
				t.Helper()
				for _, g := range v.GPUs() {
					if why := v.Sick(g.UUID); (why != "") != sick {
						t.Errorf("%s: %q", g.UUID, why)
					}
				}
			}
			f.fail("Memory", nvml.ERROR_GPU_IS_LOST)
			f.fail("Init", nvml.ERROR_DRIVER_NOT_LOADED)
			for range 3 {
				if err := d.poll(v, log); err != nil {
					t.Error(err)
				}
				all(true)
			}
			if f.initialized != 0 {
				t.Error("a library whose driver is gone is kept")
			}
			f.fail("Init", nvml.SUCCESS)
			if err := d.poll(v, log); err != nil { // it starts, and no GPU answers
				t.Error(err)
			}
			all(true)
			f.fail("Memory", nvml.SUCCESS)
			c.back(f)
			if err := d.poll(v, log); !errors.Is(err, c.want) {
				t.Errorf("%v, want %v", err, c.want)
			}
			all(c.want != nil)
		})
	}
}

// A GPU that reports no events is polled all the same, and the log has it.
func TestNoEvents(t *testing.T) {
	f := newFake(2)
	d, v := open(t, f)
	f.fail("SupportedEventTypes", nvml.ERROR_NOT_SUPPORTED)
	stop, log := watch(t, f, d, v)
	if err := stop(); err != nil {
		t.Error(err)
	}
	if n := strings.Count(log.String(), "reports no faults"); n != 2 {
		t.Errorf("%d lines for 2 GPUs: %s", n, log)
	}
}

// When waiting for events fails, the GPUs are polled: those that fell off the bus are sick.
func TestEventsFail(t *testing.T) {
	f := newFake(2)
	d, v := open(t, f)
	stop, _ := watch(t, f, d, v)
	f.fail("Memory", nvml.ERROR_GPU_IS_LOST)
	f.fail("Init", nvml.ERROR_DRIVER_NOT_LOADED)
	f.fail("Wait", nvml.ERROR_GPU_IS_LOST)
	for _, g := range v.GPUs() {
		sick(v, g.UUID)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}

func TestOpenFails(t *testing.T) {
	_, err := Open(Library(filepath.Join(t.TempDir(), "no.so")), Options{})
	if err == nil || !strings.Contains(err.Error(), "--sim 1x16Gi") || strings.Contains(err.Error(), "\n") {
		t.Errorf("no library: %v", err)
	}
	f := newFake(2)
	f.fail("Init", nvml.ERROR_DRIVER_NOT_LOADED)
	if _, err := Open(f, Options{}); err == nil || !strings.Contains(err.Error(), "driver is not loaded") {
		t.Errorf("no driver: %v", err)
	}
	f.fail("Init", nvml.SUCCESS)
	d, err := Open(f, Options{Reserve: 1 << 50})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if _, err := d.List(); err == nil || !strings.Contains(err.Error(), "--reserve leaves nothing") {
		t.Errorf("all is held back: %v", err)
	}
}
