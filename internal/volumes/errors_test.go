package volumes_test

import (
	"errors"
	"syscall"
	"testing"

	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// TestErrorsSayWhatToDo: a full file system is not a volume that is too small.
func TestErrorsSayWhatToDo(t *testing.T) {
	for _, c := range []struct {
		err  error
		want string
	}{
		{syscall.ENOSPC, "make room there, or name another directory"},
		{syscall.EDQUOT, "make room there, or name another directory"},
		{syscall.EACCES, "see to it that this process may make files there, or name another directory"},
		{syscall.EROFS, "name another directory"},
		{syscall.ENFILE, "raise the limit of open files"},
		{syscall.EIO, "the disk fails: name another directory, on one that works"},
	} {
		fsys := faultfs.New(disk.OS(), 1)
		v := open(t, volumes.Config{Capacity: mib, FS: fsys})
		well := fsys.Add(faultfs.Rule{Ops: []string{"allocate"}, Effect: faultfs.Fail(c.err)})
		_, err := v.Alloc(mib, nil)
		if !errors.Is(err, c.err) {
			t.Fatalf("%v: %v", c.err, err)
		}
		oneLine(t, err.Error(), v.Dir(), "("+c.want+")")
		if full := (*tier.NoSpaceError)(nil); errors.As(err, &full) && full.Hint != c.want {
			t.Errorf("the hint is %q", full.Hint)
		}
		well()
		_, err = v.Alloc(2*mib, nil)
		if full := (*tier.NoSpaceError)(nil); !errors.As(err, &full) || full.Hint != "" || full.Cause != nil {
			t.Errorf("a volume that is too small: %v", err)
		}
		free(v, alloc(t, v, mib))
	}
}
