package admission_test

import (
	"context"
	"fmt"

	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/tier"
)

// A task whose estimate is too low runs out of memory and is tried again with a higher
// one; the next task of its kind has the right one from the start.
func Example() {
	gpu, err := tier.NewSpace(tier.SpaceConfig{
		ID: tier.ID{Kind: tier.GPU}, Capacity: 1 << 20, Node: -1, Pool: pool{1, new(devpool.Loss), nil},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	m, err := reservation.NewManager(reservation.Config{Spaces: []*tier.Space{gpu}})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer m.Close()
	a, err := admission.New(admission.Config{Reservations: m})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer a.Close()

	join := func(_ context.Context, g *admission.Grant) error {
		table, err := g.Alloc(500_000) // five times the input
		fmt.Printf("%d bytes reserved, out of memory: %v\n", g.Reservation().Bytes(), err != nil)
		if err != nil {
			return err
		}
		g.Produced(50_000)
		return table.Release()
	}
	for range 2 {
		if err := a.Run(context.Background(), admission.Estimate{Operator: "join", Input: 100_000}, join); err != nil {
			fmt.Println(err)
		}
	}
	fmt.Printf("%d bytes are in use\n", gpu.State().Used())
	// Output:
	// 300000 bytes reserved, out of memory: true
	// 600000 bytes reserved, out of memory: false
	// 600000 bytes reserved, out of memory: false
	// 0 bytes are in use
}
