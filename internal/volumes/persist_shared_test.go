package volumes_test

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/internal/copytree"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
)

// common is what many have in common, so many bytes.
func common(seed uint64, n int64) []byte { return random(n, seed) }

// manifestLength is how long the only manifest is.
func manifestLength(t *testing.T, dir string) int64 {
	t.Helper()
	info, err := os.Stat(persistedFiles(t, dir, "manifest-*")[0])
	if err != nil {
		t.Fatal(err)
	}
	return info.Size()
}

// TestSharedMetaIsWrittenOnce in a manifest, and in the next one only if somebody still has
// it. Who finds it has it in one place for all.
func TestSharedMetaIsWrittenOnce(t *testing.T) {
	const long = 50 << 10
	dir := tempDir(t)
	v := openPersistent(t, dir)
	one, other := common(1, long), common(2, long)
	var es []tier.FileMemory
	keep := func(shared []byte) {
		t.Helper()
		e := alloc(t, v, page)
		write(t, e, random(page, 5), 0)
		if _, err := v.Persist(bytes.Clone(shared), []byte("own"), e); err != nil {
			t.Fatal(err)
		}
		es = append(es, e)
	}
	for range 20 {
		keep(one)
		keep(other)
	}
	if n := manifestLength(t, dir); n < 2*long || n > 3*long {
		t.Errorf("40 records of which two halves share %d bytes take %d", long, n)
	}
	for range 10 { // the one goes, and comes again before there is a new manifest
		for len(es) > 20 {
			free(v, es[0])
			es = es[1:]
		}
		keep(one)
	}
	if n := manifestLength(t, dir); n > 3*long {
		t.Errorf("after some changes the manifest has %d bytes", n)
	}
	for _, e := range es { // only the other stays
		free(v, e)
	}
	es = nil
	keep(other)
	first := persistedFiles(t, dir, "manifest-*")[0]
	large := make([]byte, 600<<10)
	for range 4 {
		e := alloc(t, v, page)
		if _, err := v.Persist(nil, large, e); err != nil {
			t.Fatal(err)
		}
		free(v, e)
	}
	if now := persistedFiles(t, dir, "manifest-*")[0]; now == first {
		t.Fatal("the manifest was not written anew")
	}
	leave(t, v, es...)
	for range 2 { // found, and found again in the manifest of who found it
		v = openPersistent(t, dir)
		if n := manifestLength(t, dir); n < long || n > 2*long {
			t.Errorf("what one record shares with nobody, of %d bytes, makes a manifest of %d", long, n)
		}
		kept := v.Persisted()
		if len(kept) != 1 || !bytes.Equal(kept[0].Shared, other) || string(kept[0].Meta) != "own" {
			t.Fatalf("kept: %d", len(kept))
		}
		for range 3 { // beside what was found, and with its bytes
			e := alloc(t, v, page)
			if _, err := v.Persist(other, []byte("later"), e); err != nil {
				t.Fatal(err)
			}
			if n := manifestLength(t, dir); n > 2*long {
				t.Errorf("with another such record the manifest has %d bytes", n)
			}
			free(v, e)
		}
		closeVolume(t, v)
	}
	v = openPersistent(t, dir)
	for _, k := range v.Persisted() {
		v.Forget(k.Key)
	}
	closeVolume(t, v)
	wantEmpty(t, dir)
}

// TestSharedMetaStandsBeforeWhoNeedsIt: wherever a manifest is cut, each record that is found has
// what it shares; also in a manifest that was written anew, from which the first to have it is
// gone.
func TestSharedMetaStandsBeforeWhoNeedsIt(t *testing.T) {
	dir := tempDir(t)
	v := openPersistent(t, dir)
	var es []tier.FileMemory
	for i := range uint64(9) {
		_, e := persist(t, v, 10*i, page)
		es = append(es, e...)
	}
	free(v, es[:3]...)
	es = es[3:]
	leave(t, v, es...)
	v = openPersistent(t, dir) // which writes it anew
	leave(t, v)
	pristine := tempDir(t)
	copytree.Copy(t, pristine, dir)
	whole := manifestLength(t, dir)
	found := make(map[int]bool)
	for cut := whole; cut > 0; cut -= 56 {
		work := tempDir(t)
		copytree.Copy(t, work, pristine)
		if err := os.Truncate(persistedFiles(t, work, "manifest-*")[0], cut); err != nil {
			t.Fatal(err)
		}
		v := openPersistent(t, work)
		kept := v.Persisted()
		found[len(kept)] = true
		for i, k := range kept {
			free(v, wantPersisted(t, v, k, uint64(10*(i+3)), page)...)
		}
		closeVolume(t, v)
		wantEmpty(t, work)
	}
	for n := range len(es) {
		if !found[n] {
			t.Errorf("nowhere were there just %d records: %v", n, found)
		}
	}
}

// TestLostSharedMetaCostsWhoNeedsIt: and nobody else.
func TestLostSharedMetaCostsWhoNeedsIt(t *testing.T) {
	dir := tempDir(t)
	v := openPersistent(t, dir)
	var es []tier.FileMemory
	for _, seed := range []uint64{10, 14, 20, 21, 23, 25} { // of which all but 10, 14 share something else, or nothing
		_, e := persist(t, v, seed, page)
		es = append(es, e...)
	}
	leave(t, v, es...)
	manifest := persistedFiles(t, dir, "manifest-*")[0]
	p, err := os.ReadFile(manifest)
	if err != nil {
		t.Fatal(err)
	}
	p[volumes.ManifestHeader+32+40] ^= 1 // behind the record that nothing stands before it
	if err := os.WriteFile(manifest, p, 0o600); err != nil {
		t.Fatal(err)
	}
	v = openPersistent(t, dir)
	if w := warned(v.Stats().Warnings); strings.Count(w, "has in common") != 2 || !strings.Contains(w, filepath.Base(filepath.Dir(manifest))) {
		t.Errorf("warned of %q", w)
	}
	var metas []string
	for _, k := range v.Persisted() {
		metas = append(metas, string(k.Meta))
		v.Forget(k.Key)
	}
	if !slices.Equal(metas, []string{"meta 20", "meta 21", "meta 23", "meta 25"}) {
		t.Errorf("%v are kept", metas)
	}
	closeVolume(t, v)
	wantEmpty(t, dir)
}

// TestSharedMetaThatNobodyHasIsDead: with the last record that has it, it counts as dead, so that
// a manifest of which it is the most is written anew; while somebody has it, it counts as alive.
func TestSharedMetaThatNobodyHasIsDead(t *testing.T) {
	const long = 3 << 20
	dir := tempDir(t)
	v := openPersistent(t, dir)
	e, again := alloc(t, v, page), alloc(t, v, page)
	first := persistedFiles(t, dir, "manifest-*")[0]
	if _, err := v.Persist(common(1, long), []byte("own"), e); err != nil {
		t.Fatal(err)
	}
	for range 12 { // 1.2 MiB, which are dead, beside 3 alive
		if _, err := v.Persist(nil, make([]byte, 100<<10), again); err != nil {
			t.Fatal(err)
		}
	}
	if now := persistedFiles(t, dir, "manifest-*")[0]; now != first {
		t.Errorf("%s was written anew while most of it was alive", first)
	}
	free(v, e)
	if n := manifestLength(t, dir); n > mib {
		t.Errorf("of a manifest of %d bytes nearly all is dead", n)
	}
	free(v, again)
	closeVolume(t, v)
	wantEmpty(t, dir)
}
