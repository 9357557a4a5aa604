package compact

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"github.com/spillway-db/spillway/internal/testseed"
)

// TestTable compares a table with a map.
func TestTable(t *testing.T) {
	for seed := range testseed.Each(t, 4) {
		r := rand.New(rand.NewPCG(seed, 1))
		var numbers []uint32
		model := make(map[uint32]int)
		moves := 0
		table := Table[string, int]{Moved: func(p string, from, to uint32) {
			if _, ok := model[to]; ok || p != fmt.Sprint(model[from]) {
				t.Fatalf("%s moves from %d to %d", p, from, to)
			}
			model[to] = model[from]
			delete(model, from)
			numbers[slices.Index(numbers, from)] = to
			moves++
		}}
		for step := range 20_000 {
			if grow := step%10_000 < 5_000; len(numbers) == 0 || r.IntN(10) < 4 || grow && r.IntN(2) == 0 {
				n := table.Add(fmt.Sprint(step))
				if _, ok := model[n]; ok || n == 0 {
					t.Fatalf("number %d was in use", n)
				}
				if *table.At(n) != 0 {
					t.Fatalf("number %d begins with %d", n, *table.At(n))
				}
				*table.At(n) = step
				model[n] = step
				numbers = append(numbers, n)
			} else {
				i := r.IntN(len(numbers))
				n, v := numbers[i], fmt.Sprint(model[numbers[i]])
				delete(model, n)
				numbers[i] = numbers[len(numbers)-1]
				numbers = numbers[:len(numbers)-1]
				table.Remove(n)
				if s := table.Of(n); s == v {
					t.Fatalf("number %d has %q after its end", n, s)
				}
			}
			if table.Len() != len(model) {
				t.Fatalf("%d records, want %d", table.Len(), len(model))
			}
			if chunks := len(table.chunks) - len(table.vacant); chunks > 2+len(model)/(sparse-1) {
				t.Fatalf("%d chunks for %d records", chunks, len(model))
			}
		}
		if moves == 0 {
			t.Error("no record was moved")
		}
		all := make(map[string]int)
		for s := range table.All() {
			all[s]++
		}
		if len(all) != len(model) {
			t.Errorf("%d records are listed, want %d", len(all), len(model))
		}
		for n, v := range model {
			if all[fmt.Sprint(v)] != 1 {
				t.Errorf("number %d is listed %d times", n, all[fmt.Sprint(v)])
			}
			if *table.At(n) != v || table.Of(n) != fmt.Sprint(v) {
				t.Errorf("number %d has %d and %s, want %d", n, *table.At(n), table.Of(n), v)
			}
		}
		for _, n := range []uint32{0, 1 << 30} {
			if s := table.Of(n); s != "" {
				t.Errorf("number %d has %q", n, s)
			}
		}
	}
}

// TestSet compares a set with a map.
func TestSet(t *testing.T) {
	for seed := range testseed.Each(t, 4) {
		r := rand.New(rand.NewPCG(seed, 2))
		var set Set
		model := make(map[uint64]bool)
		for range 20_000 {
			id := r.Uint64N(2000)
			if r.IntN(4) == 0 {
				id <<= 40
			}
			if set.Has(id) != model[id] {
				t.Fatalf("%d is there: %v", id, set.Has(id))
			}
			if r.IntN(2) == 0 {
				set.Add(id)
				model[id] = true
			} else {
				set.Remove(id)
				delete(model, id)
			}
		}
		for id := range model {
			if !set.Has(id) {
				t.Errorf("%d is not there", id)
			}
			set.Remove(id)
		}
		if set.pages != nil {
			t.Error("an empty set keeps memory")
		}
	}
}

// TestOrder compares an order with a sorted list, for keys that differ in few or in all words.
func TestOrder(t *testing.T) {
	shapes := map[string]func(r *rand.Rand, step int) Key{
		"ascending":  func(_ *rand.Rand, step int) Key { return Key{3, 0, uint64(step)} },
		"descending": func(_ *rand.Rand, step int) Key { return Key{^uint64(step)} },
		"one word":   func(r *rand.Rand, _ int) Key { return Key{0, 0, 0, r.Uint64()} },
		"to and fro": func(_ *rand.Rand, step int) Key { return Key{0, uint64(1<<20 + (step%4000-2000)*(step%4000-2000)/64)} },
		"few keys":   func(r *rand.Rand, _ int) Key { return Key{r.Uint64N(3)} },
		"equal":      func(*rand.Rand, int) Key { return Key{7} },
		"mixed": func(r *rand.Rand, step int) Key {
			return Key{r.Uint64N(3), uint64(step % 5), r.Uint64N(40), r.Uint64N(2) * uint64(step)}
		},
	}
	type item struct {
		key    Key
		number uint32
	}
	tie := func(n uint32) uint64 { return uint64(n % 7) }
	for name, shape := range shapes {
		t.Run(name, func(t *testing.T) {
			for seed := range testseed.Each(t, 2) {
				r := rand.New(rand.NewPCG(seed, 3))
				blocks := make(map[uint32]*uint32)
				o := Order{Block: func(n uint32) *uint32 {
					if blocks[n] == nil {
						blocks[n] = new(uint32)
					}
					return blocks[n]
				}}
				if seed%2 == 0 {
					o.Tie = tie
				}
				var model []item
				check := func() {
					t.Helper()
					var got []item
					for n, k := range o.All() {
						got = append(got, item{k, n})
					}
					if len(model) > 0 {
						at, want := model[r.IntN(len(model))].key, slices.Clone(model)
						want = slices.DeleteFunc(want, func(it item) bool { return it.key.compare(&at) >= 0 })
						slices.Reverse(want)
						var got []item
						for n, k := range o.Before(at) {
							got = append(got, item{k, n})
						}
						if !slices.Equal(got, want) {
							t.Fatalf("%d are before %v, want %d", len(got), at, len(want))
						}
					}
					for i, b := range o.blocks {
						before := i > 0 && o.heads[i-1].compare(&b.head) > 0
						if len(b.numbers) == 0 {
							continue
						}
						if first := o.spot(b.numbers[0], b.key(0)); before || o.heads[i] != b.head || first.compare(&b.head) < 0 {
							t.Fatalf("block %d of %d begins at %v, its head is %v", i, len(o.blocks), first, b.head)
						}
					}
					if !slices.Equal(got, model) || o.Len() != len(model) {
						t.Fatalf("%d numbers, %d in order, want %d", o.Len(), len(got), len(model))
					}
				}
				next := uint32(0)
				for step := range 6000 {
					if len(model) > 0 && r.IntN(10) == 0 {
						i := r.IntN(len(model))
						next += 7 // what Tie looks at is the same
						to := next<<16 + model[i].number%7
						to -= (next << 16) % 7
						blocks[to] = blocks[model[i].number]
						delete(blocks, model[i].number)
						o.Renumber(model[i].number, to)
						model[i].number = to
					}
					if shrink := step%3000 > 2000; len(model) == 0 || !shrink && r.IntN(3) > 0 {
						it := item{shape(r, step), uint32(step + 1)}
						i, _ := slices.BinarySearchFunc(model, it, func(a, b item) int {
							s, to := o.spot(a.number, a.key), o.spot(b.number, b.key)
							if s.compare(&to) <= 0 {
								return -1
							}
							return 1
						})
						model = slices.Insert(model, i, it)
						o.Insert(it.number, it.key)
					} else {
						i := r.IntN(len(model))
						if k := o.Key(model[i].number); k != model[i].key {
							t.Fatalf("the key of %d is %v, want %v", model[i].number, k, model[i].key)
						}
						o.Remove(model[i].number)
						if *blocks[model[i].number] != 0 {
							t.Fatal("a number that was removed has a block")
						}
						model = slices.Delete(model, i, i+1)
					}
					if step%100 == 0 {
						check()
					}
				}
				for len(model) > 0 {
					o.Remove(model[0].number)
					model = model[1:]
				}
				if len(o.blocks) != 1 || len(o.names) > 100 || cap(o.heads) > 8 || cap(o.blocks[0].numbers) > blockLen/4 {
					t.Errorf("an empty order has %d blocks, %d names, room for %d numbers", len(o.blocks), len(o.names), cap(o.blocks[0].numbers))
				}
			}
		})
	}
}

// TestGivesBack: the memory of many records is free when they are gone.
func TestGivesBack(t *testing.T) {
	const n = 100_000
	used := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	type record struct{ block uint32 }
	numbers := make([]uint32, n)
	var set Set
	var o Order
	table := Table[*uint32, record]{Moved: func(p *uint32, from, to uint32) {
		*p = to
		o.Renumber(from, to)
	}}
	o = Order{Block: func(n uint32) *uint32 { return &table.At(n).block }}
	before := used()
	for i := range uint64(n) {
		numbers[i] = table.Add(&numbers[i])
		o.Insert(numbers[i], Key{1, 2, i * 7919 % n})
		set.Add(i)
	}
	full := used()
	for i, number := range numbers {
		o.Remove(number)
		table.Remove(number)
		set.Remove(uint64(i))
	}
	after := used()
	if each := (full - before) / n; each > 40 {
		t.Errorf("a record takes %d bytes, of which its owner's are 12", each)
	}
	if left := after - before; left > 100*1024 {
		t.Errorf("%d bytes are left", left)
	}
	runtime.KeepAlive(&table)
	runtime.KeepAlive(numbers)
	runtime.KeepAlive(&o)
	runtime.KeepAlive(&set)
}

// TestFewOfMany: where few of many are left, wherever they were, most of the memory is free.
func TestFewOfMany(t *testing.T) {
	const n, most = 200_000, 80 // of 1000
	type record [4]uint64
	used := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	r := rand.New(rand.NewPCG(1, 2))
	numbers := make([]uint32, n)
	places := make([]int, n)
	table := Table[*int, record]{Moved: func(p *int, _, to uint32) { numbers[*p] = to }}
	before := used()
	for i := range n {
		places[i] = i
		numbers[i] = table.Add(&places[i])
		table.At(numbers[i])[0] = uint64(i)
	}
	full := used() - before
	left := 0
	for i := range n {
		if r.IntN(100) == 0 {
			left++
			continue
		}
		table.Remove(numbers[i])
		numbers[i] = 0
	}
	if now := used() - before; now > full*most/1000 {
		t.Errorf("of %d records %d are left, and of %d bytes %d", n, left, full, now)
	}
	for i, number := range numbers {
		if number != 0 && (table.Of(number) != &places[i] || table.At(number)[0] != uint64(i)) {
			t.Fatalf("number %d is of another record than %d", number, i)
		}
	}
	for _, number := range numbers {
		if number != 0 {
			left--
		}
	}
	if left != 0 {
		t.Errorf("%d records are missing", left)
	}
	runtime.KeepAlive(&table)
}

// BenchmarkOrder is a change of one key, of a thousand and of a million.
func BenchmarkOrder(b *testing.B) {
	for _, n := range []int{1000, 1_000_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			blocks := make([]uint32, n+1)
			o := Order{Block: func(n uint32) *uint32 { return &blocks[n] }}
			for i := range n {
				o.Insert(uint32(i+1), Key{0, 1, uint64(i * 7919 % n)})
			}
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				number := uint32(i%n + 1)
				o.Remove(number)
				o.Insert(number, Key{0, 1, uint64(i * 104729 % n)})
				i++
			}
		})
	}
}
