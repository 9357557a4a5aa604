package quota_test

import (
	"errors"
	"fmt"
	"log"

	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/sim"
)

// Two devices share a budget that is smaller than either.
func ExampleBudget_Wrap() {
	b, err := quota.NewBudget(1<<20, "the query's GPU budget")
	if err != nil {
		log.Fatal(err)
	}
	var devices []tier.Device
	var streams []tier.Stream
	for range 2 {
		raw, err := sim.New(sim.Config{Memory: 16 << 20})
		if err != nil {
			log.Fatal(err)
		}
		dev, err := b.Wrap(raw)
		if err != nil {
			log.Fatal(err)
		}
		defer dev.Close()
		s, err := dev.NewStream()
		if err != nil {
			log.Fatal(err)
		}
		devices, streams = append(devices, dev), append(streams, s)
	}
	a, err := devices[0].Alloc(streams[0], 768<<10)
	if err != nil {
		log.Fatal(err)
	}
	_, err = devices[1].Alloc(streams[1], 512<<10)
	var full *tier.OutOfBudgetError
	fmt.Println(errors.As(err, &full), errors.Is(err, tier.ErrNoSpace))
	fmt.Println(full)
	if err := devices[0].Free(streams[0], a); err != nil {
		log.Fatal(err)
	}
	_, err = devices[1].Alloc(streams[1], 512<<10)
	fmt.Println(err, b.Stats().Live, b.Stats().Peak)
	// Output:
	// true true
	// the query's GPU budget has no room for 524288 bytes: 786432 of 1048576 are in use, 262144 remain
	// <nil> 524288 786432
}
