package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/internal/arrowgen"
)

// TestVerifyFiles: every format along every edge; a file that cannot be read does
// not keep the others from being verified.
func TestVerifyFiles(t *testing.T) {
	if testing.Short() {
		t.Skip("needs seconds: run without -short")
	}
	t.Parallel()
	var args []string
	for _, name := range []string{"t.parquet", "t.arrow", "t.arrows", "t.csv"} {
		args = append(args, writeTable(t, name, 2, 500))
	}
	broken := writeFile(t, "broken.arrow", "ARROW1\x00\x00")
	r := command(t, t.Context(), append([]string{"verify", "--json=-", "--rows-per-batch=400", broken}, args...)...)
	if r.status != 2 {
		t.Errorf("ended with %d: %s", r.status, r.stderr)
	}
	var doc report.Verify
	decode(t, r.stdout, &doc)
	if len(doc.Files) != 5 || doc.Files[0].Error == "" || doc.Files[0].Edges != 0 || doc.Files[0].Path != broken {
		t.Fatalf("%s", r.stdout)
	}
	for _, f := range doc.Files[1:] {
		// A batch has two forms in each of three spaces, each of which becomes each, but that a
		// table is not packed at once.
		if f.Batches != 3 || f.Edges != 6*6 || f.Mismatches != 0 || f.Error != "" {
			t.Errorf("%+v", f)
		}
	}
}

// TestVerifyRealFiles: real files, which other programs could have written, survive every edge.
func TestVerifyRealFiles(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../../testdata/flights.*")
	if err != nil || len(files) != 3 {
		t.Fatal(files, err)
	}
	var doc report.Verify
	decode(t, succeed(t, append([]string{"verify", "--json=-"}, files...)...).stdout, &doc)
	want := map[string]int64{".arrow": 4, ".csv": 1, ".parquet": 2}
	for _, f := range doc.Files {
		if f.Batches != want[filepath.Ext(f.Path)] || f.Edges != 6*6 || f.Mismatches != 0 || f.Error != "" {
			t.Errorf("%+v", f)
		}
	}
}

// TestVerifySpaces: with two disks there are edges between them, too.
func TestVerifySpaces(t *testing.T) {
	t.Parallel()
	r := succeed(t, "verify", "--json=-", "--disk", t.TempDir(), "--disk", t.TempDir()+"=64MiB", writeTable(t, "t.arrow", 1, 500))
	var doc report.Verify
	decode(t, r.stdout, &doc)
	// A batch has two forms on the GPU, in host memory and on each disk, and each becomes each: but
	// for those of one of several disks among themselves, and that a table is not packed at once.
	if f := doc.Files[0]; f.Edges != 8*8-2*2*2 || f.Mismatches != 0 {
		t.Errorf("%+v", f)
	}
	if len(doc.Config.Disks) != 2 || doc.Config.Disks[1].CapacityBytes != 64<<20 {
		t.Errorf("%+v", doc.Config.Disks)
	}
}

// TestVerifyEveryType: all Arrow types that an IPC file can hold survive every
// edge.
func TestVerifyEveryType(t *testing.T) {
	if testing.Short() {
		t.Skip("needs seconds: run without -short")
	}
	t.Parallel()
	g := arrowgen.New(11)
	g.Plain = true // IPC writers cannot write all slices
	var types []arrow.DataType
	for _, dt := range arrowgen.Types() {
		if writable(dt, g) {
			types = append(types, dt)
		}
	}
	if len(types) < len(arrowgen.Types())*3/4 {
		t.Fatalf("only %d of %d types can be written", len(types), len(arrowgen.Types()))
	}
	path := filepath.Join(t.TempDir(), "all.arrow")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	schema := arrowgen.Schema(types...)
	w := ipc.NewWriter(f, ipc.WithSchema(schema)) // a stream: its dictionaries may change
	for _, rows := range []int{100, 0, 1} {
		if err := w.Write(g.Record(schema, rows)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	r := succeed(t, "verify", "--json=-", path)
	var doc report.Verify
	decode(t, r.stdout, &doc)
	if got := doc.Files[0]; got.Batches != 3 || got.Mismatches != 0 || got.Error != "" {
		t.Errorf("%+v", got)
	}
}

// writable says whether arrow-go can write a column of the type and read it back;
// what it cannot is no concern of this program.
func writable(dt arrow.DataType, g *arrowgen.Gen) (ok bool) {
	defer func() { ok = recover() == nil && ok }()
	schema := arrowgen.Schema(dt)
	var buf bytes.Buffer
	w := ipc.NewWriter(&buf, ipc.WithSchema(schema))
	for _, rows := range []int{50, 0, 1} {
		if w.Write(g.Record(schema, rows)) != nil {
			return false
		}
	}
	if w.Close() != nil {
		return false
	}
	r, err := ipc.NewReader(&buf)
	if err != nil {
		return false
	}
	defer r.Release()
	n := 0
	for r.Next() {
		n++
	}
	return n == 3 && r.Err() == nil
}

// TestVerifyManyRows verifies batches of 2^31 rows that take few bytes: null columns and run-end
// encoded ones, alone and nested, in the file's batches, cut and joined. A walk over the rows would
// take minutes.
func TestVerifyManyRows(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	const n = 1 << 31
	names := array.NewStringBuilder(memory.DefaultAllocator)
	defer names.Release()
	names.AppendValues([]string{"first", "second"}, nil)
	ends := array.NewInt64Builder(memory.DefaultAllocator)
	defer ends.Release()
	ends.AppendValues([]int64{n - 1, n}, nil)
	runs := array.NewRunEndEncodedArray(ends.NewArray(), names.NewArray(), n, 0)
	nested := func(dt arrow.DataType, rows int, child arrow.Array) arrow.Array {
		return array.MakeFromData(array.NewData(dt, rows, []*memory.Buffer{nil}, []arrow.ArrayData{child.Data()}, 0, 0))
	}
	twice := array.NewNull(2 * n)
	columns := []arrow.Array{
		array.NewNull(n),
		runs,
		nested(arrow.StructOf(arrow.Field{Name: "n", Type: arrow.Null, Nullable: true}), n, array.NewNull(n)),
		nested(arrow.StructOf(arrow.Field{Name: "r", Type: runs.DataType(), Nullable: true}), n, runs),
		nested(arrow.FixedSizeListOf(2, arrow.Null), n, twice),
	}
	var fields []arrow.Field
	for i, c := range columns {
		fields = append(fields, arrow.Field{Name: fmt.Sprint("c", i), Type: c.DataType(), Nullable: true})
	}
	rec := array.NewRecordBatch(arrow.NewSchema(fields, nil), columns, n)
	var buf bytes.Buffer
	w := ipc.NewWriter(&buf, ipc.WithSchema(rec.Schema()))
	if err := errors.Join(w.Write(rec), w.Write(rec), w.Close()); err != nil {
		t.Fatal(err)
	}
	path := writeFile(t, "many.arrows", buf.String())
	for rows, batches := range map[int64]int64{0: 2, n: 2, n / 4: 8, 3 << 29: 3} {
		var doc report.Verify
		decode(t, succeed(t, "verify", "--json=-", fmt.Sprint("--rows-per-batch=", rows), path).stdout, &doc)
		if f := doc.Files[0]; f.Batches != batches || f.Edges != 6*6 || f.Mismatches != 0 || f.Error != "" {
			t.Errorf("%d rows a batch: %+v, want %d batches", rows, f, batches)
		}
	}
}

// TestStandardInput reads - and pipes by name, and refuses what cannot be read twice.
func TestStandardInput(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("needs a child process, which is Linux's")
	}
	stream, table := readFile(t, writeTable(t, "t.arrows", 2, 500)), readFile(t, writeTable(t, "t.csv", 2, 500))
	parquet := readFile(t, writeTable(t, "t.parquet", 2, 500))
	other := writeTable(t, "other.arrow", 1, 10)
	for _, c := range []struct {
		args   string
		input  string
		status int
		want   []string
	}{
		{"verify -", stream, 0, []string{"standard input", "all 2 batches"}},
		{"verify -", table, 0, []string{"standard input", "all 1 batches"}},
		{"verify -", parquet, 0, []string{"standard input", "all 2 batches"}},
		{"verify /dev/stdin", stream, 0, []string{"/dev/stdin", "all 2 batches"}},
		{"verify - " + other, stream, 0, []string{"all 3 batches"}},
		{"verify - " + other + " -", stream, 2, []string{"standard input can be read once"}},
		{"verify -", stream + "more", 2, []string{"standard input: ", fmt.Sprintf("from byte %d on", len(stream))}},
		{"verify -", "", 2, []string{"standard input: is empty"}},
		{"run --input - --gpu-memory=4MiB --host-memory=4MiB", stream, 0, []string{"standard input", "verified"}},
		{"run --input - --input - --gpu-memory=4MiB", stream, 2, []string{"standard input can be read once"}},
		{"compare --peer arrow-ipc --input -", stream, 2, []string{"standard input: is a pipe", "more than once"}},
	} {
		cmd := exec.Command(os.Args[0], strings.Fields(c.args)...)
		cmd.Env = append(os.Environ(), commandChild+"=plain "+t.TempDir())
		cmd.Stdin = strings.NewReader(c.input)
		out, err := cmd.CombinedOutput()
		if status := cmd.ProcessState.ExitCode(); status != c.status {
			t.Errorf("%s ended with %d (%v): %s", c.args, status, err, out)
		}
		for _, want := range c.want {
			if !strings.Contains(string(out), want) {
				t.Errorf("%s does not print %q: %s", c.args, want, out)
			}
		}
	}
}
