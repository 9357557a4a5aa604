package cdispec

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/gpus"
)

// host makes up a node's root directory.
func host(t *testing.T, files ...string) string {
	root := t.TempDir()
	for _, f := range files {
		path, content, _ := strings.Cut(f, "=")
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		if target, ok := strings.CutPrefix(content, "->"); ok {
			err = os.Symlink(target, path)
		} else {
			err = os.WriteFile(path, []byte(content), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// inject gives a container devices, as a runtime does.
func inject(t *testing.T, dir string, uuids ...string) *oci.Spec {
	t.Helper()
	cache, err := cdi.NewCache(cdi.WithSpecDirs(dir), cdi.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	if errs := cache.GetErrors(); len(errs) > 0 {
		t.Fatal(errs)
	}
	var names []string
	for _, uuid := range uuids {
		names = append(names, Name(uuid))
	}
	spec := &oci.Spec{Process: &oci.Process{}, Linux: &oci.Linux{}}
	if missing, err := cache.InjectDevices(spec, names...); err != nil {
		t.Fatal(missing, err)
	}
	return spec
}

func TestSimulated(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cdi")
	for range 2 { // it replaces what is there
		if err := Write(dir, "/nonexistent", gpus.Sim(2, 1<<30)); err != nil {
			t.Fatal(err)
		}
	}
	spec := inject(t, dir, "sim-1")
	if want := []string{"NVIDIA_VISIBLE_DEVICES=void", "SPILLWAY_GPU_UUID=sim-1"}; !slices.Equal(slices.Sorted(slices.Values(spec.Process.Env)), want) || len(spec.Mounts) > 0 {
		t.Errorf("%v, %v", spec.Process.Env, spec.Mounts)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("%v, %v", left, err)
	}
}

func TestLibraries(t *testing.T) {
	const lib = "/usr/lib/x86_64-linux-gnu/"
	root := host(t,
		lib+"libcuda.so.1=->libcuda.so.570.1", lib+"libcuda.so=->libcuda.so.1", lib+"libcuda.so.570.1=x",
		lib+"libnvidia-ml.so.1=->libnvidia-ml.so.570.1", lib+"libnvidia-ml.so.570.1=x",
		lib+"libnvidia-gpucomp.so.570.1=x",
		lib+"libnvidia-nvvm.so.4=->libnvidia-nvvm.so.550.9", lib+"libnvidia-nvvm.so.550.9=x", // an old driver's
		lib+"libnvidia-cfg.so.1=->libnvidia-cfg.so.570.1", // to nowhere
		lib+"libother.so.1=x")
	list, err := libraries(root)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, m := range list {
		got[m.ContainerPath] = m.HostPath
		if !slices.Equal(m.Options, []string{"ro", "nosuid", "nodev", "bind"}) { // programs are mapped from it
			t.Errorf("%s has the options %q", m.ContainerPath, m.Options)
		}
	}
	want := map[string]string{}
	for _, dir := range []string{lib, "/usr/lib64/"} {
		for name, real := range map[string]string{
			"libcuda.so.1": "libcuda.so.570.1", "libcuda.so.570.1": "libcuda.so.570.1",
			"libnvidia-ml.so.1": "libnvidia-ml.so.570.1", "libnvidia-ml.so.570.1": "libnvidia-ml.so.570.1",
			"libnvidia-gpucomp.so.570.1": "libnvidia-gpucomp.so.570.1",
		} {
			want[dir+name] = lib + real
		}
	}
	for path, from := range want {
		if got[path] != from {
			t.Errorf("%s is %q, want %q", path, got[path], from)
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d mounts, want %d: %v", len(got), len(want), got)
	}
}

// Debian's own packages link through /etc/alternatives to a directory of the driver's.
func TestLibrariesOfDebian(t *testing.T) {
	const (
		lib  = "/usr/lib/x86_64-linux-gnu/"
		real = lib + "nvidia/current/"
	)
	var files []string
	for _, name := range []string{"libcuda.so", "libnvidia-ml.so"} {
		files = append(files, lib+name+".1=->/etc/alternatives/"+name+".1", "/etc/alternatives/"+name+".1=->"+real+name+".1",
			real+name+".1=->"+name+".550.1", real+name+".550.1=x")
	}
	list, err := libraries(host(t, files...))
	if err != nil || len(list) != 8 { // two libraries by two names, for two families
		t.Fatalf("%d mounts, %v", len(list), err)
	}
	for _, m := range list {
		if filepath.Dir(m.HostPath)+"/" != real || !strings.HasSuffix(m.HostPath, ".550.1") {
			t.Errorf("%+v", m)
		}
	}
}

// A driver that is not there, or half of it, is one line that says what to do.
func TestNoLibraries(t *testing.T) {
	const lib = "/usr/lib64/"
	for name, c := range map[string]struct {
		files []string
		want  string
	}{
		"none":          {nil, "--host-root"},
		"leads nowhere": {[]string{lib + "libcuda.so.1=->libcuda.so.550.1"}, "leads to nothing"},
		"a circle":      {[]string{lib + "libcuda.so.1=->libcuda.so.1"}, "too many links"},
		"no version":    {[]string{lib + "libcuda.so.1=->other", lib + "other=x"}, "does not say the driver's version"},
		"no NVML":       {[]string{lib + "libcuda.so.1=->libcuda.so.550.1", lib + "libcuda.so.550.1=x"}, "finish the driver's installation"},
		"half upgraded": {[]string{lib + "libcuda.so.1=->libcuda.so.550.1", lib + "libcuda.so.550.1=x", lib + "libnvidia-ml.so.1=->libnvidia-ml.so.570.1", lib + "libnvidia-ml.so.570.1=x"}, "libnvidia-ml.so.1 in /usr/lib64 is not of version 550.1"},
	} {
		list, err := libraries(host(t, c.files...))
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %d mounts, %v", name, len(list), err)
		}
	}
}

// Without the file that CUDA needs nothing is described.
func TestDriverFiles(t *testing.T) {
	const lib = "/usr/lib64/"
	files := []string{lib + "libcuda.so.1=->libcuda.so.550.1", lib + "libcuda.so.550.1=x", lib + "libnvidia-ml.so.1=->libnvidia-ml.so.550.1",
		lib + "libnvidia-ml.so.550.1=x", "/dev/nvidiactl=x", "/dev/nvidia0=x"}
	dir := t.TempDir()
	list := []gpus.GPU{{UUID: "GPU-1"}}
	if err := Write(dir, host(t, files...), list); err == nil || !strings.Contains(err.Error(), "nvidia-modprobe") {
		t.Errorf("without nvidia-uvm: %v", err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("%v, %v", left, err)
	}
	if err := Write(dir, host(t, append(files, "/dev/nvidia-uvm=x")...), list); err != nil {
		t.Error(err)
	}
}

// The device files are in the spec; that they are injected needs files that only root can make.
func TestDevices(t *testing.T) {
	const caps = "/proc/driver/nvidia/capabilities/gpu3/mig/gi7"
	root := host(t, caps+"/access=DeviceFileMinor: 66\nDeviceFileMode: 292\n", caps+"/ci0/access=DeviceFileMinor: 67\n", "/proc/driver/nvidia/capabilities/gpu3/mig/gi8/access=nothing")
	paths := func(g gpus.GPU) (list []string) {
		d, err := describe(root, g)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range d.ContainerEdits.DeviceNodes {
			if n.HostPath != n.Path {
				t.Errorf("%+v", n)
			}
			list = append(list, n.Path)
		}
		return list
	}
	if got := paths(gpus.GPU{UUID: "GPU-1", Minor: 2}); !slices.Equal(got, []string{"/dev/nvidia2"}) {
		t.Error(got)
	}
	instance := gpus.GPU{UUID: "MIG-1", Parent: "GPU-1", Minor: 3, GPUInstance: 7}
	if got := paths(instance); !slices.Equal(got, []string{"/dev/nvidia3", "/dev/nvidia-caps/nvidia-cap66", "/dev/nvidia-caps/nvidia-cap67"}) {
		t.Error(got)
	}
	for _, gi := range []int{8, 9} {
		instance.GPUInstance = gi
		if _, err := describe(root, instance); err == nil {
			t.Errorf("instance %d has files", gi)
		}
	}
}

// A disk that is full, or a process that is killed, leaves nothing, and the old description as it is.
func TestHalfWritten(t *testing.T) {
	dir := t.TempDir()
	if err := Write(dir, "/nonexistent", gpus.Sim(1, 1<<30)); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "."+vendor+"-17.tmp"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	foreign := filepath.Join(dir, "spec.17.tmp") // as another vendor's may be called
	if err := os.WriteFile(foreign, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	var old syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &old); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &syscall.Rlimit{Cur: 200, Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	err := Write(dir, "/nonexistent", gpus.Sim(8, 1<<30))
	if e := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &old); e != nil {
		t.Fatal(e)
	}
	if err == nil || !strings.Contains(err.Error(), "describing what containers get in "+filepath.Join(dir, file)) {
		t.Errorf("written in spite of the disk: %v", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 2 {
		t.Errorf("%v, %v", entries, err)
	}
	if _, err := os.Lstat(foreign); err != nil {
		t.Error(err)
	}
	inject(t, dir, "sim-0")
}

// What runtimes would not take replaces nothing.
func TestNotTaken(t *testing.T) {
	dir := t.TempDir()
	if err := Write(dir, "/nonexistent", nil); err == nil {
		t.Error("a description of no GPU is written")
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("%v, %v", left, err)
	}
}
