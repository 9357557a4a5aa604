package disk_test

import (
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// warned is the text of warnings.
func warned(ws []tier.Warning) string {
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
		v := open(t, disk.Config{Capacity: mib, Keep: keep, FS: on{disk.OS(), "overlayfs"}})
		w := v.Warnings()
		if len(w) != 1 || w[0].Cause != tier.CauseOverlay || w[0].Info == keep || w[0].Remedy == "" || w[0].Space != (tier.ID{Kind: tier.Disk}) {
			t.Errorf("keep %v: %+v", keep, w)
			continue
		}
		oneLine(t, w[0].String(), v.Dir(), "overlayfs", "mount a volume")
		if strings.Contains(w[0].What, "kept") != keep {
			t.Errorf("keep %v: %s", keep, w[0])
		}
	}
	v := open(t, disk.Config{Capacity: mib, FS: on{disk.OS(), "ext4"}})
	if w := v.Warnings(); len(w) != 0 {
		t.Errorf("on ext4: %s", warned(w))
	}
}

// TestFewOpenFilesAreTold: under a real limit of open files that is less than what the
// volume may need.
func TestFewOpenFilesAreTold(t *testing.T) {
	onLinux(t)
	var was syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &was); err != nil || was.Cur < 256 {
		t.Skip("the limit of open files is not known, or lower than this test's: ", err)
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 256, Max: was.Max}); err != nil {
		t.Skip("the limit of open files cannot be set: ", err)
	}
	defer func() {
		if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &was); err != nil {
			t.Error(err)
		}
	}()
	for segments, want := range map[int64]bool{256 - 64: false, 256 - 63: true} {
		v := open(t, disk.Config{Capacity: segments * tier.Page, SegmentSize: tier.Page})
		w := v.Warnings()
		if told := slices.ContainsFunc(w, func(w tier.Warning) bool { return w.Cause == tier.CauseFileLimit && !w.Info }); told != want {
			t.Errorf("%s: %d files: %s", runtime.GOOS, segments, warned(w))
		}
		if want {
			oneLine(t, warned(w), "193 open", "256 in all", "ulimit -n")
		}
	}
}
