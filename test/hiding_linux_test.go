package test

import (
	"errors"
	"testing"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/test/testfs"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/topology"
)

// TestEngineWhereRemovedFilesStay: on FUSE and NFS, where a removed file that is open stays in its
// directory until it is closed, an engine is closed without an error and leaves nothing, also one
// that keeps, and one that takes over what was kept.
func TestEngineWhereRemovedFilesStay(t *testing.T) {
	t.Parallel()
	top, err := topology.Discover(t.Context(), topology.Options{})
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := spillOnce(t.Context(), dir, testfs.NewHiding(disk.OS(), 3), top, 1, 1); err != nil {
		t.Error(err)
	}
	wantNothingIn(t, dir)

	kept := t.TempDir()
	files := testfs.NewHiding(disk.OS(), 3)
	onFiles := func(c *spillway.Config) { c.Disks[0].FS = files }
	eng := persistentEngine(t, dir, onFiles)
	plan, err := eng.Plan("query")
	if err != nil {
		t.Fatal(err)
	}
	for n := int64(1); n < 4; n++ {
		repo, err := plan.Repository("join", int(n))
		if err != nil {
			t.Fatal(err)
		}
		putPersisted(t, eng, repo, n, false)
	}
	testfs.CopyTree(t, kept, dir)
	closePersistent(t, eng)
	wantNothingIn(t, dir)

	eng = persistentEngine(t, kept, onFiles)
	all := eng.Persisted()
	if len(all) != 3 {
		t.Fatalf("%d are kept", len(all))
	}
	checkAdopted(t, eng, all[0])
	closePersistent(t, eng)
	eng = persistentEngine(t, kept, onFiles)
	err = nil
	for _, k := range eng.Persisted() {
		err = errors.Join(err, eng.ForgetPersisted(k))
	}
	if err != nil {
		t.Error(err)
	}
	closePersistent(t, eng)
	wantNothingIn(t, kept)
	if files.Hidden() == 0 {
		t.Error("nothing was removed while it was open: this tests nothing")
	}
}
