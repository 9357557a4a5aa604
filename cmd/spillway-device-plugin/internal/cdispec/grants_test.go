package cdispec

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/grants"
)

// A grant's file has its environment and mounts. NVIDIA's runtime must not read the GPUs
// from it: they are described beside it.
func TestGrants(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cdi")
	access := grants.Access{
		Env:    map[string]string{"A": "1", "NVIDIA_VISIBLE_DEVICES": "GPU-1"},
		Mounts: []grants.Mount{{Host: "/ledger", Container: "/l"}, {Host: "/limits", Container: "/m", ReadOnly: true}},
	}
	if err := CheckGrant(dir, "claim-1"); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	for range 2 {
		if err := WriteGrant(dir, "claim-1", access); err != nil {
			t.Fatal(err)
		}
	}
	if err := CheckGrant(dir, "claim-1"); err != nil {
		t.Error(err)
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(dir), cdi.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	spec := &oci.Spec{Process: &oci.Process{}}
	if missing, err := cache.InjectDevices(spec, GrantName("claim-1")); err != nil {
		t.Fatal(missing, err)
	}
	if !slices.Equal(spec.Process.Env, []string{"A=1"}) {
		t.Errorf("the environment is %v", spec.Process.Env)
	}
	// A container must not run programs, use devices or gain rights through what it shares with others.
	shared := []string{"nosuid", "nodev", "noexec", "bind"}
	want := []oci.Mount{
		{Source: "/ledger", Destination: "/l", Options: append([]string{"rw"}, shared...)},
		{Source: "/limits", Destination: "/m", Options: append([]string{"ro"}, shared...)},
	}
	if !reflect.DeepEqual(spec.Mounts, want) {
		t.Errorf("the mounts are %+v, want %+v", spec.Mounts, want)
	}
	broken := filepath.Join(dir, grantFile+"claim-2.json")
	if err := os.WriteFile(broken, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := CheckGrant(dir, "claim-2"); err == nil || !strings.Contains(err.Error(), broken) {
		t.Error(err)
	}
	for _, name := range []string{"claim-1", "claim-2", "claim-2"} { // one that is not there is no error
		if err := RemoveGrant(dir, name); err != nil {
			t.Error(err)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("%v, %v", left, err)
	}
	for _, name := range []string{"", "..", "../x", "a/b"} {
		if WriteGrant(dir, name, access) == nil || CheckGrant(dir, name) == nil || RemoveGrant(dir, name) == nil {
			t.Errorf("%q is taken for a name", name)
		}
	}
}
