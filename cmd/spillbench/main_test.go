package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"github.com/apache/arrow-go/v18/parquet"
	"github.com/apache/arrow-go/v18/parquet/pqarrow"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/testseed"
)

// TestMain checks that commands leave nothing: no goroutine, no open descriptor, and no file in the
// temp directory, which is their spill directory too. All tests share one, so that they can be
// parallel.
func TestMain(m *testing.M) {
	if how := os.Getenv(deafChild); how != "" {
		os.Exit(deafCommand(how))
	}
	if how := os.Getenv(commandChild); how != "" {
		os.Exit(childCommand(how, os.Args[1:]))
	}
	debug.SetGCPercent(400) // the heap is small: to collect it at each doubling was a seventh of the time
	if testseed.Raced {     // arenas are of Go's heap then, which would otherwise grow to twice the largest ones
		debug.SetMemoryLimit(1 << 30)
	}
	// The goroutine that hears signals stays once there is one.
	heard := make(chan os.Signal, 1)
	signal.Notify(heard, os.Interrupt)
	signal.Stop(heard)
	tmp, err := os.MkdirTemp("", "spillbench-test-")
	must(errors.Join(err, os.Setenv("TMPDIR", tmp)))
	before, files := runtime.NumGoroutine(), openFiles()
	flag.Parse()
	if flag.Lookup("test.cpuprofile").Value.String() != "" {
		files++ // the profile stays open
	}
	code := m.Run()
	// Ending goroutines may need a moment to be gone.
	for deadline := time.Now().Add(10 * time.Second); runtime.NumGoroutine() > before && time.Now().Before(deadline); {
		runtime.Gosched()
	}
	if n := runtime.NumGoroutine(); n > before && code == 0 {
		buf := make([]byte, 1<<20)
		fmt.Fprintf(os.Stderr, "%d goroutines are left of %d:\n%s\n", n, before, buf[:runtime.Stack(buf, true)])
		code = 1
	}
	if n := openFiles(); n > files && code == 0 {
		fmt.Fprintf(os.Stderr, "%d descriptors are left open, %d were before\n", n, files)
		code = 1
	}
	if err := os.Remove(tmp); err != nil { // which a directory that is not empty does not allow
		left, _ := os.ReadDir(tmp)
		fmt.Fprintln(os.Stderr, "left in the temp directory:", left, err)
		os.RemoveAll(tmp)
		code = 1
	}
	os.Exit(code)
}

// soon makes commands end soon that wait for room in vain.
const soon = "--stall-timeout=50ms"

// small are the memories of most tests: large enough to work, small enough that
// a table overflows them at once.
var small = []string{"--gpu-memory=512KiB", "--host-memory=512KiB"}

type ran struct {
	status         int
	stdout, stderr string
}

// commandChild makes this test program spillbench; see childCommand.
const commandChild = "SPILLBENCH_TEST_COMMAND"

// openFiles counts the descriptors of the process, but for those that the runtime
// opens when it likes; 0 where they cannot be counted.
func openFiles() (n int) {
	fds, _ := os.ReadDir("/proc/self/fd")
	for _, fd := range fds {
		to, err := os.Readlink("/proc/self/fd/" + fd.Name())
		if err == nil && !strings.HasPrefix(to, "anon_inode:") && !strings.HasPrefix(to, "pipe:") &&
			!strings.HasPrefix(to, "/proc/") {
			n++
		}
	}
	return n
}

// command runs spillbench in this process. What it must not leave is checked by TestMain.
func command(t *testing.T, ctx context.Context, args ...string) ran {
	t.Helper()
	var stdout, stderr bytes.Buffer
	r := ran{status: Main(ctx, args, &stdout, &stderr)}
	r.stdout, r.stderr = stdout.String(), stderr.String()
	return r
}

// succeed runs a command that must end with 0 and without complaint.
func succeed(t *testing.T, args ...string) ran {
	t.Helper()
	r := command(t, t.Context(), args...)
	r.stderr = besidesTheMachine(r.stderr)
	if r.status != 0 || r.stderr != "" {
		t.Fatalf("%q ended with %d: %s", args, r.status, r.stderr)
	}
	return r
}

// besidesTheMachine leaves out the notes of what this machine does not allow, such as locked
// memory, and of other work on it: no test is to fail for that.
func besidesTheMachine(text string) string {
	var rest strings.Builder
	for line := range strings.Lines(text) {
		ofMachine := func(c diag.Cause) bool {
			return strings.HasPrefix(line, "spillbench: note: ") && causes.Remedy(c) != "" &&
				strings.HasSuffix(line, " ("+causes.Remedy(c)+")\n")
		}
		if !slices.ContainsFunc(causes.All(), ofMachine) &&
			!strings.HasPrefix(line, "spillbench: note: other processes used ") {
			rest.WriteString(line)
		}
	}
	return rest.String()
}

// schema is the JSON Schema of all documents.
var schema = sync.OnceValue(func() *jsonschema.Schema {
	parsed, err := jsonschema.UnmarshalJSON(strings.NewReader(report.JSONSchema()))
	must(err)
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	must(c.AddResource("schema.json", parsed))
	return c.MustCompile("schema.json")
})

// decode reads a document strictly: a key that its type does not have is an error, and whatever the
// schema does not allow.
func decode(t *testing.T, text string, into any) {
	t.Helper()
	if _, ok := into.(report.Document); ok {
		v, err := jsonschema.UnmarshalJSON(strings.NewReader(text))
		if err == nil {
			err = schema().Validate(v)
		}
		if err != nil {
			t.Errorf("the schema does not allow\n%s\n%v", text, err)
		}
	}
	dec := json.NewDecoder(strings.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
}

var tableSchema = arrow.NewSchema([]arrow.Field{
	{Name: "id", Type: arrow.PrimitiveTypes.Int64},
	{Name: "name", Type: arrow.BinaryTypes.String, Nullable: true},
}, nil)

// tableRows returns a batch of n rows, about 40 bytes each. It is made by slices and not by row:
// a call for each value was most of some tests' time.
func tableRows(first, n int) arrow.RecordBatch {
	ids, valid, offsets := make([]int64, n), make([]byte, (n+7)/8), make([]int32, n+1)
	name := []byte("the name of row ")
	names, nulls := make([]byte, 0, n*29), 0
	for i := range n {
		row := first + i
		ids[i] = int64(row)
		if row%7 == 0 {
			nulls++
		} else {
			valid[i/8] |= 1 << (i % 8)
			names = strconv.AppendInt(append(names, name...), 1e12+int64(row), 10)
		}
		offsets[i+1] = int32(len(names))
	}
	column := func(dt arrow.DataType, nulls int, buffers ...[]byte) arrow.Array {
		data := array.NewData(dt, n, make([]*memory.Buffer, len(buffers)), nil, nulls, 0)
		for i, p := range buffers {
			if p != nil {
				data.Buffers()[i] = memory.NewBufferBytes(p)
			}
		}
		return array.MakeFromData(data)
	}
	return array.NewRecordBatch(tableSchema, []arrow.Array{
		column(arrow.PrimitiveTypes.Int64, 0, nil, arrow.Int64Traits.CastToBytes(ids)),
		column(arrow.BinaryTypes.String, nulls, valid, arrow.Int32Traits.CastToBytes(offsets), names),
	}, int64(n))
}

type recordWriter interface {
	Write(arrow.RecordBatch) error
	Close() error
}

// writeTable writes batches of n rows in the format that the name's ending asks
// for.
func writeTable(t *testing.T, name string, batches, n int) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var w recordWriter
	switch filepath.Ext(name) {
	case ".parquet":
		w, err = pqarrow.NewFileWriter(
			tableSchema,
			f,
			parquet.NewWriterProperties(parquet.WithDictionaryDefault(false)),
			pqarrow.NewArrowWriterProperties(),
		)
	case ".arrows":
		w = ipc.NewWriter(f, ipc.WithSchema(tableSchema))
	case ".csv":
		fmt.Fprintln(f, "id,name")
		for i := range batches * n {
			fmt.Fprintf(f, "%d,the name of row %012d\n", i, i)
		}
		return path
	default:
		w, err = ipc.NewFileWriter(f, ipc.WithSchema(tableSchema))
	}
	if err != nil {
		t.Fatal(err)
	}
	for i := range batches {
		rec := tableRows(i*n, n)
		if err := w.Write(rec); err != nil {
			t.Fatal(err)
		}
		rec.Release()
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return path
}

func writeFile(t *testing.T, name, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// unlessShort skips a test that takes seconds and whose goroutines are those of others, too: the race
// detector would take half a minute for it.
func unlessShort(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("needs seconds: run without -short")
	}
}
