package permit_test

import (
	"context"
	"fmt"
	"log"

	"github.com/spillway-db/spillway/reservation/permit"
)

func Example() {
	pool, err := permit.New(permit.Config{}) // 256 MiB of device memory, 512 MiB of host memory, 16 slots
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()

	held, err := pool.Acquire(context.Background(), permit.Request{
		Bytes: map[string]int64{permit.Host: 64 << 20}, Spill: true,
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("may write to disk:", held.CanSpill(), "with", held.Bytes(permit.Host), "bytes under way")
	fmt.Println(pool.Stats().FreeSlots, "slots are left")
	err = held.Release()
	fmt.Println(pool.Stats().FreeSlots, "in the end;", err)
	// Output:
	// may write to disk: true with 67108864 bytes under way
	// 15 slots are left
	// 16 in the end; <nil>
}

// All or nothing: a request that does not get everything gets nothing, and its error names what was
// missing.
func ExamplePool_TryAcquire() {
	pool, err := permit.New(permit.Config{
		Budgets: []permit.Budget{{Name: "device", Bytes: 1000}, {Name: "host", Bytes: 500}},
		Slots:   new(permit.Unlimited),
	})
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()

	first, err := pool.TryAcquire(permit.Request{Bytes: map[string]int64{"host": 400, "device": 600}})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(first.TotalBytes())

	_, err = pool.TryAcquire(permit.Request{Bytes: map[string]int64{"host": 400}})
	fmt.Println(err)
	first.Release()
	// Output:
	// 1000 <nil>
	// permit budget "host" (SetTotal makes it larger) has no room for 400 bytes: 400 of 500 are in use, 100 remain
}
