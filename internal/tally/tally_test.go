package tally

import "testing"

type count int

func (c *count) Add(o *count) { *c += *o }

// TestTable: the sum is kept however many keys there are, and so are those that are asked for all the
// time, and the last ones.
func TestTable(t *testing.T) {
	const others, always, keys = -1, -2, 5 * Most
	var table Table[int, *count]
	one := func(key int) { *table.Of(key, others, func(int) *count { return new(count) })++ }
	for i := range keys {
		one(i)
		one(always)
		if i == keys/2 {
			one(others)
		}
		if table.Len() > Most+1 {
			t.Fatalf("%d are kept", table.Len())
		}
	}
	sum := count(0)
	got := map[int]count{}
	for key, n := range table.All() {
		got[key] = *n
		sum += *n
	}
	if sum != 2*keys+1 || got[always] != keys || got[others] != keys-(Most-1)+1 {
		t.Errorf("%d in all, %d always, %d others", sum, got[always], got[others])
	}
	for i := range Most - 1 {
		if got[keys-1-i] != 1 {
			t.Fatalf("key %d has %d", keys-1-i, got[keys-1-i])
		}
	}
}
