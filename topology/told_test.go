package topology_test

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"testing"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/topology"
)

// free are files that may contain anything (names, words), or whose harm shows in another way: a
// mount whose block device is missing is reported with those of no disk.
var free = regexp.MustCompile(`/(model|rate|link_layer|hosts)$|/device/vendor$|^/proc/(cpuinfo|net/.*)$|^/sys/(dev|class)/block/|/partition$|n\d+/device$`)

// TestHarmIsTold: of each file of a machine that is harmed, either nothing was known by it, or
// there is a warning more.
func TestHarmIsTold(t *testing.T) {
	harms := []struct {
		name string
		do   func(file string) error
	}{
		{"garbage", func(file string) error { return os.WriteFile(file, []byte("garbage\n"), 0o644) }},
		{"dangles", func(file string) error { return os.Symlink("nowhere", file) }},
		{"is dir", func(file string) error { return os.Mkdir(file, 0o755) }},
	}
	for _, machine := range []string{"server", "mig", "cgroup-v1"} {
		t.Run(machine, func(t *testing.T) {
			t.Parallel()
			root := unpack(t, machine)
			whole := discover(t, topology.Options{Root: root})
			harmed := 0
			first, step := testseed.Half(t, 8)
			for _, file := range filesBelow(t, root) {
				if free.MatchString(file) {
					continue
				}
				harmed++
				for i, h := range harms {
					if (harmed+i)%step != first {
						continue
					}
					path := filepath.Join(root, file)
					saved := path + ".saved"
					if err := errors.Join(os.Rename(path, saved), h.do(path)); err != nil {
						t.Fatal(err)
					}
					top := discover(t, topology.Options{Root: root})
					more := slices.ContainsFunc(top.Warnings, func(w diag.Warning) bool { return !slices.Contains(whole.Warnings, w) })
					top.Warnings = whole.Warnings
					if !more && !reflect.DeepEqual(top, whole) {
						t.Errorf("%s: %s: something else is told, and no warning", file, h.name)
					}
					if err := errors.Join(os.RemoveAll(path), os.Rename(saved, path)); err != nil {
						t.Fatal(err)
					}
				}
			}
			if harmed < 25 {
				t.Errorf("%d files were harmed: too few for a machine", harmed)
			}
		})
	}
}

// filesBelow lists the files and links below root, as seen from it.
func filesBelow(t *testing.T, root string) (files []string) {
	t.Helper()
	err := filepath.WalkDir(root, func(p string, e os.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			files = append(files, p[len(root):])
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}
