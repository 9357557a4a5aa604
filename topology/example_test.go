package topology_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"

	"github.com/spillway-db/spillway/topology"
)

// What this machine has, as a table; what could not be read is at its end.
func ExampleDiscover() {
	top, err := topology.Discover(context.Background(), topology.Options{})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(top)
	for _, n := range top.Nodes {
		fmt.Println("node", n.ID, "has", len(n.CPUs), "CPUs and", n.MemoryBytes, "bytes")
	}
	fmt.Println("this process may take", top.Limits.MemoryBytes, "bytes, says", top.Limits.MemorySource)
}

// Whether a directory is a good place to spill to.
func ExampleDiskOf() {
	l, err := topology.DiskOf(context.Background(), os.TempDir(), topology.Options{})
	if err != nil {
		log.Fatal(err)
	}
	for _, d := range l.Disks {
		if d.Kind == topology.NVMe {
			fmt.Println(d.Name, "is fast, and near node", d.Node)
		}
	}
}

func ExampleSet() {
	set, err := topology.ParseSet("8,0-3,2-5")
	if err != nil {
		log.Fatal(err)
	}
	text, err := json.Marshal(map[string]topology.Set{"cpus": set})
	fmt.Println(set, len(set), set.Contains(4), string(text), err)
	// Output: 0-5,8 7 true {"cpus":"0-5,8"} <nil>
}
