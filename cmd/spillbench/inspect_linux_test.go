package main

import (
	"crypto/sha256"
	"encoding/binary"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"github.com/zeebo/xxh3"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/test/testfs"
	"github.com/spillway-db/spillway/tier"
)

// persisting opens an engine whose disk persists, and puts three batches of the plan "query" on it: one
// of numbers, and two that share a dictionary.
func persisting(t *testing.T, codec convert.Codec, key []byte) (dir string) {
	t.Helper()
	dir = t.TempDir()
	eng, err := spillway.Open(t.Context(), spillway.Config{
		GPUs:       []spillway.GPUConfig{},
		HostMemory: spillway.Bytes(16 << 20),
		Codec:      codec,
		Disks: []spillway.DiskConfig{
			{Dir: dir, Capacity: spillway.Bytes(8 << 20), Persist: true, Encrypt: key != nil, Key: key},
		},
		Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	plan, err := eng.Plan("query")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := eng.Close(); err != nil {
			t.Error(err)
		}
	})
	words := array.NewStringBuilder(memory.DefaultAllocator)
	for range 2000 {
		words.Append("a word of many")
	}
	dictionary := words.NewArray()
	coded := func(n int) arrow.RecordBatch {
		dt := &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int32, ValueType: arrow.BinaryTypes.String}
		index := array.NewInt32Builder(memory.DefaultAllocator)
		for i := range n {
			index.Append(int32(i % 2000))
		}
		col := array.NewDictionaryArray(dt, index.NewArray(), dictionary)
		return array.NewRecordBatch(
			arrow.NewSchema([]arrow.Field{{Name: "w", Type: dt}}, nil),
			[]arrow.Array{col},
			int64(n),
		)
	}
	for port, recs := range [][]arrow.RecordBatch{{arrowgen.Ints(1, 50_000, 2)}, {coded(3000), coded(4000)}} {
		repo, err := plan.Repository("scan", port)
		if err != nil {
			t.Fatal(err)
		}
		for i, rec := range recs {
			if err := repo.Put(
				t.Context(),
				i,
				rec,
				repository.WithPlacement(reservation.AnyInTier(tier.Host)),
			); err != nil {
				t.Fatal(err)
			}
			for b := range repo.Batches(i) {
				if err := eng.Mover().Move(t.Context(), b, reservation.AnyInTier(tier.Disk)); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	return dir
}

// left returns a copy of a directory as a killed process leaves it, and the directory in it that
// persists.
func left(t *testing.T, dir string) (top, kept string) {
	t.Helper()
	top = t.TempDir()
	testfs.CopyTree(t, top, dir)
	all, err := filepath.Glob(filepath.Join(top, "spillway-kept-*"))
	if err != nil || len(all) != 1 {
		t.Fatal(all, err)
	}
	return top, all[0]
}

// inspected runs inspect, and checks that it changes no file and none's time.
func inspected(t *testing.T, status int, args ...string) (doc report.Inspect, stderr string) {
	t.Helper()
	before := stateOf(t, args[0])
	r := command(t, t.Context(), append([]string{"inspect", "--json=-"}, args...)...)
	if after := stateOf(t, args[0]); !slices.Equal(before, after) {
		t.Errorf("inspect has changed the directory:\n%q\nnow\n%q", before, after)
	}
	if r.status != status {
		t.Fatalf("ended with %d, want %d: %s", r.status, status, r.stderr)
	}
	if r.stdout != "" {
		decode(t, r.stdout, &doc)
	}
	return doc, r.stderr
}

// stateOf returns the files in a directory with their sizes, times and contents.
func stateOf(t *testing.T, dir string) (all []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		sum := ""
		if info.Mode().IsRegular() && info.Size() < 256<<20 {
			content, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			hash := sha256.Sum256(content)
			sum = string(hash[:])
		}
		all = append(all, path+info.ModTime().String()+info.Mode().String()+sum)
		return nil
	})
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return all
}

// TestInspect: inspect lists what persists, while an engine uses it and when it has ended.
func TestInspect(t *testing.T) {
	dir := persisting(t, convert.CodecNone, nil)
	top, kept := left(t, dir)
	for _, c := range []struct {
		path  string
		inUse bool
	}{{dir, true}, {top, false}, {kept, false}} {
		doc, _ := inspected(t, 0, c.path, "--checksums")
		if len(doc.Directories) != 1 || doc.Damage() != 0 {
			t.Fatalf("%+v", doc)
		}
		d := doc.Directories[0]
		if d.InUse != c.inUse || d.Encrypted || d.Records != 4 || d.Dictionaries != 1 || len(d.Batches) != 3 ||
			len(d.Unlisted) != 0 ||
			d.Error != "" {
			t.Fatalf("%+v", d)
		}
		sum := d.DictionaryBytes
		for i, want := range []report.PersistedBatch{
			{Rows: 50_000, Port: 0, Partition: 0, Columns: []string{"c0: int64", "c1: int64"}},
			{Rows: 3000, Port: 1, Partition: 0, Columns: []string{"w: dictionary<values=utf8, indices=int32, ordered=false>"}, Dictionaries: 1},
			{Rows: 4000, Port: 1, Partition: 1, Columns: []string{"w: dictionary<values=utf8, indices=int32, ordered=false>"}, Dictionaries: 1},
		} {
			b := d.Batches[i]
			sum += b.Bytes
			if b.ID == 0 || b.Plan != "query" || b.Operator != "scan" || b.Port != want.Port || b.Partition != want.Partition || b.Rows != want.Rows ||
				b.Codec != "none" || b.Dictionaries != want.Dictionaries ||
				b.Error != "" ||
				b.Bytes != b.ImageBytes+tier.Page || // a header
				b.Bytes < 4*want.Rows {
				t.Errorf("%+v, want %+v", b, want)
			}
			if want.Dictionaries > 0 && !slices.Equal(b.Columns, want.Columns) || len(b.Columns) != len(want.Columns) {
				t.Errorf("the columns are %q, want %q", b.Columns, want.Columns)
			}
		}
		if d.Bytes != sum || d.FileBytes < sum {
			t.Errorf("%d bytes in %d of files, and the records have %d", d.Bytes, d.FileBytes, sum)
		}
	}
	text := succeed(t, "inspect", top).stdout
	for _, want := range []string{kept + ", not in use", "3 batches and 1 shared dictionaries", "query", "scan:1", "no record damaged"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if csv := succeed(
		t,
		"inspect",
		top,
		"--format=csv",
	).stdout; !strings.HasPrefix(
		csv,
		"id,plan,operator,partition,rows,columns,bytes,image_bytes,codec,dictionaries,error\n",
	) {
		t.Errorf("CSV:\n%s", csv)
	}
}

// TestInspectLeavesAll: what was inspected can be adopted afterwards.
func TestInspectLeavesAll(t *testing.T) {
	top, _ := left(t, persisting(t, convert.CodecZstd, nil))
	doc, _ := inspected(t, 0, top, "--checksums")
	if b := doc.Directories[0].Batches[0]; b.Codec != "zstd" || b.Bytes >= b.ImageBytes {
		t.Errorf("the batch of numbers is %+v", b)
	}
	eng, err := spillway.Open(t.Context(), spillway.Config{
		GPUs:       []spillway.GPUConfig{},
		HostMemory: spillway.Bytes(16 << 20),
		Logger:     slog.New(slog.NewTextHandler(io.Discard, nil)),
		Disks:      []spillway.DiskConfig{{Dir: top, Capacity: spillway.Bytes(8 << 20), Persist: true}},
	})
	if err != nil {
		t.Fatal(err)
	}
	found := eng.Persisted()
	if len(found) != 3 {
		t.Errorf("%d batches persist", len(found))
	}
	for i, p := range found {
		if b := doc.Directories[0].Batches[i]; b.ID != uint64(p.ID) || b.Rows != p.Rows || b.Bytes != p.Bytes {
			t.Errorf("inspect lists %+v, and the engine finds %+v", b, p)
		}
		b, err := eng.Adopt(t.Context(), p)
		if err != nil {
			t.Error(err)
			continue
		}
		if err := b.Drop(); err != nil {
			t.Error(err)
		}
	}
	if err := eng.Close(); err != nil {
		t.Error(err)
	}
}

// TestInspectDamage: damaged entries end inspect with 1, and say what is damaged.
func TestInspectDamage(t *testing.T) {
	for _, codec := range []convert.Codec{convert.CodecNone, convert.CodecZstd} {
		dir := persisting(t, codec, nil)
		for name, c := range map[string]struct {
			damage func(path string) error
			want   string
		}{
			"a byte of a batch": {func(path string) error { return flip(path, 100) }, "corrupt data"},
			"a cut file":        {func(path string) error { return os.Truncate(path, 8192) }, "are not what was written"},
			"a byte of the tail": {func(path string) error {
				info, err := os.Stat(path)
				if err != nil {
					return err
				}
				return flip(path, info.Size()-300)
			}, "are not what was written"},
		} {
			top, kept := left(t, dir)
			path := firstBatch(t, kept)
			if err := c.damage(path); err != nil {
				t.Fatal(err)
			}
			doc, stderr := inspected(t, 1, top, "--checksums")
			d := doc.Directories[0]
			text := strings.Join(d.Damaged, "\n")
			for _, b := range d.Batches {
				text += b.Error + "\n"
			}
			if doc.Damage() == 0 || !strings.Contains(text, c.want) || !strings.Contains(text, path) ||
				!strings.Contains(stderr, "are damaged") {
				t.Errorf("%s, %s: %d damaged: %s: %s", name, codec, doc.Damage(), text, stderr)
			}
			if name == "a byte of a batch" {
				if doc, _ := inspected(t, 0, top); doc.Damage() != 0 || doc.Checksums {
					t.Errorf("without --checksums inspect finds %+v", doc)
				}
			}
		}
	}
}

// firstBatch returns the largest file that persists in a directory: that of the batch of numbers, or of
// its first run.
func firstBatch(t *testing.T, kept string) (path string) {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(kept, "????????????????"))
	if err != nil || len(all) != 4 {
		t.Fatal(all, err)
	}
	largest := int64(0)
	for _, file := range all {
		info, err := os.Stat(file)
		if err != nil {
			t.Fatal(err)
		}
		if info.Size() > largest {
			path, largest = file, info.Size()
		}
	}
	return path
}

// flip changes a bit of a file.
func flip(path string, at int64) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	var b [1]byte
	if _, err := f.ReadAt(b[:], at); err != nil {
		return err
	}
	b[0] ^= 1
	_, err = f.WriteAt(b[:], at)
	return err
}

// TestInspectUnlisted: files that hold nothing that persists are listed, and are no damage.
func TestInspectUnlisted(t *testing.T) {
	top, kept := left(t, persisting(t, convert.CodecNone, nil))
	unlisted := []string{"00000000000000ab.part", "notes", "notes.txt"}
	for _, name := range unlisted {
		if err := os.WriteFile(filepath.Join(kept, name), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	doc, _ := inspected(t, 0, top)
	if got := doc.Directories[0].Unlisted; !slices.Equal(got, unlisted) {
		t.Errorf("unlisted are %q", got)
	}
}

// TestInspectEncrypted: without the key inspect counts the records and their bytes.
func TestInspectEncrypted(t *testing.T) {
	dir := persisting(t, convert.CodecNone, []byte("sixteen bytes ok"))
	top, _ := left(t, dir)
	for _, path := range []string{dir, top} {
		doc, _ := inspected(t, 0, path, "--checksums")
		d := doc.Directories[0]
		if !d.Encrypted || d.Records != 4 || len(d.Batches) != 0 || d.Bytes < 4*50_000 || doc.Damage() != 0 ||
			d.InUse != (path == dir) ||
			len(d.Unlisted) != 0 {
			t.Errorf("%+v", d)
		}
	}
	if text := succeed(t, "inspect", top).stdout; !strings.Contains(text, "encrypted: 4 records of ") {
		t.Error(text)
	}
}

// TestInspectStatus: nothing that persists is wrong use, and what can't be read is the machine's.
func TestInspectStatus(t *testing.T) {
	empty := t.TempDir()
	for _, c := range []struct {
		args   []string
		status int
		want   string
	}{
		{[]string{empty}, 2, "nothing persists in " + empty},
		{[]string{filepath.Join(empty, "absent")}, 2, "no such directory"},
		{nil, 2, "inspect needs one directory"},
		{[]string{empty, empty}, 2, "inspect needs one directory"},
	} {
		r := command(t, t.Context(), append([]string{"inspect"}, c.args...)...)
		if r.status != c.status || !strings.Contains(r.stderr, c.want) {
			t.Errorf("%q ended with %d: %s", c.args, r.status, r.stderr)
		}
	}
	top, kept := left(t, persisting(t, convert.CodecNone, nil))
	files, err := filepath.Glob(filepath.Join(kept, "????????????????"))
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, path := range files {
		p, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		tail := p[len(p)-1024:]
		tail[7] = '9' // the version
		binary.LittleEndian.PutUint64(tail[1016:], xxh3.Hash(tail[:1016]))
		if err := os.WriteFile(path, p, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	doc, stderr := inspected(t, 3, top)
	if len(doc.Directories) != 1 || doc.Directories[0].Error == "" || !strings.Contains(stderr, "cannot be read") {
		t.Errorf("%+v: %s", doc, stderr)
	}
}
