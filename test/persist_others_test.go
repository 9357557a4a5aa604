package test

import (
	"testing"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/copytree"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// TestBatchesOfTwoProcesses: an engine with one disk finds what one of two processes has kept and
// warns of the other's. One with two disks finds both, and warns of nothing.
func TestBatchesOfTwoProcesses(t *testing.T) {
	persistNeedsLinux(t)
	work := t.TempDir()
	rec := arrowgen.Ints(1, 1000, 1)
	defer rec.Release()
	var processes []*spillway.Engine
	for range 2 {
		eng := persistentEngine(t, work)
		if err := scanOf(t, eng).Put(t.Context(), 0, rec, repository.WithPlacement(reservation.AnyInTier(tier.Disk))); err != nil {
			t.Fatal(err)
		}
		processes = append(processes, eng)
	}
	dir := t.TempDir()
	copytree.Copy(t, dir, work) // as if both had been killed
	for _, eng := range processes {
		closeClean(t, eng)
	}
	for disks := 1; disks <= 2; disks++ {
		copied := t.TempDir()
		copytree.Copy(t, copied, dir)
		eng := persistentEngine(t, copied, func(c *spillway.Config) {
			for len(c.Disks) < disks {
				c.Disks = append(c.Disks, c.Disks[0])
			}
		})
		if n := len(eng.Persisted()); n != disks {
			t.Errorf("%d disks find %d batches", disks, n)
		}
		warned := 0
		for _, w := range eng.Warnings() {
			if w.Cause == "kept-left" {
				warned++
			}
		}
		if warned != 2-disks {
			t.Errorf("%d disks have %d warnings of what others kept: %v", disks, warned, eng.Warnings())
		}
		for _, p := range eng.Persisted() {
			if err := eng.ForgetPersisted(p); err != nil {
				t.Error(err)
			}
		}
		closeClean(t, eng)
	}
}
