package leases_test

import (
	"fmt"

	"github.com/spillway-db/spillway/internal/leases"
)

func ExampleLeastLoaded() {
	for _, l := range leases.LeastLoaded([]leases.Load{{UUID: "GPU-a", Bytes: 4096}, {UUID: "GPU-c"}, {UUID: "GPU-b"}}) {
		fmt.Println(l.UUID)
	}
	// Output:
	// GPU-b
	// GPU-c
	// GPU-a
}
