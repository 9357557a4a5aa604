// Package cdispec describes GPUs to container runtimes in the format of the Container Device Interface
// (CDI, github.com/cncf-tags/container-device-interface). With such a description containerd and CRI-O
// give a container a GPU without NVIDIA's runtime.
//
//	Write      ──▶ DIR/spillway-db.github.io-gpu.json          ◀─┐ the runtime, which gets the names
//	WriteGrant ──▶ DIR/spillway-db.github.io-grant_NAME.json   ◀─┘ Name(uuid) and GrantName(name)
//
// A container gets the GPU's device files, the driver's device files, and the driver's CUDA libraries.
// The libraries are mounted where the dynamic linkers of the Debian and Red Hat families search by
// default, so that no hook has to run in the container.
package cdispec

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/atomicfile"
	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/gpus"
)

const (
	vendor = "spillway-db.github.io"
	class  = "gpu"
	file   = vendor + "-" + class + ".json"
)

// Name returns the qualified name by which runtimes find a GPU.
func Name(uuid string) string { return parser.QualifiedName(vendor, class, uuid) }

// Write describes the GPUs in a file in dir, a directory that the runtimes read, and replaces an earlier
// description. root is where the node's root directory is mounted. A process calls Write before all
// else here: it removes the drafts that a killed process has left.
func Write(dir, root string, list []gpus.GPU) error {
	if err := atomicfile.RemoveDrafts(dir); err != nil {
		return err
	}
	spec := &specs.Spec{Kind: vendor + "/" + class}
	real := false
	for _, g := range list {
		device, err := describe(root, g)
		if err != nil {
			return err
		}
		spec.Devices = append(spec.Devices, device)
		real = real || !g.Simulated
	}
	// So that NVIDIA's runtime, if the node has it, adds nothing.
	spec.ContainerEdits.Env = []string{"NVIDIA_VISIBLE_DEVICES=void"}
	if real {
		for _, path := range []string{"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"} {
			_, err := os.Lstat(filepath.Join(root, path))
			if err != nil && path != "/dev/nvidia-uvm-tools" {
				return fmt.Errorf("%w (CUDA needs it: run nvidia-modprobe -c 0 -u on the node)", err)
			}
			if err == nil {
				spec.ContainerEdits.DeviceNodes = append(spec.ContainerEdits.DeviceNodes, node(root, path))
			}
		}
		mounts, err := libraries(root)
		if err != nil {
			return err
		}
		spec.ContainerEdits.Mounts = mounts
	}
	return write(filepath.Join(dir, file), spec)
}

// write replaces a description, if runtimes would accept the new one. It makes the directory.
func write(path string, spec *specs.Spec) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("describing what containers get in %s: %w", path, err)
		}
	}()
	if spec.Version, err = specs.MinimumRequiredVersion(spec); err != nil {
		return err
	}
	text, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return atomicfile.Write(path, text, func(draft string) error {
		_, err := cdi.ReadSpec(draft, 0)
		return err
	})
}

// node returns a device file. The runtime finds the file's numbers itself if root is the runtime's own.
func node(root, path string) *specs.DeviceNode {
	n := &specs.DeviceNode{Path: path}
	if filepath.Clean(root) != "/" {
		n.HostPath = path
	}
	return n
}

// describe returns what a container needs of one GPU.
func describe(root string, g gpus.GPU) (specs.Device, error) {
	d := specs.Device{Name: g.UUID}
	d.ContainerEdits.Env = []string{"SPILLWAY_GPU_UUID=" + g.UUID} // a device without any edit is invalid
	if g.Simulated {
		return d, nil
	}
	paths := []string{"/dev/nvidia" + strconv.Itoa(g.Minor)}
	if g.Parent != "" {
		dir := fmt.Sprintf("/proc/driver/nvidia/capabilities/gpu%d/mig/gi%d", g.Minor, g.GPUInstance)
		for _, access := range []string{dir + "/access", fmt.Sprintf("%s/ci%d/access", dir, g.ComputeInstance)} {
			minor, err := capability(filepath.Join(root, access))
			if err != nil {
				return d, fmt.Errorf("MIG instance %s: %w (mount the node's root directory, and name it by "+
					"--host-root)", g.UUID, err)
			}
			paths = append(paths, "/dev/nvidia-caps/nvidia-cap"+strconv.Itoa(minor))
		}
	}
	for _, path := range paths {
		d.ContainerEdits.DeviceNodes = append(d.ContainerEdits.DeviceNodes, node(root, path))
	}
	return d, nil
}

// capability reads the number of the device file with which a process may use a MIG instance.
func capability(path string) (int, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if digits, ok := strings.CutPrefix(line, "DeviceFileMinor: "); ok {
			return strconv.Atoi(strings.TrimSpace(digits))
		}
	}
	return 0, fmt.Errorf("%s has no DeviceFileMinor", path)
}

var (
	// hostDirs are where distributions, and NVIDIA's driver in a container, have libraries.
	hostDirs = []string{
		"/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib",
		"/run/nvidia/driver/usr/lib/x86_64-linux-gnu", "/run/nvidia/driver/usr/lib/aarch64-linux-gnu",
		"/run/nvidia/driver/usr/lib64",
	}
	// needed are the driver's libraries for CUDA and NVML: those of the capabilities "compute" and
	// "utility" in NVIDIA's container toolkit.
	needed = []string{
		"libcuda", "libcudadebugger", "libnvidia-ml", "libnvidia-cfg", "libnvidia-ptxjitcompiler", "libnvidia-nvvm",
		"libnvidia-gpucomp", "libnvidia-opencl", "libnvidia-allocator", "libnvidia-pkcs11", "libnvidia-pkcs11-openssl3",
	}
)

// libraries returns the mounts of the driver's libraries. The libraries' files have the driver's version
// at the end of their names. Programs find them through links, which may lead through other directories.
func libraries(root string) ([]*specs.Mount, error) {
	for _, dir := range hostDirs {
		file, err := resolve(root, filepath.Join(dir, "libcuda.so.1"))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		version, ok := strings.CutPrefix(filepath.Base(file), "libcuda.so.")
		if !ok {
			return nil, fmt.Errorf("%s leads to %s, whose name does not say the driver's version", filepath.Join(dir,
				"libcuda.so.1"), file)
		}
		return mounts(root, version, dir, filepath.Dir(file))
	}
	return nil, fmt.Errorf("the driver's libcuda.so.1 is in none of %s below %s, or leads to nothing (name the "+
		"node's root directory by "+
		"--host-root, or leave devices to NVIDIA's runtime by --cdi-dir '')", strings.Join(hostDirs, ", "), root)
}

// resolve follows links below root, and returns the path of the file on the node.
func resolve(root, path string) (string, error) {
	for range 20 {
		target, err := os.Readlink(filepath.Join(root, path))
		if errors.Is(err, syscall.EINVAL) { // not a link
			return path, nil
		}
		if err != nil {
			return "", err
		}
		if !filepath.IsAbs(target) {
			target = filepath.Join(filepath.Dir(path), target)
		}
		path = target
	}
	return "", fmt.Errorf("%s: too many links", path)
}

// mounts returns the mounts of the libraries in dirs that belong to a version of the driver.
func mounts(root, version string, dirs ...string) ([]*specs.Mount, error) {
	// Debian names its directory after the machine.
	debian := "/usr/lib/x86_64-linux-gnu"
	_, err := os.Lstat(filepath.Join(root, "/lib/ld-linux-aarch64.so.1"))
	if err == nil || strings.Contains(dirs[0], "aarch64") {
		debian = "/usr/lib/aarch64-linux-gnu"
	}
	var list []*specs.Mount
	found := map[string]bool{} // by the name that programs look for
	for _, dir := range dirs {
		entries, err := os.ReadDir(filepath.Join(root, dir))
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			name, ending, _ := strings.Cut(e.Name(), ".so.")
			if !slices.Contains(needed, name) || ending == "" || found[e.Name()] {
				continue
			}
			file, err := resolve(root, filepath.Join(dir, e.Name()))
			if err != nil || filepath.Base(file) != name+".so."+version {
				continue // it belongs to another driver, or leads to nothing
			}
			found[e.Name()] = true
			for _, to := range []string{"/usr/lib64", debian} {
				list = append(list, &specs.Mount{
					HostPath: file, ContainerPath: filepath.Join(to, e.Name()),
					Options: []string{"ro", "nosuid", "nodev", "bind"},
				})
			}
		}
	}
	for _, name := range []string{"libcuda.so.1", "libnvidia-ml.so.1"} {
		if !found[name] {
			return nil, fmt.Errorf("%s in %s is not of version %s, as libcuda.so.1 is: finish the driver's "+
				"installation", name, dirs[0], version)
		}
	}
	return list, nil
}
