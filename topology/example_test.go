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

// What lies between two devices decides what copies between them cost.
func ExampleTopology_Matrix() {
	top := topology.Topology{
		GPUs: []topology.GPU{
			{Index: 0, Bus: []string{"pci0000:00", "0000:00:01.0", "0000:01:00.0", "0000:02:00.0", "0000:03:00.0"}},
			{Index: 1, Bus: []string{"pci0000:80", "0000:80:01.0", "0000:81:00.0"}, Node: 1},
		},
		Disks: []topology.Disk{{Name: "nvme0n1", Bus: []string{"pci0000:00", "0000:00:01.0", "0000:01:00.0", "0000:02:01.0", "0000:04:00.0"}}},
	}
	m := top.Matrix()
	fmt.Println(m.Devices[0], m.Devices[2], m.Paths[0][2])
	fmt.Print(m)
	// Output:
	// GPU0 nvme0n1 PIX
	//
	// Paths
	//   -        GPU0  GPU1  nvme0n1
	//   GPU0     X     SYS   PIX
	//   GPU1     SYS   X     SYS
	//   nvme0n1  PIX   SYS   X
	//   (PIX: one PCI switch, SYS: two NUMA nodes, or not known)
}

func ExampleSet() {
	var set topology.Set
	if err := set.UnmarshalText([]byte("8,0-3,2-5")); err != nil {
		log.Fatal(err)
	}
	text, err := json.Marshal(map[string]topology.Set{"cpus": set})
	fmt.Println(set, len(set), set.Contains(4), string(text), err)
	// Output: 0-5,8 7 true {"cpus":"0-5,8"} <nil>
}
