package transfer

import (
	"runtime"
	"testing"
	"weak"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
)

// TestManyNamesOfOneDictionary: names are looked at when there are twice as many as were in use, so
// that many cost little each; those whose arrays are gone are forgotten.
func TestManyNamesOfOneDictionary(t *testing.T) {
	const n = 1000
	var s Dictionaries
	d := &Dictionary{Store: &s, Held: 1}
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
		if len(s.Mu.Known) != len(d.keys) {
			t.Fatalf("%d names, %d known", len(d.keys), len(s.Mu.Known))
		}
	}
	if len(d.keys) > n+leastSweep {
		t.Errorf("%d names are left of arrays that are gone", len(d.keys))
	}
}
