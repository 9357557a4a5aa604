// Package lookup finds the place of a key in a list, for lists that are searched once for each of
// their items. Such lists are short as a rule, and then they are read. A long one would cost
// the square of its length, so it gets a table.
package lookup

import "sync/atomic"

// few is up to how many items a list is read.
const few = 8

// Table finds places in one list, which may grow but not change otherwise. The zero value is
// ready, and a short list needs no more. It is not safe for concurrent use.
type Table[K comparable] struct {
	at    map[K]int // nil before the list is long
	known int       // items that are in at
}

// Of returns the first place of k in list, -1 if it is not there.
func (t *Table[K]) Of(list []K, k K) int {
	return t.Find(len(list), func(i int) K { return list[i] }, k)
}

// Find is Of for a list of n items that have keys.
func (t *Table[K]) Find(n int, key func(i int) K, k K) int {
	if n <= few {
		for i := range n {
			if key(i) == k {
				return i
			}
		}
		return -1
	}
	if t.at == nil {
		t.at = make(map[K]int, n)
	}
	steps.Add(int64(1 + n - t.known))
	for ; t.known < n; t.known++ {
		if _, ok := t.at[key(t.known)]; !ok {
			t.at[key(t.known)] = t.known
		}
	}
	if at, ok := t.at[k]; ok {
		return at
	}
	return -1
}

var steps atomic.Int64

// Steps returns how many items of long lists were put into tables or looked up there, since the
// process began. Tests compare it for lists of different lengths.
func Steps() int64 { return steps.Load() }
