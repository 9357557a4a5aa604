package persist

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/test/testfs"
	"github.com/spillway-db/spillway/tier"
)

// TestForgottenBatchLeavesDictionariesOfOthers: a batch of which one dictionary is damaged does not
// count as one that needs the other, so that one stays for the batch that shares it.
func TestForgottenBatchLeavesDictionariesOfOthers(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs Linux, for locks that end with their process")
	}
	open := func(dir string) *volumes.Volume {
		v, err := volumes.Open(volumes.Config{Dir: dir, Capacity: 16 << 20, Persist: true})
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	v := open(t.TempDir())
	entry, schema := entryOfRecord(t, arrowgen.New(1).Record(arrowgen.Schema(arrow.PrimitiveTypes.Int64), 300))
	var all []tier.Memory
	persist := func(id batch.ID, dictionaries ...uint64) uint64 {
		m, err := v.Alloc(entry.Descriptor.Body, nil)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, m)
		e := &Entry{ID: id, Descriptor: entry.Descriptor, Dictionaries: dictionaries}
		noRoom := func(int64) (func(), error) { return func() {}, nil }
		key, err := v.Persist(e.meta(schema), e.place(), noRoom, m)
		if err != nil {
			t.Fatal(err)
		}
		return key
	}
	shared, damaged := persist(0), persist(0)
	harmed, sound := persist(1, shared, damaged), persist(2, shared)
	dir := t.TempDir()
	testfs.CopyTree(t, dir, v.Dir()) // as a kill leaves it
	for _, m := range all {
		v.Free(m, func() {})
	}
	if err := v.Close(); err != nil {
		t.Error(err)
	}
	for _, p := range mustGlob(t, filepath.Join(dir, "*", keptName(damaged))) {
		if err := os.Truncate(p, tier.Page); err != nil {
			t.Fatal(err)
		}
	}

	v = open(dir)
	small, err := tier.NewSpace(tier.SpaceConfig{
		ID: tier.ID{Kind: tier.Disk}, Capacity: 3 * entry.Descriptor.Body, Backend: "disk", Pool: v,
	})
	if err != nil {
		t.Fatal(err)
	}
	none := NewFound()
	if err := none.Add(small); !errors.Is(err, tier.ErrNoSpace) {
		t.Errorf("more than the capacity persists: %v", err)
	}
	if err := none.Close(); err != nil || small.State().Used() != 0 || small.State().Held != 0 {
		t.Errorf("after files that do not fit: %v, %+v", err, small.State())
	}
	space, err := tier.NewSpace(tier.SpaceConfig{
		ID: tier.ID{Kind: tier.Disk}, Capacity: 16 << 20, Backend: "disk", Pool: v,
	})
	if err != nil {
		t.Fatal(err)
	}
	f := NewFound()
	if err := f.Add(space); err != nil {
		t.Fatal(err)
	}
	for _, b := range f.List() {
		if (b.Err == nil) != (b.Key == sound) {
			t.Errorf("%016x: %v", b.Key, b.Err)
		}
		if b.Key == harmed {
			if err := f.Forget(b); err != nil {
				t.Error(err)
			}
		}
	}
	there := func(key uint64) bool {
		return slices.ContainsFunc(v.Persisted(), func(p volumes.Persisted) bool { return p.Key == key })
	}
	if !there(shared) || !there(sound) || there(harmed) {
		t.Errorf("what persists is %+v", v.Persisted())
	}
	for _, b := range f.List() {
		if err := f.Forget(b); err != nil {
			t.Error(err)
		}
	}
	if left := v.Persisted(); len(left) > 0 {
		t.Errorf("what persists in the end is %+v", left)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	if err := space.Close(); err != nil {
		t.Error(err)
	}
}

// TestNoDictionaryOfItself: a dictionary that lists its own file cannot be read.
func TestNoDictionaryOfItself(t *testing.T) {
	entry, schema := entryOfRecord(t, arrowgen.New(1).Record(arrowgen.Schema(arrow.PrimitiveTypes.Int64), 300))
	e := &Entry{Descriptor: entry.Descriptor, Dictionaries: []uint64{7}}
	b := &Batch{Persisted: volumes.Persisted{Key: 7, Meta: e.meta(schema), Place: e.place(), Size: e.Descriptor.Body}}
	files := make(map[uint64]*Batch)
	if b.read(make(Schemas), files); b.Err == nil || len(b.dicts) > 0 || files[7] != b {
		t.Errorf("it has %d dictionaries: %v", len(b.dicts), b.Err)
	}
}

func keptName(key uint64) string { return fmt.Sprintf("%016x", key) }

func mustGlob(t *testing.T, pattern string) []string {
	t.Helper()
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	return files
}
