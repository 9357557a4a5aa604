package sim_test

import (
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/sim"
)

// A device with the memory of a small GPU and the bandwidth of a PCIe 4 ×16
// link.
func ExampleNew() {
	dev, err := sim.New(sim.Config{
		Memory:                   1 << 30, // page frames are taken when they are first written
		BytesPerSecondToDevice:   25e9,
		BytesPerSecondFromDevice: 25e9,
		Latency:                  10 * time.Microsecond,
	})
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close()
	s, err := dev.NewStream()
	if err != nil {
		log.Fatal(err)
	}
	defer s.Close()
	a, err := dev.Alloc(s, 3)
	if err != nil {
		log.Fatal(err)
	}
	out := make([]byte, 3)
	err = errors.Join(
		dev.Fill(s, a, 'x', 3),
		dev.CopyRegions(s, []tier.Region{{Dst: a + 1, HostSrc: []byte{'y'}}}),
		dev.CopyRegions(s, []tier.Region{{HostDst: out, Src: a}}),
		s.Sync(),
	)
	fmt.Printf("%s %v\n", out, err)
	fmt.Println(dev.CopyRegions(s, []tier.Region{{HostDst: make([]byte, 4), Src: a}}) != nil)
	held := dev.Outstanding()
	err = errors.Join(dev.Free(s, a), s.Sync()) // the memory is free when the work of the stream is done
	fmt.Println(held, err, dev.Outstanding())
	// Output:
	// xyx <nil>
	// true
	// 256 <nil> 0
}
