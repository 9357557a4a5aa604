package volumes_test

import (
	"slices"
	"syscall"
	"testing"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
)

// TestFewOpenFilesAreTold: under a real limit of open files that is less than what the
// volume may need.
func TestFewOpenFilesAreTold(t *testing.T) {
	var was syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &was); err != nil || was.Cur < 256 {
		t.Skip("needs a limit of open files that is not lower than the test's: ", err)
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 256, Max: was.Max}); err != nil {
		t.Skip("needs a limit of open files that can be set: ", err)
	}
	defer func() {
		if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &was); err != nil {
			t.Error(err)
		}
	}()
	for segments, want := range map[int64]bool{256 - 64: false, 256 - 63: true} {
		v := open(t, volumes.Config{Capacity: segments * tier.Page, SegmentSize: tier.Page})
		w := v.Warnings()
		if told := slices.ContainsFunc(w, func(w diag.Warning) bool { return w.Cause == causes.FileLimit && !w.Info }); told != want {
			t.Errorf("%d files: %s", segments, warned(w))
		}
		if want {
			oneLine(t, warned(w), "193 open", "256 in all", "ulimit -n")
		}
	}
}
