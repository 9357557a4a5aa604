package tier_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/sim"
)

// A space of device memory: bytes are promised, drawn as a buffer, used on a
// stream, and given back.
func Example() {
	dev, err := sim.New(sim.Config{Memory: 1 << 20})
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close()
	pool, err := tier.NewDevicePool(dev)
	if err != nil {
		log.Fatal(err)
	}
	gpu, err := tier.NewSpace(tier.SpaceConfig{
		ID:       tier.ID{Kind: tier.GPU},
		Capacity: 1 << 20,
		Pool:     pool,
	})
	if err != nil {
		log.Fatal(err)
	}
	defer gpu.Close()

	const text = "held by the device"
	charge := gpu.Charge(int64(len(text)))
	if err := gpu.Reserve(charge); err != nil {
		log.Fatal(err)
	}
	buf, err := gpu.Draw(int64(len(text)), nil, nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s: %+v\n", gpu.ID(), gpu.Usage())

	streams, err := tier.NewStreamPool(dev, 2)
	if err != nil {
		log.Fatal(err)
	}
	defer streams.Close()
	s, err := streams.Borrow(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	addr := buf.Memory().(tier.DeviceMemory).Addr()
	back := make([]byte, len(text))
	err = errors.Join(
		dev.CopyToDevice(s, addr, []byte(text)),
		dev.CopyToHost(s, back, addr), // in the order in which they were put there
		s.Sync(),
	)
	streams.Return(s)
	fmt.Printf("%s, %v\n", back, err)

	if err := buf.Release(); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s: %+v\n", gpu.ID(), gpu.Usage())
	fmt.Println(gpu.Reserve(1 << 20))
	// Output:
	// gpu:0: {Live:256 Retired:0 Reserved:0 Peak:256}
	// held by the device, <nil>
	// gpu:0: {Live:0 Retired:0 Reserved:0 Peak:256}
	// gpu:0 has no space for 1048576 bytes: 943718 available
}
