package gpus

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spillway-db/spillway/internal/nvml"
	"github.com/spillway-db/spillway/internal/nvml/nvmltest"
)

// driver has GPUs of a made-up library; divided: the first is, into two MIG instances.
func driver(t *testing.T, gpus int64, divided bool) (*nvmltest.Fake, *Driver, *Inventory) {
	t.Helper()
	fake := nvmltest.New(t)
	fake.Set("gpus", gpus)
	if !divided {
		fake.Set("divided", 0)
	}
	d, err := OpenNVML(fake.Path, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		d.Close()
		if n := fake.Initialized(); n != 0 {
			t.Errorf("the library is left initialized %d times", n)
		}
	})
	list, err := d.List()
	if err != nil {
		t.Fatal(err)
	}
	return fake, d, NewInventory(list)
}

// watch runs Watch until the test ends or stop is called, which returns its error.
func watch(t *testing.T, d *Driver, v *Inventory) (stop func() error, log *logged) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	log = &logged{}
	go func() { ended <- d.Watch(ctx, v, slog.New(slog.NewTextHandler(log, nil))) }()
	stop = sync.OnceValue(func() error { cancel(); return <-ended })
	t.Cleanup(func() { _ = stop() })
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

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal(what)
		}
	}
}

func TestList(t *testing.T) {
	_, _, v := driver(t, 2, true)
	list := v.GPUs()
	if len(list) != 3 {
		t.Fatalf("%+v", list)
	}
	for i, g := range list {
		divided := i < 2
		if strings.HasPrefix(g.UUID, "MIG-") != divided || (g.Parent != "") != divided || (g.GPUInstance != 0) != divided || (g.ComputeInstance != 0) != divided || g.Minor != 30+g.Index {
			t.Errorf("%+v", g)
		}
	}
	if g := list[2]; g.Memory != 32<<30-1<<20 || g.Node != 1 || g.Index != 1 || g.Name != "Spillway NVML fake 1" {
		t.Errorf("%+v", g)
	}
}

// A driver that is older than MIG has GPUs all the same.
func TestListWithoutMIG(t *testing.T) {
	d, err := OpenNVML(nvmltest.New(t, "nvmlDeviceGetMigMode").Path, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if list, err := d.List(); err != nil || len(list) != 2 {
		t.Errorf("%+v, %v", list, err)
	}
}

// One of eight GPUs fails while the plugin runs.
func TestOneOfEightFails(t *testing.T) {
	fake, d, v := driver(t, 8, false)
	list := v.GPUs()
	if len(list) != 8 {
		t.Fatalf("%+v", list)
	}
	stop, log := watch(t, d, v)
	eventually(t, "nothing waits for events", func() bool { return fake.Calls("nvmlEventSetWait_v2") > 0 })
	for _, xid := range applications {
		fake.Event(2, -1, nvml.EventXID, xid)
	}
	changed := v.Changed()
	if n := fake.Event(3, -1, nvml.EventXID, 79); n != 1 {
		t.Errorf("%d wait for events of the GPU", n)
	}
	select {
	case <-changed:
	case <-time.After(30 * time.Second):
		t.Fatal("no event arrives")
	}
	fake.Event(5, -1, nvml.EventDoubleBitECC, 0)
	eventually(t, "an error in memory counts for nothing", func() bool { return v.Sick(list[5].UUID) != "" })
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
	fake, d, v := driver(t, 2, true)
	list := v.GPUs()
	stop, _ := watch(t, d, v)
	eventually(t, "nothing waits for events", func() bool { return fake.Calls("nvmlEventSetWait_v2") > 0 })
	fake.Event(0, 2, nvml.EventXID, 94)
	eventually(t, "the instance is healthy", func() bool { return v.Sick(list[1].UUID) != "" })
	if v.Sick(list[0].UUID) != "" || v.Sick(list[2].UUID) != "" {
		t.Error("others are sick")
	}
	fake.Event(0, -1, nvml.EventXID, 79)
	eventually(t, "an instance of a broken GPU is healthy", func() bool { return v.Sick(list[0].UUID) != "" })
	if v.Sick(list[2].UUID) != "" {
		t.Error("another GPU is sick")
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}

// The driver goes away, and comes back with the same GPUs, or with others.
func TestDriverIsLost(t *testing.T) {
	fake, d, v := driver(t, 8, false)
	log := slog.New(slog.DiscardHandler)
	all := func(sick bool) {
		t.Helper()
		for _, g := range v.GPUs() {
			if why := v.Sick(g.UUID); (why != "") != sick {
				t.Errorf("%s: %q", g.UUID, why)
			}
		}
	}
	poll := func() error { return d.poll(v, log) }
	fake.Fail("nvmlDeviceGetMemoryInfo", 15)
	fake.Fail("nvmlInit_v2", 9)
	for range 3 {
		if err := poll(); err != nil {
			t.Error(err)
		}
		all(true)
	}
	if fake.Initialized() != 0 {
		t.Error("a library whose driver is gone is kept")
	}
	fake.Fail("nvmlInit_v2", 0)
	if err := poll(); err != nil { // it starts, and no GPU answers
		t.Error(err)
	}
	all(true)
	fake.Fail("nvmlDeviceGetMemoryInfo", 0)
	if err := poll(); err != nil {
		t.Error(err)
	}
	all(false)
	fake.Fail("nvmlDeviceGetMemoryInfo", 999)
	_ = poll()
	fake.Fail("nvmlDeviceGetMemoryInfo", 0)
	fake.Set("gpus", 7)
	if err := poll(); !errors.Is(err, ErrOtherGPUs) {
		t.Errorf("one GPU less: %v", err)
	}
}

// A GPU that tells no events is said to be, and asked all the same.
func TestNoEvents(t *testing.T) {
	fake, d, v := driver(t, 2, false)
	fake.Fail("nvmlDeviceGetSupportedEventTypes", 3)
	stop, log := watch(t, d, v)
	eventually(t, "it is not said that there are no events", func() bool { return strings.Count(log.String(), "tells of no faults") == 2 })
	if err := stop(); err != nil {
		t.Error(err)
	}
}

func TestNVMLErrors(t *testing.T) {
	_, err := OpenNVML(filepath.Join(t.TempDir(), "no.so"), 0)
	if err == nil || !strings.Contains(err.Error(), "--sim 1x16Gi") || strings.Contains(err.Error(), "\n") {
		t.Errorf("no library: %v", err)
	}
	fake := nvmltest.New(t)
	fake.Fail("nvmlInit_v2", 9)
	if _, err := OpenNVML(fake.Path, 0); err == nil || !strings.Contains(err.Error(), "driver is not loaded") {
		t.Errorf("no driver: %v", err)
	}
	fake.Fail("nvmlInit_v2", 0)
	d, err := OpenNVML(fake.Path, 1<<50)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if _, err := d.List(); err == nil || !strings.Contains(err.Error(), "--reserve leaves nothing") {
		t.Errorf("all is held back: %v", err)
	}
}
