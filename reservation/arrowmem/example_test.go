package arrowmem_test

import (
	"errors"
	"fmt"
	"log"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"

	arena "github.com/spillway-db/spillway/internal/host"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/arrowmem"
	"github.com/spillway-db/spillway/tier"
)

// newExample returns a manager of one arena. An engine has one of all its spaces.
func newExample() *reservation.Manager {
	a, err := arena.NewArena(arena.Config{Capacity: 1 << 20, Node: -1})
	if err != nil {
		log.Fatal(err)
	}
	s, err := tier.NewSpace(tier.SpaceConfig{ID: tier.ID{Kind: tier.Host}, Capacity: 1 << 20, Pool: a})
	if err != nil {
		log.Fatal(err)
	}
	m, err := reservation.NewManager(reservation.Config{Spaces: []*tier.Space{s}})
	if err != nil {
		log.Fatal(err)
	}
	return m
}

// Arrow arrays are built inside a promise, and a promise that is too small is an
// error, though arrow-go's builders know none.
func ExampleAllocator() {
	m := newExample() // of an arena of 1 MiB
	defer m.Close()
	r, err := m.TryReserve(reservation.AnyInTier(tier.Host), 600, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer r.Release()
	a, err := arrowmem.New(r)
	if err != nil {
		log.Fatal(err)
	}
	defer a.Close()

	numbers := func(n int) (rows arrow.Array, err error) {
		b := array.NewInt32Builder(a)
		defer b.Release() // also what it had when it was refused
		err = arrowmem.Guard(func() error {
			for i := range n {
				b.Append(int32(i))
			}
			rows = b.NewArray()
			return nil
		})
		return rows, err
	}
	rows, err := numbers(5)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(rows, "in", r.Bytes()-r.Unused(), "bytes;", r.Unused(), "unused")
	rows.Release()

	_, err = numbers(1000)
	fmt.Println(errors.Is(err, reservation.ErrExceeded), r.Bytes()-r.Unused())
	// Output:
	// [0 1 2 3 4] in 128 bytes; 512 unused
	// true 0
}
