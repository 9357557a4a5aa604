package transfer

import (
	"runtime"
	"testing"
	"weak"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
)

// TestManyNamesOfOneDictionary: names are looked at when there are twice as many as were in use, so
// that many cost little each; those whose arrays or dictionaries are gone are forgotten.
func TestManyNamesOfOneDictionary(t *testing.T) {
	const n = 1000
	var s Dictionaries
	d := &Dictionary{Store: &s, Held: 1}
	all := make([]*array.Data, n)
	sweeps := 0
	for i := range all {
		all[i] = array.NewData(arrow.PrimitiveTypes.Int8, 0, nil, nil, 0, 0)
		was := s.Mu.sweep
		s.nameLocked(d, weak.Make(all[i]), nil)
		if s.Mu.sweep != was {
			sweeps++
		}
	}
	if len(s.Mu.Known) != n || sweeps > 10 {
		t.Errorf("%d names, want %d; they were gone through %d times", len(s.Mu.Known), n, sweeps)
	}
	runtime.KeepAlive(all)
	clear(all)
	runtime.GC()
	for range n {
		s.nameLocked(d, weak.Make(array.NewData(arrow.PrimitiveTypes.Int8, 0, nil, nil, 0, 0)), nil)
	}
	if len(s.Mu.Known) > n+minSweep {
		t.Errorf("%d names are left of arrays that are gone", len(s.Mu.Known))
	}
	kept := array.NewData(arrow.PrimitiveTypes.Int8, 0, nil, nil, 0, 0)
	s.nameLocked(d, weak.Make(kept), nil)
	s.letGo(d)
	if names := s.Names(); names != 0 {
		t.Errorf("%d names are left of a dictionary that is gone", names)
	}
	runtime.KeepAlive(kept)
}
