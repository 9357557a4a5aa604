package disk_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// openKeeping opens a volume that keeps.
func openKeeping(t testing.TB, dir string, change ...func(*disk.Config)) *disk.Volume {
	t.Helper()
	onLinux(t)
	cfg := disk.Config{Dir: dir, Capacity: 16 * mib, SegmentSize: 4 * mib, Keep: true}
	for _, c := range change {
		c(&cfg)
	}
	v, err := disk.OpenVolume(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func closeVolume(t testing.TB, v *disk.Volume) {
	t.Helper()
	if err := v.Close(); err != nil {
		t.Error(err)
	}
}

// keep allocates, fills and keeps memories of the sizes; what they hold is made of seed.
func keep(t testing.TB, v *disk.Volume, seed uint64, sizes ...int64) (uint64, []*disk.Extents) {
	t.Helper()
	var es []*disk.Extents
	var ms []tier.Memory
	for i, n := range sizes {
		e := alloc(t, v, n)
		write(t, e, random(n, seed+uint64(i)), 0)
		es, ms = append(es, e), append(ms, e)
	}
	key, err := v.Keep(metaOf(seed), ms...)
	if err != nil {
		t.Fatal(err)
	}
	return key, es
}

func metaOf(seed uint64) []byte { return fmt.Appendf(nil, "meta %d", seed) }

// leave closes a volume so that its directory looks as if the process had been killed:
// what it keeps is copied, and put back afterwards.
func leave(t testing.TB, v *disk.Volume, es ...*disk.Extents) {
	t.Helper()
	saved := t.TempDir()
	if err := os.CopyFS(saved, os.DirFS(v.Dir())); err != nil {
		t.Fatal(err)
	}
	free(v, es...)
	closeVolume(t, v)
	if err := os.RemoveAll(v.Dir()); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(v.Dir(), os.DirFS(saved)); err != nil {
		t.Fatal(err)
	}
}

// wantKept takes what was kept with seed and compares it.
func wantKept(t testing.TB, v *disk.Volume, k disk.Kept, seed uint64, sizes ...int64) []*disk.Extents {
	t.Helper()
	if !bytes.Equal(k.Meta, metaOf(seed)) || !slices.Equal(k.Sizes, sizes) {
		t.Errorf("kept: %q of %v, want %q of %v", k.Meta, k.Sizes, metaOf(seed), sizes)
	}
	ms, err := v.Take(k.Key)
	if err != nil {
		t.Fatal(err)
	}
	var es []*disk.Extents
	for i, m := range ms {
		e := m.(*disk.Extents)
		es = append(es, e)
		if !bytes.Equal(read(t, e, sizes[i], 0), random(sizes[i], seed+uint64(i))) {
			t.Errorf("memory %d of %q has other bytes", i, k.Meta)
		}
	}
	return es
}

// TestKeptMemoriesAreThereAfterwards: what was kept is found with its bytes, whatever
// was freed or not kept beside it is room again, and in the end nothing is left.
func TestKeptMemoriesAreThereAfterwards(t *testing.T) {
	dir := t.TempDir()
	v := openKeeping(t, dir)
	_, a := keep(t, v, 1, mib)
	_, gone := keep(t, v, 2, 3*mib)
	_, b := keep(t, v, 3, page, 5*mib, 2*page+100) // over two segments
	loose := alloc(t, v, mib)
	write(t, loose, random(mib, 9), 0)
	free(v, gone...)
	again := alloc(t, v, 3*mib) // where that was
	write(t, again, random(3*mib, 10), 0)
	leave(t, v, slices.Concat(a, b, []*disk.Extents{loose, again})...)

	v = openKeeping(t, dir)
	if w := v.Stats().Warnings; len(w) != 0 {
		t.Errorf("warnings: %q", w)
	}
	kept := v.Kept()
	if len(kept) != 2 {
		t.Fatalf("kept: %+v", kept)
	}
	held := int64(mib + page + 5*mib + 3*page)
	if s := v.Stats(); s.Used != held || s.Backed != held {
		t.Errorf("%+v, want %d used", s, held)
	}
	rest := alloc(t, v, 16*mib-held) // all that is left, and no more
	write(t, rest, random(16*mib-held, 11), 0)
	if _, err := v.Alloc(page, nil); !errors.Is(err, tier.ErrNoSpace) {
		t.Errorf("more than the capacity was handed out: %v", err)
	}
	es := wantKept(t, v, kept[0], 1, mib)
	es = append(es, wantKept(t, v, kept[1], 3, page, 5*mib, 2*page+100)...)
	if _, err := v.Take(kept[0].Key); !errors.Is(err, tier.ErrReleased) {
		t.Errorf("taken twice: %v", err)
	}
	free(v, append(es, rest)...)
	if s := v.Stats(); s.Used != 0 {
		t.Errorf("all is freed: %+v", s)
	}
	closeVolume(t, v)
	wantEmpty(t, dir)
}

// TestKeptStaysUntilTaken: a volume that is closed keeps what nobody took, however often,
// and what was put back.
func TestKeptStaysUntilTaken(t *testing.T) {
	dir := t.TempDir()
	v := openKeeping(t, dir)
	_, es := keep(t, v, 1, mib)
	_, more := keep(t, v, 2, mib, page)
	leave(t, v, append(es, more...)...)
	for range 3 {
		v = openKeeping(t, dir)
		kept := v.Kept()
		if len(kept) != 2 {
			t.Fatalf("kept: %+v", kept)
		}
		taken := wantKept(t, v, kept[1], 2, mib, page)
		if err := v.PutBack(kept[1].Key); err != nil {
			t.Fatal(err)
		}
		if err := v.PutBack(kept[1].Key); !errors.Is(err, tier.ErrReleased) {
			t.Errorf("put back twice: %v", err)
		}
		free(v, taken...)
		again := wantKept(t, v, v.Kept()[1], 2, mib, page)
		if err := v.PutBack(kept[1].Key); err != nil {
			t.Fatal(err)
		}
		e := alloc(t, v, 16*mib-2*mib-page) // not where they are
		write(t, e, random(16*mib-2*mib-page, 5), 0)
		free(v, append(again, e)...)
		closeVolume(t, v)
		if s := v.Stats(); s.Segments != 0 {
			t.Errorf("closed: %+v", s)
		}
	}
	// An ordinary volume removes nothing of it.
	before := names(t, dir)
	plain, err := disk.OpenVolume(disk.Config{Dir: dir, Capacity: mib})
	if err != nil {
		t.Fatal(err)
	}
	closeVolume(t, plain)
	if got := names(t, dir); len(got) != 1 || !slices.Equal(got, before) {
		t.Errorf("%v became %v", before, got)
	}
	v = openKeeping(t, dir)
	for _, k := range v.Kept() {
		v.Forget(k.Key)
		v.Forget(k.Key)
	}
	if s := v.Stats(); s.Used != 0 {
		t.Errorf("all is forgotten: %+v", s)
	}
	closeVolume(t, v)
	wantEmpty(t, dir)
}

// TestKeptRecordsChange: a memory has one record, the last; one that was freed, or
// forgotten, has none.
func TestKeptRecordsChange(t *testing.T) {
	dir := t.TempDir()
	v := openKeeping(t, dir)
	old, es := keep(t, v, 1, mib)
	key, err := v.Keep(metaOf(7), es[0])
	if now, ok := v.KeyOf(es[0]); err != nil || !ok || now != key || key == old {
		t.Errorf("kept as %d and then as %d: %d, %v, %v", old, key, now, ok, err)
	}
	other := alloc(t, v, page)
	if _, err := v.Keep(nil, es[0], other); err == nil {
		t.Error("kept with another memory")
	}
	forgotten, f := keep(t, v, 3, mib)
	v.Forget(forgotten)
	if _, ok := v.KeyOf(f[0]); ok {
		t.Error("forgotten, and it has a key")
	}
	free(v, other)
	if _, err := v.Keep(nil, other); !errors.Is(err, tier.ErrReleased) {
		t.Errorf("keeping what was freed: %v", err)
	}
	leave(t, v, es[0], f[0])
	v = openKeeping(t, dir)
	kept := v.Kept()
	if len(kept) != 1 || string(kept[0].Meta) != "meta 7" {
		t.Fatalf("kept: %+v", kept)
	}
	v.Forget(kept[0].Key)
	closeVolume(t, v)
	wantEmpty(t, dir)

	plain, err := disk.OpenVolume(disk.Config{Dir: dir, Capacity: mib})
	if err != nil {
		t.Fatal(err)
	}
	e := alloc(t, plain, page)
	if _, err := plain.Keep(nil, e); err == nil {
		t.Error("a volume without Keep keeps")
	}
	free(plain, e)
	closeVolume(t, plain)
	wantEmpty(t, dir)
}

// TestTwoVolumesKeepApart: while one uses a kept directory another makes its own.
func TestTwoVolumesKeepApart(t *testing.T) {
	dir := t.TempDir()
	v := openKeeping(t, dir)
	_, es := keep(t, v, 1, mib)
	leave(t, v, es...)
	first := openKeeping(t, dir)
	second := openKeeping(t, dir)
	if len(first.Kept()) != 1 || len(second.Kept()) != 0 || len(names(t, dir)) != 2 {
		t.Errorf("kept: %v and %v in %v", first.Kept(), second.Kept(), names(t, dir))
	}
	_, two := keep(t, second, 2, mib)
	es = wantKept(t, first, first.Kept()[0], 1, mib)
	free(second, two...)
	closeVolume(t, second)
	if len(names(t, dir)) != 1 {
		t.Errorf("left: %v", names(t, dir))
	}
	free(first, es...)
	closeVolume(t, first)
	wantEmpty(t, dir)
}

// kept returns the files in the only kept directory.
func keptFiles(t testing.TB, dir, kind string) []string {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(dir, "spillway-kept-*", kind))
	if err != nil || len(all) == 0 {
		t.Fatalf("no %s: %v", kind, err)
	}
	return all
}

// TestEveryByteOfTheManifestIsChecked: with any byte of it changed, what is found is what
// was kept, or less, and a warning says so.
func TestEveryByteOfTheManifestIsChecked(t *testing.T) {
	dir := t.TempDir()
	v := openKeeping(t, dir)
	var all []*disk.Extents
	for i := range uint64(4) {
		_, es := keep(t, v, 10*i, page, page)
		all = append(all, es...)
	}
	free(v, all[2])                  // a record that is over,
	_, again := keep(t, v, 40, page) // and its room used again
	leave(t, v, slices.Concat(all[:2], all[3:], again)...)
	manifest := keptFiles(t, dir, "manifest-*")[0]
	sound, err := os.ReadFile(manifest)
	if err != nil {
		t.Fatal(err)
	}
	pristine := t.TempDir()
	if err := os.CopyFS(pristine, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	for at := range sound {
		work := t.TempDir()
		if err := os.CopyFS(work, os.DirFS(pristine)); err != nil {
			t.Fatal(err)
		}
		bad := slices.Clone(sound)
		bad[at] ^= 1 << (at % 8)
		if err := os.WriteFile(keptFiles(t, work, "manifest-*")[0], bad, 0o600); err != nil {
			t.Fatal(err)
		}
		v := openKeeping(t, work)
		found := make(map[string]bool)
		for _, k := range v.Kept() {
			var seed uint64
			if _, err := fmt.Sscanf(string(k.Meta), "meta %d", &seed); err != nil {
				t.Fatalf("byte %d: meta %q", at, k.Meta)
			}
			found[string(k.Meta)] = true
			free(v, wantKept(t, v, k, seed, []int64{page, page, page}[:len(k.Sizes)]...)...)
		}
		warned := strings.Join(v.Stats().Warnings, "\n")
		// The zeros behind a record, and the end of one that is over, may be wrong.
		lost := !found["meta 0"] || !found["meta 20"] || !found["meta 30"] || !found["meta 40"]
		if (lost || found["meta 10"]) && warned == "" {
			t.Errorf("byte %d: found %v and no warning", at, found)
		}
		if found["meta 10"] && found["meta 40"] {
			t.Errorf("byte %d: a page is two memories'", at)
		}
		closeVolume(t, v)
	}
}

// TestCutManifestIsRead: cut at any length it says what it said up to there.
func TestCutManifestIsRead(t *testing.T) {
	dir := t.TempDir()
	v := openKeeping(t, dir)
	var all []*disk.Extents
	var ends []int64
	for i := range uint64(3) {
		_, es := keep(t, v, 10*i, page)
		all = append(all, es...)
		info, err := os.Stat(keptFiles(t, dir, "manifest-*")[0])
		if err != nil {
			t.Fatal(err)
		}
		ends = append(ends, info.Size())
	}
	leave(t, v, all...)
	pristine := t.TempDir()
	if err := os.CopyFS(pristine, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	for cut := int64(0); cut <= ends[2]; cut += 3 { // not a divisor of anything
		work := t.TempDir()
		if err := os.CopyFS(work, os.DirFS(pristine)); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(keptFiles(t, work, "manifest-*")[0], cut); err != nil {
			t.Fatal(err)
		}
		v := openKeeping(t, work)
		want := 0
		for _, end := range ends {
			if cut > end-8 { // the zeros at the end may be missing
				want++
			}
		}
		kept := v.Kept()
		if len(kept) > want || len(kept) < want-1 || cut > ends[2]-3 && len(kept) != 3 {
			t.Errorf("cut at %d of %v: %d kept, want %d", cut, ends, len(kept), want)
		}
		for i, k := range kept {
			free(v, wantKept(t, v, k, uint64(10*i), page)...)
		}
		closeVolume(t, v)
		wantEmpty(t, work)
	}
}

// TestMissingAndShortSegments: what lay there is lost, with a warning; the rest is there.
func TestMissingAndShortSegments(t *testing.T) {
	for name, harm := range map[string]func(string) error{
		"missing": os.Remove,
		"short":   func(p string) error { return os.Truncate(p, 2*mib) },
		"link":    func(p string) error { return errors.Join(os.Remove(p), os.Symlink("/dev/null", p)) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			v := openKeeping(t, dir)
			_, a := keep(t, v, 1, 4*mib)
			_, b := keep(t, v, 2, 4*mib)
			leave(t, v, append(a, b...)...)
			files := keptFiles(t, dir, "segment-*")
			if len(files) != 2 {
				t.Fatal(files)
			}
			if err := harm(files[0]); err != nil {
				t.Fatal(err)
			}
			v = openKeeping(t, dir)
			kept := v.Kept()
			if len(kept) != 1 {
				t.Fatalf("kept: %+v", kept)
			}
			oneLine(t, strings.Join(v.Stats().Warnings, "; "), "is lost", filepath.Base(files[0]))
			free(v, wantKept(t, v, kept[0], 2, 4*mib)...)
			if name == "link" { // it is nobody's we know
				if err := os.Remove(files[0]); err != nil {
					t.Error(err)
				}
			}
			closeVolume(t, v)
			wantEmpty(t, dir)
		})
	}
}

// TestForeignManifestIsLeftAlone: a directory that this version cannot read stays as it
// is, with a warning; so does one that the volume is too small for.
func TestForeignManifestIsLeftAlone(t *testing.T) {
	dir := t.TempDir()
	v := openKeeping(t, dir)
	_, es := keep(t, v, 1, 4*mib)
	leave(t, v, es...)
	manifest := keptFiles(t, dir, "manifest-*")[0]
	sound, err := os.ReadFile(manifest)
	if err != nil {
		t.Fatal(err)
	}
	before := names(t, dir)
	check := func(why string, change func(*disk.Config)) {
		t.Helper()
		v := openKeeping(t, dir, change)
		if len(v.Kept()) != 0 {
			t.Errorf("%s: kept %+v", why, v.Kept())
		}
		oneLine(t, strings.Join(v.Stats().Warnings, "; "), "left as it is", why, before[0])
		closeVolume(t, v)
		if got := names(t, dir); !slices.Equal(got, before) {
			t.Errorf("%s: %v became %v", why, before, got)
		}
	}
	check("capacity", func(c *disk.Config) { c.Capacity = 2 * mib })
	same := func(*disk.Config) {}
	for why, harm := range map[string]func([]byte){
		"not a manifest": func(p []byte) { copy(p, "PARQUET1") },
		"version 2":      func(p []byte) { binary.LittleEndian.PutUint32(p[8:], 2) },
		"damaged":        func(p []byte) { p[20] ^= 1 },
	} {
		bad := slices.Clone(sound)
		harm(bad)
		if err := os.WriteFile(manifest, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		check(why, same)
	}
	if err := os.WriteFile(manifest, sound, 0o600); err != nil {
		t.Fatal(err)
	}
	v = openKeeping(t, dir)
	free(v, wantKept(t, v, v.Kept()[0], 1, 4*mib)...)
	closeVolume(t, v)
	wantEmpty(t, dir)
}

// TestManifestIsWrittenAnew: it does not grow without end, and the new one says the same.
func TestManifestIsWrittenAnew(t *testing.T) {
	dir := t.TempDir()
	v := openKeeping(t, dir)
	_, stays := keep(t, v, 1, page)
	first := keptFiles(t, dir, "manifest-*")[0]
	meta := bytes.Repeat([]byte{7}, 100<<10)
	var last *disk.Extents
	for range 64 {
		e := alloc(t, v, page)
		if _, err := v.Keep(meta, e); err != nil {
			t.Fatal(err)
		}
		if last != nil {
			free(v, last)
		}
		last = e
	}
	files := keptFiles(t, dir, "manifest-*")
	info, err := os.Stat(files[0])
	if err != nil || len(files) != 1 || files[0] == first || info.Size() > 2<<20 {
		t.Errorf("after 64 records of 100 KiB: %v, %d bytes, %v", files, info.Size(), err)
	}
	leave(t, v, append(stays, last)...)
	v = openKeeping(t, dir)
	kept := v.Kept()
	if len(kept) != 2 || !bytes.Equal(kept[1].Meta, meta) {
		t.Fatalf("%d kept", len(kept))
	}
	free(v, wantKept(t, v, kept[0], 1, page)...)
	v.Forget(kept[1].Key)
	closeVolume(t, v)
	wantEmpty(t, dir)
}

// TestKeepingSurvivesEveryFault: with any single operation of the file system failing, from
// opening to closing, nothing that is found afterwards is wrong, and Keep's word holds: what
// it recorded is there, unless the reading failed.
func TestKeepingSurvivesEveryFault(t *testing.T) {
	for i := 0; ; i++ {
		dir := t.TempDir()
		v := openKeeping(t, dir)
		_, es := keep(t, v, 1, mib)
		leave(t, v, es...)
		fsys := faultfs.New(disk.OS(), 1, faultfs.Rule{Skip: i, Times: 1, Effect: faultfs.Fail(syscall.EIO)})
		kept := false
		v, err := disk.OpenVolume(disk.Config{Dir: dir, Capacity: 16 * mib, SegmentSize: 4 * mib, Keep: true, FS: fsys})
		if err == nil {
			found := len(v.Kept()) == 1
			e, failed := v.Alloc(mib, nil)
			if failed == nil {
				failed = e.(*disk.Extents).WriteAt(t.Context(), random(mib, 5), 0)
			}
			if failed == nil {
				_, failed = v.Keep(metaOf(5), e)
				kept = failed == nil
			}
			if kept && found {
				saved := t.TempDir()
				if err := os.CopyFS(saved, os.DirFS(dir)); err != nil {
					t.Fatal(err)
				}
				again := openKeeping(t, saved)
				if n := len(again.Kept()); n != 2 {
					t.Errorf("fault %d: %d of 2 are kept", i, n)
				}
				for _, k := range again.Kept() {
					again.Forget(k.Key)
				}
				closeVolume(t, again)
				wantEmpty(t, saved)
			}
			if e != nil {
				v.Free(e, func() {})
			}
			_ = v.Close()
		}
		if n := fsys.Open(); n != 0 {
			t.Fatalf("fault %d: %d files are open", i, n)
		}
		// Whatever failed: what was kept before is whole, or was said to be lost.
		v = openKeeping(t, dir)
		for _, k := range v.Kept() {
			if string(k.Meta) != "meta 1" {
				t.Errorf("fault %d: %q is kept, and was freed", i, k.Meta)
				v.Forget(k.Key)
				continue
			}
			free(v, wantKept(t, v, k, 1, mib)...)
		}
		closeVolume(t, v)
		wantEmpty(t, dir)
		if fsys.Hits() == 0 {
			if i < 30 {
				t.Fatalf("only %d operations", i)
			}
			return
		}
	}
}

// TestRandomKeeping keeps, frees and forgets at random, looks at a copy of the directory
// now and then, as a kill would leave it, and compares with a model.
func TestRandomKeeping(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 2))
	dir := t.TempDir()
	v := openKeeping(t, dir)
	type held struct {
		es    []*disk.Extents
		sizes []int64
	}
	live := make(map[uint64]held) // by seed
	var loose []*disk.Extents
	look := func() {
		work := t.TempDir()
		if err := os.CopyFS(work, os.DirFS(dir)); err != nil {
			t.Fatal(err)
		}
		v := openKeeping(t, work)
		kept := v.Kept()
		if len(kept) != len(live) || len(v.Stats().Warnings) != 0 {
			t.Fatalf("%d kept, want %d; warnings %q", len(kept), len(live), v.Stats().Warnings)
		}
		for _, k := range kept {
			var seed uint64
			_, _ = fmt.Sscanf(string(k.Meta), "meta %d", &seed)
			free(v, wantKept(t, v, k, seed, live[seed].sizes...)...)
		}
		closeVolume(t, v)
		wantEmpty(t, work)
	}
	for step := range uint64(400) {
		switch k := r.IntN(10); {
		case k < 5 && v.Stats().Used < 8*mib:
			sizes := []int64{page * (1 + r.Int64N(64))}
			if r.IntN(2) == 0 {
				sizes = append(sizes, 1+r.Int64N(mib))
			}
			_, es := keep(t, v, 100*step, sizes...)
			live[100*step] = held{es, sizes}
		case k < 7 && v.Stats().Used < 8*mib:
			e := alloc(t, v, 1+r.Int64N(mib))
			write(t, e, random(e.Size(), step), 0)
			loose = append(loose, e)
		case k < 8 && len(loose) > 0:
			free(v, loose[0])
			loose = loose[1:]
		default:
			for seed, h := range live { // any one
				if r.IntN(3) == 0 {
					key, _ := v.KeyOf(h.es[0])
					v.Forget(key)
					loose = append(loose, h.es...)
				} else {
					free(v, h.es...)
				}
				delete(live, seed)
				break
			}
		}
		if step%40 == 39 {
			look()
		}
	}
	for _, h := range live {
		free(v, h.es...)
	}
	free(v, loose...)
	closeVolume(t, v)
	wantEmpty(t, dir)
}
