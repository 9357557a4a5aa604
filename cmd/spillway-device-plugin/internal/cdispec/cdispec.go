// Package cdispec describes GPUs to container runtimes in the Container Device Interface's format
// (CDI, github.com/cncf-tags/container-device-interface). With it containerd and CRI-O give a
// container a GPU without NVIDIA's runtime.
//
//	Write      ──▶ DIR/spillway-db.github.io-gpu.json          ◀─┐ the runtime, which the kubelet
//	WriteGrant ──▶ DIR/spillway-db.github.io-grant_NAME.json   ◀─┘ tells Name(uuid), GrantName(name)
//
// A container gets the GPU's device files, those of the driver, and the driver's libraries for CUDA. The
// libraries are mounted where the dynamic linkers of Debian's and of Red Hat's family look by
// themselves, so no hook has to run.
package cdispec

import (
	"bufio"
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

	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/gpus"
)

const (
	vendor = "spillway-db.github.io"
	class  = "gpu"
	file   = vendor + "-" + class + ".json"
)

// Name returns what runtimes call a GPU.
func Name(uuid string) string { return parser.QualifiedName(vendor, class, uuid) }

// Write describes GPUs in a file in dir, which the runtimes look into, in place of what was there. The
// node's root directory is at root. It comes first: what an earlier process left half is removed.
func Write(dir, root string, list []gpus.GPU) error {
	if err := removeDrafts(dir); err != nil {
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
	// NVIDIA's runtime, if it is there, adds nothing to what is described here.
	spec.ContainerEdits.Env = []string{"NVIDIA_VISIBLE_DEVICES=void"}
	if real {
		for _, f := range driverFiles {
			_, err := os.Lstat(filepath.Join(root, f.path))
			if err != nil && f.needed {
				return fmt.Errorf("%w (CUDA needs it: run nvidia-modprobe -c 0 -u on the node)", err)
			}
			if err == nil {
				spec.ContainerEdits.DeviceNodes = append(spec.ContainerEdits.DeviceNodes, node(root, f.path))
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

// draft is how the files are called that are being written. Runtimes read names that end in .json.
const draft = "." + vendor + "-*.tmp"

// write puts a description into a file, in place of what was there, and makes its directory. After a
// crash the file is the old one or the new one. It is one that runtimes take.
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
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, draft)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	_, err = f.Write(text)
	if err == nil {
		err = f.Sync()
	}
	if closed := f.Close(); err == nil {
		err = closed
	}
	if err != nil {
		return err
	}
	if _, err := cdi.ReadSpec(f.Name(), 0); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// removeDrafts removes what a process left that was killed while it wrote.
func removeDrafts(dir string) error {
	left, err := filepath.Glob(filepath.Join(dir, draft))
	for _, path := range left {
		if e := os.Remove(path); e != nil && !errors.Is(e, fs.ErrNotExist) {
			err = e
		}
	}
	return err
}

// driverFiles are the driver's device files, beside those of the GPUs.
var driverFiles = []struct {
	path   string
	needed bool
}{{"/dev/nvidiactl", true}, {"/dev/nvidia-uvm", true}, {"/dev/nvidia-uvm-tools", false}}

// node is a device file. Where root is the runtime's own, it finds the numbers itself.
func node(root, path string) *specs.DeviceNode {
	n := &specs.DeviceNode{Path: path}
	if filepath.Clean(root) != "/" {
		n.HostPath = path
	}
	return n
}

// describe is what a container needs of one GPU.
func describe(root string, g gpus.GPU) (specs.Device, error) {
	d := specs.Device{Name: g.UUID}
	d.ContainerEdits.Env = []string{"SPILLWAY_GPU_UUID=" + g.UUID} // a device must have something
	if g.Simulated {
		return d, nil
	}
	paths := []string{"/dev/nvidia" + strconv.Itoa(g.Minor)}
	if g.Parent != "" {
		dir := fmt.Sprintf("/proc/driver/nvidia/capabilities/gpu%d/mig/gi%d", g.Minor, g.GPUInstance)
		for _, access := range []string{dir + "/access", fmt.Sprintf("%s/ci%d/access", dir, g.ComputeInstance)} {
			minor, err := capability(filepath.Join(root, access))
			if err != nil {
				return d, fmt.Errorf("MIG instance %s: %w (mount the node's root directory, and name it by --host-root)", g.UUID, err)
			}
			paths = append(paths, "/dev/nvidia-caps/nvidia-cap"+strconv.Itoa(minor))
		}
	}
	for _, path := range paths {
		d.ContainerEdits.DeviceNodes = append(d.ContainerEdits.DeviceNodes, node(root, path))
	}
	return d, nil
}

// capability reads the number of the device file by which a process may use a MIG instance.
func capability(path string) (int, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if digits, ok := strings.CutPrefix(lines.Text(), "DeviceFileMinor: "); ok {
			return strconv.Atoi(strings.TrimSpace(digits))
		}
	}
	return 0, fmt.Errorf("%s has no DeviceFileMinor", path)
}

var (
	// hostDirs are where distributions, and NVIDIA's driver in a container, have libraries.
	hostDirs = []string{
		"/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib",
		"/run/nvidia/driver/usr/lib/x86_64-linux-gnu", "/run/nvidia/driver/usr/lib/aarch64-linux-gnu", "/run/nvidia/driver/usr/lib64",
	}
	// needed are the driver's libraries for CUDA and NVML, as NVIDIA's container toolkit has them for its
	// capabilities "compute" and "utility".
	needed = []string{
		"libcuda", "libcudadebugger", "libnvidia-ml", "libnvidia-cfg", "libnvidia-ptxjitcompiler", "libnvidia-nvvm",
		"libnvidia-gpucomp", "libnvidia-opencl", "libnvidia-allocator", "libnvidia-pkcs11", "libnvidia-pkcs11-openssl3",
	}
)

// libraries mounts the driver's libraries. Their files have the driver's version at the end of their names.
// Programs look for them by links, which may lead through other directories.
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
			return nil, fmt.Errorf("%s leads to %s, whose name does not say the driver's version", filepath.Join(dir, "libcuda.so.1"), file)
		}
		return mounts(root, version, dir, filepath.Dir(file))
	}
	return nil, fmt.Errorf("the driver's libcuda.so.1 is in none of %s below %s, or leads to nothing (name the node's root directory by "+
		"--host-root, or leave devices to NVIDIA's runtime by --cdi-dir '')", strings.Join(hostDirs, ", "), root)
}

// resolve follows links below root, and returns the path of the file as the node has it.
func resolve(root, path string) (string, error) {
	for range 20 {
		target, err := os.Readlink(filepath.Join(root, path))
		if errors.Is(err, syscall.EINVAL) { // it is no link
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

// mounts returns the driver's libraries of a version that are in some directories.
func mounts(root, version string, dirs ...string) ([]*specs.Mount, error) {
	family := []string{"/usr/lib64", "/usr/lib/" + multiarch(root, dirs[0])}
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
				continue // of another driver, or leads to nothing
			}
			found[e.Name()] = true
			for _, to := range family {
				list = append(list, &specs.Mount{
					HostPath: file, ContainerPath: filepath.Join(to, e.Name()),
					Options: []string{"ro", "nosuid", "nodev", "bind"},
				})
			}
		}
	}
	for _, name := range []string{"libcuda.so.1", "libnvidia-ml.so.1"} {
		if !found[name] {
			return nil, fmt.Errorf("%s in %s is not of version %s, as libcuda.so.1 is: finish the driver's installation", name, dirs[0], version)
		}
	}
	return list, nil
}

// multiarch is Debian's name for the machine.
func multiarch(root, dir string) string {
	if strings.Contains(dir, "aarch64") {
		return "aarch64-linux-gnu"
	}
	if _, err := os.Lstat(filepath.Join(root, "/lib/ld-linux-aarch64.so.1")); err == nil {
		return "aarch64-linux-gnu"
	}
	return "x86_64-linux-gnu"
}
