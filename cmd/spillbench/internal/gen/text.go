package gen

import (
	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
)

// poolSize is the length of the text that comments are cut from, as TPC-H's
// dbgen does it; 1 MiB stays in the cache, and no row repeats another's by plan.
const poolSize = 1 << 20

var vocabulary = []string{
	"accounts", "across", "according", "after", "against", "along", "asymptotes", "beans", "blithely", "bold",
	"carefully", "courts", "daringly", "deposits", "detect", "dependencies", "ducks", "escapades", "even", "excuses",
	"express", "final", "fluffily", "foxes", "furiously", "grouches", "haggle", "ideas", "instructions", "ironic",
	"nag", "packages", "pending", "pinto", "platelets", "quickly", "quietly", "regular", "requests", "ruthlessly",
	"silent", "sleep", "slyly", "special", "theodolites", "unusual", "warhorses", "warthogs", "waters", "wake",
}

// text is the pool that comments are cut from.
type text struct{ pool []byte }

func newText(seed uint64) text {
	pool := make([]byte, 0, poolSize+64)
	x := mix(seed ^ step)
	for len(pool) < poolSize {
		w := mix(x)
		pool = append(pool, vocabulary[below(w, uint64(len(vocabulary)))]...)
		if w&15 == 0 {
			pool = append(pool, '.')
		}
		pool = append(pool, ' ')
		x += step
	}
	return text{pool}
}

// dictionaries are what the coded columns share over all batches.
type dictionaries struct{ flags, modes arrow.Array }

func newDictionaries() dictionaries {
	return dictionaries{flags: stringArray(flags), modes: stringArray(modes)}
}

func stringArray(values []string) arrow.Array {
	b := array.NewStringBuilder(memory.DefaultAllocator)
	defer b.Release()
	b.AppendValues(values, nil)
	return b.NewArray()
}
