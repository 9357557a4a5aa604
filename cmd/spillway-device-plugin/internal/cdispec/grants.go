package cdispec

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/grants"
)

const (
	grantClass = "grant"
	grantFile  = vendor + "-" + grantClass + "_" // followed by the grant's name and .json
)

// GrantName returns the qualified name by which runtimes find a grant.
func GrantName(name string) string { return parser.QualifiedName(vendor, grantClass, name) }

// WriteGrant describes in dir what containers need for a grant besides the GPUs: the environment and
// the mounts. It replaces an earlier description.
func WriteGrant(dir, name string, access grants.Access) error {
	path, err := grantPath(dir, name)
	if err != nil {
		return err
	}
	device := specs.Device{Name: name}
	for _, key := range slices.Sorted(maps.Keys(access.Env)) {
		if key != "NVIDIA_VISIBLE_DEVICES" { // the description of the GPUs sets it
			device.ContainerEdits.Env = append(device.ContainerEdits.Env, key+"="+access.Env[key])
		}
	}
	for _, m := range access.Mounts {
		mode := "rw"
		if m.ReadOnly {
			mode = "ro"
		}
		device.ContainerEdits.Mounts = append(device.ContainerEdits.Mounts, &specs.Mount{
			HostPath: m.Host, ContainerPath: m.Container, Options: []string{mode, "nosuid", "nodev", "noexec", "bind"},
		})
	}
	return write(path, &specs.Spec{Kind: vendor + "/" + grantClass, Devices: []specs.Device{device}})
}

// RemoveGrant removes the description of a grant, if there is one.
func RemoveGrant(dir, name string) error {
	path, err := grantPath(dir, name)
	if err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// CheckGrant returns nil if runtimes can read the description of a grant, and otherwise the reason.
func CheckGrant(dir, name string) error {
	path, err := grantPath(dir, name)
	if err == nil {
		_, err = cdi.ReadSpec(path, 0)
	}
	return err
}

// grantPath returns the path of a grant's description.
func grantPath(dir, name string) (string, error) {
	if err := parser.ValidateDeviceName(name); err != nil {
		return "", fmt.Errorf("%.100q is no name for a grant: %w", name, err)
	}
	return filepath.Join(dir, grantFile+name+".json"), nil
}
