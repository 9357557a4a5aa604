package cdevice

import (
	"bytes"
	"embed"
	"encoding/binary"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"unsafe"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/ebitengine/purego"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/tier/tiertest"
)

// consumer is the library of testdata/consumer.c.
type consumer struct{ consume, consumeChild, produce, releases, missing uintptr }

func buildConsumer(t *testing.T) consumer {
	t.Helper()
	h := build(t, "consumer.c")
	var c consumer
	for name, to := range map[string]*uintptr{"consume": &c.consume, "consume_child": &c.consumeChild, "produce": &c.produce, "releases": &c.releases, "missing": &c.missing} {
		*to = function(t, h, name)
	}
	return c
}

// sources are in the test's binary, which may run where the checkout is not.
//
//go:embed testdata/*.c
var sources embed.FS

// compiled are the libraries of testdata, by source.
var compiled struct {
	sync.Mutex
	libraries map[string][]byte
}

// build loads a library of testdata, which is compiled once. Each test has one with a state of its
// own.
func build(t *testing.T, source string) uintptr {
	t.Helper()
	compiled.Lock()
	defer compiled.Unlock()
	lib := filepath.Join(t.TempDir(), "libconsumer.so")
	if code, ok := compiled.libraries[source]; ok {
		if err := os.WriteFile(lib, code, 0o700); err != nil {
			t.Fatal(err)
		}
	} else {
		compile(t, source, lib)
	}
	h, err := purego.Dlopen(lib, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// compile makes a library of a source, and adds it to those that are compiled.
func compile(t *testing.T, source, lib string) {
	t.Helper()
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		t.Skip("needs gcc, which compiles the consumer")
	}
	dir := t.TempDir()
	if err := os.CopyFS(dir, sources); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), gcc, "-O1", "-Wall", "-Werror", "-fPIC", "-shared", "-o", lib, filepath.Join(dir, "testdata", source), "-ldl").CombinedOutput()
	if bytes.Contains(out, []byte(".h: No such file")) {
		t.Skipf("needs the headers of the C library: %s", out)
	}
	if err != nil {
		t.Fatalf("compiling the consumer: %v\n%s", err, out)
	}
	code, err := os.ReadFile(lib)
	if err != nil {
		t.Fatal(err)
	}
	if compiled.libraries == nil {
		compiled.libraries = make(map[string][]byte)
	}
	compiled.libraries[source] = code
}

func function(t *testing.T, library uintptr, name string) uintptr {
	t.Helper()
	f, err := purego.Dlsym(library, name)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func call(f uintptr, a *DeviceArray, s *Schema) uint64 {
	r, _, _ := purego.SyscallN(f, uintptr(unsafe.Pointer(a)), uintptr(unsafe.Pointer(s)))
	return uint64(r)
}

func mix(h, v uint64) uint64 { return (h ^ v) * 1099511628211 }

const seed = 14695981039346656037

// hashed is what the consumer computes of a value.
func hashed(h uint64, a arrow.Array, i int) uint64 {
	if a.IsNull(i) {
		return mix(h, 0xdead)
	}
	text := func(p string) uint64 {
		h = mix(h, uint64(len(p)))
		for _, b := range []byte(p) {
			h = mix(h, uint64(b))
		}
		return h
	}
	switch a := a.(type) {
	case *array.Boolean:
		if a.Value(i) {
			return mix(h, 1)
		}
		return mix(h, 0)
	case *array.Int8:
		return mix(h, uint64(uint8(a.Value(i))))
	case *array.Uint16:
		return mix(h, uint64(a.Value(i)))
	case *array.Int32:
		return mix(h, uint64(uint32(a.Value(i))))
	case *array.Int64:
		return mix(h, uint64(a.Value(i)))
	case *array.Float32:
		return mix(h, uint64(math.Float32bits(a.Value(i))))
	case *array.Float64:
		return mix(h, math.Float64bits(a.Value(i)))
	case *array.String:
		return text(a.Value(i))
	case *array.LargeString:
		return text(a.Value(i))
	case *array.Binary:
		return text(string(a.Value(i)))
	case *array.StringView:
		return text(a.Value(i))
	case *array.Dictionary:
		return hashed(h, a.Dictionary(), a.GetValueIndex(i))
	case *array.Struct:
		for c := range a.NumField() {
			h = hashed(h, a.Field(c), i)
		}
		return h
	case *array.List:
		from, to := a.ValueOffsets(i)
		h = mix(h, uint64(uint32(to-from)))
		for j := from; j < to; j++ {
			h = hashed(h, a.ListValues(), int(j))
		}
		return h
	}
	panic(a.DataType().String())
}

func hashedRows(rows int, cols ...arrow.Array) uint64 {
	h := uint64(seed)
	for i := range rows {
		for _, c := range cols {
			h = hashed(h, c, i)
		}
	}
	return h
}

func consumable() *arrow.Schema {
	p := arrow.PrimitiveTypes
	return arrowgen.Schema(p.Int64, p.Int8, p.Uint16, p.Int32, p.Float32, p.Float64, arrow.FixedWidthTypes.Boolean,
		arrow.BinaryTypes.String, arrow.BinaryTypes.LargeString, arrow.BinaryTypes.Binary, arrow.BinaryTypes.StringView,
		&arrow.DictionaryType{IndexType: p.Int16, ValueType: arrow.BinaryTypes.String},
		arrow.ListOf(arrow.ListOf(p.Int32)),
		arrow.StructOf(arrow.Field{Name: "a", Type: p.Int32, Nullable: true}, arrow.Field{Name: "b", Type: arrow.BinaryTypes.String, Nullable: true}))
}

// A program in C reads what was exported, every value of it, and releases it.
func TestConsumerInC(t *testing.T) {
	lib := buildConsumer(t)
	r := newRig(t, nil)
	if seed != binary.BigEndian.Uint64([]byte{0xcb, 0xf2, 0x9c, 0xe4, 0x84, 0x22, 0x23, 0x25}) {
		t.Fatal("the seed is not FNV's")
	}
	for _, rows := range []int{0, 1, 100, 5000} {
		for _, form := range []batch.PayloadType{batch.PlainImage, batch.ScatteredImage} {
			g := arrowgen.New(uint64(rows))
			rec := g.Record(consumable(), rows)
			b := r.put(t, rec, form)

			a, s := r.export(t, b, Config{})
			if got, want := call(lib.consume, a, s), hashedRows(rows, rec.Columns()...); got != want {
				t.Errorf("%d rows of a %s: the consumer read %#x, want %#x", rows, form, got, want)
			}
			if b.Info().State != batch.Idle {
				t.Errorf("the batch is %s after its release", b.Info().State)
			}

			a, s = r.export(t, b, Config{})
			if got, want := call(lib.consumeChild, a, s), hashedRows(rows, rec.Column(0)); got != want {
				t.Errorf("%d rows of a %s: of a child moved away the consumer read %#x, want %#x", rows, form, got, want)
			}
			if b.Info().State != batch.Idle {
				t.Errorf("the batch is %s after its release", b.Info().State)
			}
			r.drop(t, b)
			rec.Release()
		}
	}
}

// What C has made, with a release callback of its own, is imported, and released once.
func TestProducerInC(t *testing.T) {
	lib := buildConsumer(t)
	r := newRig(t, nil)
	rec := arrowgen.New(8).Record(consumable(), 500)
	defer rec.Release()
	b := r.put(t, rec, batch.PlainImage)
	released := func() int { n, _, _ := purego.SyscallN(lib.releases); return int(n) }
	for i, away := range []bool{false, true} {
		a, s := r.export(t, b, Config{})
		call(lib.produce, a, nil)
		table, err := Import(t.Context(), r.mover, r.gpu, a, s, Config{})
		if err != nil {
			t.Fatal(err)
		}
		c := r.batch(t, table)
		r.says(t, c, rec)
		if released() != i {
			t.Errorf("released %d times while it is in use", released())
		}
		if away {
			if err := r.mover.Move(t.Context(), c, onHost); err != nil {
				t.Fatal(err)
			}
		}
		r.drop(t, c)
		if released() != i+1 || b.Info().State != batch.Idle {
			t.Errorf("released %d times, want %d; the batch is %s", released(), i+1, b.Info().State)
		}
	}
	r.drop(t, b)
}

// A consumer reads, and releases, after everything was closed that the batch was in.
func TestConsumerInCIsLast(t *testing.T) {
	lib := buildConsumer(t)
	tiertest.NoLeaks(t)
	for _, form := range []batch.PayloadType{batch.PlainImage, batch.ScatteredImage} {
		r := newRig(t, nil)
		rec := arrowgen.New(5).Record(consumable(), 3000)
		defer rec.Release()
		b := r.put(t, rec, form)
		a, s := r.export(t, b, Config{Failed: func(err error) { t.Error(err) }})
		again, t2 := r.export(t, b, Config{Failed: func(err error) { t.Error(err) }})
		r.drop(t, b)
		if err := r.close(); err != nil {
			t.Fatal(err)
		}
		if n := len(r.gpu.Leaks()); n == 0 {
			t.Error("what the consumer has is not reported")
		}
		want := hashedRows(3000, rec.Columns()...)
		if got := call(lib.consume, a, s); got != want {
			t.Errorf("a %s of a closed device: the consumer read %#x, want %#x", form, got, want)
		}
		if got := call(lib.consume, again, t2); got != want {
			t.Errorf("a %s that another had, too: the consumer read %#x, want %#x", form, got, want)
		}
	}
}
