package volumes_test

import (
	"bytes"
	"context"
	"errors"
	"syscall"
	"testing"

	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// TestSegmentThatWasNotRemoved: a named file that could not be removed when its room was given back
// does no harm: it is made anew when room is needed, and goes in the end.
func TestSegmentThatWasNotRemoved(t *testing.T) {
	for name, again := range map[string]bool{"used again": true, "not used again": false} {
		t.Run(name, func(t *testing.T) {
			onLinux(t)
			inner := faultfs.New(disk.OS(), 1, noAnonymous)
			fsys := faultfs.New(inner, 1)
			v := open(t, volumes.Config{Capacity: 8 * mib, FS: fsys, Idle: -1})
			free(v, alloc(t, v, 8*mib))
			heal := fsys.Add(faultfs.Rule{Ops: []string{"remove"}, Effect: faultfs.Fail(syscall.EIO)})
			if n, err := v.Trim(context.Background()); n != 8*mib || err != nil {
				t.Errorf("Trim: %d, %v", n, err)
			}
			oneLine(t, warned(v.Stats().Warnings[1:]), "closing segment-0000: input/output error")
			if again {
				if _, err := v.Alloc(mib, nil); !errors.Is(err, syscall.EIO) {
					t.Errorf("while the file cannot be removed: %v", err)
				}
			}
			heal()
			if again {
				e := alloc(t, v, 8*mib)
				want := random(8*mib, 1)
				write(t, e, want, 0)
				if !bytes.Equal(read(t, e, 8*mib, 0), want) {
					t.Error("reads differ from writes")
				}
				free(v, e)
			}
			if err := v.Close(); err != nil { // and the directory is empty; see open
				t.Error(err)
			}
		})
	}
}
