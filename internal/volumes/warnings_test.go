package volumes_test

import (
	"strings"
	"testing"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier/disk"
)

// warned is the text of warnings.
func warned(ws []diag.Warning) string {
	said := make([]string, len(ws))
	for i, w := range ws {
		said[i] = w.String()
	}
	return strings.Join(said, "; ")
}

// on is a machine's file system that says it is another.
type on struct {
	disk.FS
	system string
}

func (o on) Usage(dir string) (disk.Usage, error) {
	u, err := o.FS.Usage(dir)
	u.FileSystem = o.system
	return u, err
}

// TestOverlayIsTold: a directory that goes with its container is information, but where
// something is to be kept.
func TestOverlayIsTold(t *testing.T) {
	onLinux(t)
	for _, keep := range []bool{false, true} {
		v := open(t, volumes.Config{Capacity: mib, Persist: keep, FS: on{disk.OS(), "overlayfs"}})
		w := v.Warnings()
		if len(w) != 1 || w[0].Cause != causes.Overlay || w[0].Info == keep || w[0].Remedy == "" || w[0].Space != "disk:0" {
			t.Errorf("keep %v: %+v", keep, w)
			continue
		}
		oneLine(t, w[0].String(), v.Dir(), "overlayfs", "mount a volume")
		if strings.Contains(w[0].What, "persists") != keep {
			t.Errorf("keep %v: %s", keep, w[0])
		}
	}
	v := open(t, volumes.Config{Capacity: mib, FS: on{disk.OS(), "ext4"}})
	if w := v.Warnings(); len(w) != 0 {
		t.Errorf("on ext4: %s", warned(w))
	}
}
