package convert

import (
	"fmt"
	"slices"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/internal/equal"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/transfer"
	"github.com/spillway-db/spillway/tier"
)

// fewWords makes a dictionary that takes a page as an image of its own.
func fewWords(i int) arrow.Array {
	b := array.NewStringBuilder(memory.DefaultAllocator)
	defer b.Release()
	b.AppendValues([]string{"one", "two", fmt.Sprint(i)}, nil)
	return b.NewArray()
}

func fewCodes() arrow.Array {
	b := array.NewInt32Builder(memory.DefaultAllocator)
	defer b.Release()
	b.AppendValues([]int32{0, 2, 1, 2}, nil)
	return b.NewArray()
}

// structOf makes one struct array of columns.
func structOf(fields []arrow.Field, cols []arrow.Array) arrow.Array {
	var children []arrow.ArrayData
	for _, c := range cols {
		children = append(children, c.Data())
	}
	return array.MakeFromData(array.NewData(arrow.StructOf(fields...), cols[0].Len(), []*memory.Buffer{nil}, children, 0, 0))
}

// manyCoded makes a record with n columns of codes, each for a dictionary of its own.
func manyCoded(shape string, n int) arrow.RecordBatch {
	var fields []arrow.Field
	var cols []arrow.Array
	add := func(c arrow.Array) {
		fields = append(fields, arrow.Field{Name: fmt.Sprint(len(cols)), Type: c.DataType()})
		cols = append(cols, c)
	}
	codes := fewCodes()
	for i := range n {
		add(array.NewDictionaryArray(codedType, codes, fewWords(i)))
	}
	switch shape {
	case "twice": // two columns each, the second time in another order
		for i := range n {
			add(cols[i*7919%n])
		}
	case "struct":
		s := structOf(fields, cols)
		fields, cols = nil, nil
		add(s)
	case "of dictionaries":
		for i, c := range cols {
			outer := &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int32, ValueType: codedType}
			fields[i].Type, cols[i] = outer, array.NewDictionaryArray(outer, codes, c)
		}
	case "of one": // whose values are structs of n dictionaries
		s := structOf(fields, cols)
		fields, cols = nil, nil
		add(array.NewDictionaryArray(&arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int32, ValueType: s.DataType()}, codes, s))
	}
	return array.NewRecordBatch(arrow.NewSchema(fields, nil), cols, 4)
}

// openedOnHeap opens a layout's image, which it lays out on the heap.
func openedOnHeap(t *testing.T, l *image.Layout) arrow.RecordBatch {
	t.Helper()
	var bodies [][][]byte
	for _, part := range append(l.Dictionaries, l) {
		body := [][]byte{make([]byte, part.Desc.Body)}
		if err := part.WriteTo(body); err != nil {
			t.Fatal(err)
		}
		bodies = append(bodies, body)
	}
	desc, err := l.Descriptor()
	if err != nil {
		t.Fatal(err)
	}
	last := len(bodies) - 1
	rec, err := image.Open(desc, bodies[last], func() {}, bodies[:last]...)
	if err != nil {
		t.Fatal(err)
	}
	return rec
}

// manyDictionaries puts a record of n dictionaries, moves it and reads it.
func manyDictionaries(t *testing.T, shape string, outside bool, n int) {
	m := newMachine(t, machineConfig{gpu: 32 << 20, host: 32 << 20, disk: 32 << 20, outside: outside})
	rec := manyCoded(shape, n)
	same := func(got arrow.RecordBatch, err error) {
		if err != nil {
			t.Fatal(err)
		}
		if err := equal.Records(rec, got); err != nil {
			t.Error(err)
		}
		for i := range n {
			if shape != "twice" {
				break
			}
			if got.Column(n+i).Data().Dictionary() != got.Column(i*7919%n).Data().Dictionary() {
				t.Errorf("columns %d and %d do not share their dictionary any more", n+i, i*7919%n)
			}
		}
		got.Release()
	}
	inline := int64(image.MaxInline)
	if outside {
		inline = 0
	}
	l, err := image.NewLayout(rec, inline)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if len(l.Dictionaries) > 0 != outside {
		t.Errorf("%d dictionaries are outside of the body", len(l.Dictionaries))
	}
	dicts, _, end := m.mover.cfg.Builtin.Dicts.Resolve(l.Dictionaries, false)
	if end(); len(dicts) != len(l.Dictionaries) {
		t.Errorf("%d of %d dictionaries are distinct", len(dicts), len(l.Dictionaries))
	}
	one := m.make(t, rec, tier.GPU)
	two := m.make(t, rec, tier.GPU) // has the same dictionaries
	leaves, err := two.TryTransit()
	if err != nil {
		t.Fatal(err)
	}
	gpu := m.spaces[tier.GPU]
	there, missing := m.mover.Charges(gpu, one, two)
	if bodies := gpu.Charge(one.Info().Descriptor.Body); there != gpu.State().Used()-bodies || missing != bodies {
		t.Errorf("%d bytes are there and %d are missing, of %d and %d", there, missing, gpu.State().Used(), bodies)
	}
	if err := leaves.Abort(); err != nil {
		t.Fatal(err)
	}
	drop(t, two)
	m.move(t, one, tier.Host)
	same(m.record(t, one), nil)
	m.move(t, one, tier.Disk)
	same(m.columns(t, one, image.Selection{}))
	m.rests(t, one, tier.Disk)
	drop(t, one)
	same(openedOnHeap(t, l), nil)
}

// TestManyDictionariesOfEveryShape: a batch of many dictionaries is laid out, moved and opened.
func TestManyDictionariesOfEveryShape(t *testing.T) {
	for _, c := range []struct {
		shape   string
		outside bool
	}{
		{"each", true}, {"twice", true}, {"struct", true}, {"of dictionaries", true}, {"of one", true}, {"twice", false},
	} {
		t.Run(fmt.Sprintf("%s/outside=%v", c.shape, c.outside), func(t *testing.T) {
			manyDictionaries(t, c.shape, c.outside, 240)
		})
	}
}

// TestPartsAreFoundByNumber: resolve does not search the dictionaries that a dictionary uses.
func TestPartsAreFoundByNumber(t *testing.T) {
	var store transfer.Dictionaries
	l, err := image.NewLayout(manyCoded("of one", 20), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var layouts []*image.Layout // a search for the used ones does not find them
	for _, sub := range l.Dictionaries {
		other := *sub
		layouts = append(layouts, &other)
	}
	dicts, _, end := store.Resolve(layouts, false)
	defer end()
	last := dicts[len(dicts)-1]
	if len(dicts) != 21 || len(last.Parts) != 20 {
		t.Fatalf("%d dictionaries, the last with %d parts", len(dicts), len(last.Parts))
	}
	for i, p := range last.Parts {
		if p != dicts[i] {
			t.Errorf("part %d is another dictionary", i)
		}
	}
}

// TestManyDictionariesOfABatch: those of a batch are found, pinned and let go, each once.
func TestManyDictionariesOfABatch(t *testing.T) {
	const n = 500
	m := newMachine(t, machineConfig{gpu: 32 << 20, outside: true})
	b := m.put(t, manyCoded("each", n), tier.GPU)
	gpu, store := m.spaces[tier.GPU], &m.mover.cfg.Builtin.Dicts
	dicts := store.Of(b.Info().Descriptor.AllDictionaries())
	want := n * m.spaces[tier.Host].Charge(dicts[0].Body)
	if _, missing := store.Pin(m.spaces[tier.Host], dicts); missing != want {
		t.Errorf("%d bytes are missing where the batch is not, want %d", missing, want)
	}
	pins, missing := store.Pin(gpu, dicts)
	if len(pins) != n || missing != 0 {
		t.Errorf("%d of %d are pinned, and %d bytes are missing", len(pins), n, missing)
	}
	for i, c := range pins {
		if c.Dict != dicts[i] || c.Refs != 2 || c.Dict.Held != 0 {
			t.Fatalf("dictionary %d has %d references, and is held %d times", i, c.Refs, c.Dict.Held)
		}
	}
	if err := transfer.ReleaseAll(pins); err != nil {
		t.Fatal(err)
	}
	l, err := image.NewLayout(m.records[b.ID()], 0)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	again, _, end := store.Resolve(l.Dictionaries, false)
	end()
	for i, d := range again {
		if d != dicts[i] || d.Held != 0 {
			t.Fatalf("dictionary %d is held %d times", i, d.Held)
		}
	}
	// The caller must give each once: under the lock nothing is searched.
	twice, _ := store.Pin(gpu, []*transfer.Dictionary{dicts[0], dicts[0]})
	if len(twice) != 2 {
		t.Errorf("%d references to a dictionary that was given twice", len(twice))
	}
	if err := transfer.ReleaseAll(twice); err != nil {
		t.Fatal(err)
	}
	// A dictionary that two arrays are is taken once.
	before := gpu.State().Used()
	opened := m.record(t, b)
	fields := opened.Schema().Fields()
	mixed := array.NewRecordBatch(arrow.NewSchema(slices.Concat(fields, fields), nil),
		slices.Concat(m.records[b.ID()].Columns(), opened.Columns()), 4)
	both := m.put(t, mixed, tier.GPU)
	if used, want := gpu.State().Used()-before, both.Info().Bytes; used != want {
		t.Errorf("a batch of known dictionaries takes %d bytes, want %d", used, want)
	}
	mixed.Release()
	opened.Release()
}
