package gpus

import (
	"bytes"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/internal/nvml/nvmltest"
)

// The made-up library has a GPU with two MIG instances, and one that is not divided.
func TestNVML(t *testing.T) {
	fake := nvmltest.New(t)
	d, err := OpenNVML(fake.Path, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	list, err := d.List()
	if err != nil || len(list) != 3 {
		t.Fatalf("%+v, %v", list, err)
	}
	for i, g := range list {
		divided := i < 2
		if strings.HasPrefix(g.UUID, "MIG-") != divided || (g.Parent != "") != divided || g.Memory <= 0 {
			t.Errorf("%+v", g)
		}
	}
	var logged bytes.Buffer
	log := slog.New(slog.NewTextHandler(&logged, nil))
	v := NewInventory(list)
	fake.Fail("nvmlDeviceGetMemoryInfo", 15)
	changed := v.Changed()
	d.poll(v, log)
	d.poll(v, log)
	select {
	case <-changed:
	default:
		t.Error("nobody is told")
	}
	if v.Sick(list[2].UUID) == "" || strings.Count(logged.String(), "does not answer") != 3 {
		t.Errorf("lost GPUs are healthy, or logged twice: %s", logged.String())
	}
	fake.Fail("nvmlDeviceGetMemoryInfo", 0)
	d.poll(v, log)
	if why := v.Sick(list[2].UUID); why != "" {
		t.Errorf("a GPU that answers again is sick: %s", why)
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
