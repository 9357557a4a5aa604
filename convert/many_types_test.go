package convert

import (
	"fmt"
	"runtime"
	"testing"
	"weak"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
)

// TestOneArrayUnderManyTypes: a dictionary's array that stands under many value types is a
// dictionary of each, and none is looked for among all others.
func TestOneArrayUnderManyTypes(t *testing.T) {
	const n = 100
	numbers := array.NewTimestampBuilder(memory.DefaultAllocator, &arrow.TimestampType{})
	numbers.AppendEmptyValues(1000)
	data := numbers.NewArray().Data().(*array.Data)
	codes := array.NewInt32Builder(memory.DefaultAllocator)
	codes.AppendEmptyValues(2)
	index := codes.NewArray()
	p := planner{inline: 0}
	for range 2 {
		for i := range n {
			dt := &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int32, ValueType: &arrow.TimestampType{TimeZone: fmt.Sprintf("+00:%02d", i)}}
			d := array.NewDataWithDictionary(dt, 2, index.Data().Buffers(), 0, 0, data)
			if err := p.child("a column", dt, d, 0, 2); err != nil {
				t.Fatal(err)
			}
		}
	}
	if len(p.outside.order) != n || len(p.outside.of) != n {
		t.Errorf("%d dictionaries, found in %d places, want %d each", len(p.outside.order), len(p.outside.of), n)
	}
}

// TestManyNamesOfOneDictionary: names are looked at when there are twice as many as were in use, so
// that many cost little each; those whose arrays are gone are forgotten.
func TestManyNamesOfOneDictionary(t *testing.T) {
	const n = 1000
	var s dictionaries
	d := &dictionary{store: &s, users: 1}
	all := make([]*array.Data, n)
	sweeps := 0
	for i := range all {
		all[i] = array.NewData(arrow.PrimitiveTypes.Int8, 0, nil, nil, 0, 0)
		was := d.sweep
		s.nameLocked(d, weak.Make(all[i]), nil)
		if d.sweep != was {
			sweeps++
		}
	}
	if len(d.keys) != n || sweeps > 10 {
		t.Errorf("%d names, want %d; they were gone through %d times", len(d.keys), n, sweeps)
	}
	runtime.KeepAlive(all)
	clear(all)
	runtime.GC()
	for range n {
		s.nameLocked(d, weak.Make(array.NewData(arrow.PrimitiveTypes.Int8, 0, nil, nil, 0, 0)), nil)
		if len(s.mu.known) != len(d.keys) {
			t.Fatalf("%d names, %d known", len(d.keys), len(s.mu.known))
		}
	}
	if len(d.keys) > n+leastSweep {
		t.Errorf("%d names are left of arrays that are gone", len(d.keys))
	}
}
