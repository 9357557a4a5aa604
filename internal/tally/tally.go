// Package tally counts by key, with a bound on the memory: only the keys that were counted latest are
// kept apart. The rest is counted together.
package tally

import (
	"container/list"
	"iter"
)

// Most is how many keys are kept apart.
const Most = 1024

// Table has a count for each key. Its zero value is empty. It is guarded by its owner.
type Table[K comparable, V interface{ Add(V) }] struct {
	by    map[K]*list.Element // of *row, also the one for others
	order list.List           // without the one for others; the latest is last
}

type row[K comparable, V any] struct {
	key   K
	count V
}

// Of returns the count of a key, which is made if there is none. If there are too many, the one that
// was not asked for for the longest time is added to that of others, which is made likewise.
func (t *Table[K, V]) Of(key, others K, make func(K) V) V {
	e := t.by[key]
	switch {
	case e == nil:
		if key != others && len(t.by) >= Most {
			t.fold(others, make)
		}
		e = t.push(key, others, make)
	case key != others:
		t.order.MoveToBack(e)
	}
	return e.Value.(*row[K, V]).count
}

func (t *Table[K, V]) push(key, others K, count func(K) V) *list.Element {
	r := &row[K, V]{key, count(key)}
	e := &list.Element{Value: r}
	if key != others {
		e = t.order.PushBack(r)
	}
	if t.by == nil {
		t.by = make(map[K]*list.Element)
	}
	t.by[key] = e
	return e
}

func (t *Table[K, V]) fold(others K, make func(K) V) {
	r := t.order.Remove(t.order.Front()).(*row[K, V])
	delete(t.by, r.key)
	t.Of(others, others, make).Add(r.count)
}

// Len returns how many counts there are.
func (t *Table[K, V]) Len() int { return len(t.by) }

// All yields all counts, in no order.
func (t *Table[K, V]) All() iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		for key, e := range t.by {
			if !yield(key, e.Value.(*row[K, V]).count) {
				return
			}
		}
	}
}
