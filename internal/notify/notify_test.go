package notify

import (
	"slices"
	"sync"
	"sync/atomic"
	"testing"
)

func TestList(t *testing.T) {
	var l List
	var called []int
	all := func() []int {
		called = nil
		l.Each(func(f func()) { f() })
		return called
	}
	if !l.IsEmpty() || len(all()) != 0 {
		t.Error("the zero value is not empty")
	}
	var cancels [4]func()
	for i := range cancels {
		cancels[i] = l.Add(func() { called = append(called, i) })
	}
	if got := all(); !slices.Equal(got, []int{0, 1, 2, 3}) {
		t.Errorf("called were %v", got)
	}
	cancels[1]()
	cancels[1]() // changes nothing
	if got := all(); !slices.Equal(got, []int{0, 2, 3}) {
		t.Errorf("called were %v", got)
	}
	l.Add(func() { cancels[3](); called = append(called, 9) }) // one that changes the list while it is called
	if got := all(); !slices.Equal(got, []int{0, 2, 3, 9}) {
		t.Errorf("called were %v", got)
	}
	if got := all(); !slices.Equal(got, []int{0, 2, 9}) {
		t.Errorf("called were %v", got)
	}
}

func TestListAtOnce(t *testing.T) {
	var l List
	var calls atomic.Int64
	keep := l.Add(func() { calls.Add(1) })
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 100 {
				cancel := l.Add(func() {})
				l.Each(func(f func()) { f() })
				cancel()
			}
		})
	}
	all.Wait()
	if n := calls.Load(); n != 800 {
		t.Errorf("the first was called %d times, want 800", n)
	}
	if keep(); !l.IsEmpty() {
		t.Error("something is left")
	}
}
