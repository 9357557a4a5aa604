package quota_test

import (
	"fmt"

	"github.com/spillway-db/spillway/reservation/quota"
)

func Example() {
	settings, err := quota.FromEnv(func(name string) (string, bool) {
		return "1.5GiB", name == "SPILLWAY_GPU_MEMORY_LIMIT"
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	limit, err := settings.Limit.Of(8 << 30)
	if err != nil {
		fmt.Println(err)
		return
	}
	q, err := quota.New(quota.Config{Limit: limit, Name: settings.Source})
	if err != nil {
		fmt.Println(err)
		return
	}
	m := q.Member() // each space has one
	fmt.Println(m.Charge(1 << 30))
	fmt.Println(m.Charge(1 << 30))
	// Output:
	// <nil>
	// SPILLWAY_GPU_MEMORY_LIMIT has no room for 1073741824 bytes: 1073741824 of 1610612736 are in use, 536870912 remain
}
