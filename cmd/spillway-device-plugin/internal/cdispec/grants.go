package cdispec

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/grants"
)

const (
	grantClass = "grant"
	grantFile  = vendor + "-" + grantClass + "_" // with the grant's name and .json after it
	noteKey    = vendor + "/note"
)

// GrantName returns what runtimes call a grant.
func GrantName(name string) string { return parser.QualifiedName(vendor, grantClass, name) }

// WriteGrant describes in dir what containers need for a grant beside the GPUs: the environment and
// the mounts. The note is kept for Grants. It may be repeated; the last one counts.
func WriteGrant(dir, name string, access grants.Access, note string) error {
	path, err := grantPath(dir, name)
	if err != nil {
		return err
	}
	device := specs.Device{Name: name}
	for _, key := range slices.Sorted(maps.Keys(access.Env)) {
		if key != "NVIDIA_VISIBLE_DEVICES" { // the GPU's own description says that
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
	return write(path, &specs.Spec{
		Kind: vendor + "/" + grantClass, Annotations: map[string]string{noteKey: note}, Devices: []specs.Device{device},
	})
}

// RemoveGrant removes what WriteGrant wrote. It is no error if there is nothing.
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

// Grants returns the notes of all grants in dir, by their names. Beside an error it has those that
// could be read.
func Grants(dir string) (map[string]string, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	errs := []error{err}
	notes := map[string]string{}
	for _, e := range entries {
		name, ours := strings.CutPrefix(e.Name(), grantFile)
		name, json := strings.CutSuffix(name, ".json")
		if !ours || !json {
			continue
		}
		spec, err := cdi.ReadSpec(filepath.Join(dir, e.Name()), 0)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		notes[name] = spec.Annotations[noteKey]
	}
	return notes, errors.Join(errs...)
}

// grantPath is the file of a grant. Each has its own.
func grantPath(dir, name string) (string, error) {
	if err := parser.ValidateDeviceName(name); err != nil {
		return "", fmt.Errorf("%.100q is no name for a grant: %w", name, err)
	}
	return filepath.Join(dir, grantFile+name+".json"), nil
}
