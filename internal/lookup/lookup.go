// Package lookup finds the place of a key in a list, for lists that are searched once for each of
// their items. Such lists are short as a rule, and then they are read. A long one would cost
// the square of its length, so it gets a table when reading has cost as much as a table does.
package lookup

import "sync/atomic"

// few is up to how many items a list is always read. It is also for how many readings of a
// longer list a table could be made: 5 ns for an item that is read, 40 ns for one in a table.
const few = 8

// Table finds places in one list, which may grow but not change otherwise. The zero value is
// ready, and a short list needs no more. It is not safe for concurrent use.
type Table[K comparable] struct {
	long *long[K] // nil before the list is long
}

// long is what a long list needs.
type long[K comparable] struct {
	read  int       // items, so far
	known int       // items that are in at
	at    map[K]int // nil while the list is read
}

// Of returns the first place of k in list, -1 if it is not there.
func (t *Table[K]) Of(list []K, k K) int {
	return t.Find(len(list), func(i int) K { return list[i] }, k)
}

// Find is Of for a list of n items that have keys.
func (t *Table[K]) Find(n int, key func(i int) K, k K) int {
	if n <= few {
		return read(n, key, k)
	}
	if t.long == nil {
		t.long = new(long[K])
	}
	l := t.long
	if l.at == nil && l.read <= few*n {
		at := read(n, key, k)
		items := n
		if at >= 0 {
			items = at + 1
		}
		l.read += items
		steps.Add(int64(items))
		return at
	}
	if l.at == nil {
		l.at = make(map[K]int, n)
	}
	steps.Add(int64(1 + n - l.known))
	for ; l.known < n; l.known++ {
		if _, ok := l.at[key(l.known)]; !ok {
			l.at[key(l.known)] = l.known
		}
	}
	if at, ok := l.at[k]; ok {
		return at
	}
	return -1
}

// read looks for k item by item.
func read[K comparable](n int, key func(i int) K, k K) int {
	for i := range n {
		if key(i) == k {
			return i
		}
	}
	return -1
}

var steps atomic.Int64

// Steps returns how many items of long lists were read, or looked up in tables, since the
// process began. Tests compare it for lists of different lengths.
func Steps() int64 { return steps.Load() }
