package faultdev_test

import (
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/faultdev"
	"github.com/spillway-db/spillway/tier/sim"
)

// A device whose second allocation finds no memory.
func Example() {
	gpu, err := sim.New(sim.Config{Memory: 1 << 20})
	if err != nil {
		fmt.Println(err)
		return
	}
	dev := faultdev.New(gpu, 1, faultdev.Rule{
		Ops: []string{"alloc"}, Skip: 1, Times: 1,
		Effect: faultdev.OutOfMemory(),
	})
	defer dev.Close()
	s, err := dev.NewStream()
	if err != nil {
		fmt.Println(err)
		return
	}
	for range 3 {
		_, err := dev.Alloc(s, 1024)
		fmt.Println("no memory:", errors.Is(err, tier.ErrNoSpace))
	}
	// Output:
	// no memory: false
	// no memory: true
	// no memory: false
}
