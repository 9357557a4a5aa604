package topology_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/topology"
)

// env is an environment with a value of CUDA_VISIBLE_DEVICES.
func env(value string) func(string) (string, bool) {
	return func(name string) (string, bool) {
		return value, name == "CUDA_VISIBLE_DEVICES"
	}
}

func TestMatrices(t *testing.T) {
	for _, machine := range []string{"workstation", "vm", "pod", "mig", "numa-unknown", "server", "laptop"} {
		top := discover(t, topology.Options{Root: readOnly(t, machine)})
		m := top.Matrix()
		golden(t, machine+".matrix", m.String())
		for i, a := range m.Devices {
			if m.Paths[i][i] != topology.Self {
				t.Errorf("%s: %s to itself: %q", machine, a, m.Paths[i][i])
			}
			for j, b := range m.Devices {
				if p, ok := topology.Between(top, a, b); !ok || p != m.Paths[i][j] || p != m.Paths[j][i] {
					t.Errorf("%s: %s to %s: %q, %v; in the matrix %q, back %q", machine, a, b, p, ok, m.Paths[i][j], m.Paths[j][i])
				}
			}
		}
		if p, ok := topology.Between(top, "GPU0", "nothing"); ok || p != topology.UnknownPath {
			t.Errorf("%s: a path to nothing: %q", machine, p)
		}
	}
}

// TestPathsByTree: each word of nvidia-smi, with the smallest tree that has it.
func TestPathsByTree(t *testing.T) {
	const root, port = "pci0000:00", "0000:00:01.0"
	for name, c := range map[string]struct {
		a, b         string // below /sys/devices
		nodeA, nodeB int
		want         topology.Path
	}{
		"functions of one device":       {root + "/" + port + "/0000:01:00.0", root + "/" + port + "/0000:01:00.1", 0, 0, topology.PIX},
		"one switch":                    {root + "/" + port + "/0000:01:00.0/0000:02:00.0/0000:03:00.0", root + "/" + port + "/0000:01:00.0/0000:02:01.0/0000:04:00.0", 0, 0, topology.PIX},
		"a switch behind a switch":      {root + "/" + port + "/0000:01:00.0/0000:02:00.0/0000:03:00.0", root + "/" + port + "/0000:01:00.0/0000:02:01.0/0000:04:00.0/0000:05:00.0/0000:06:00.0", 0, 0, topology.PXB},
		"two switches behind a switch":  {root + "/" + port + "/0000:01:00.0/0000:02:00.0/0000:03:00.0/0000:04:00.0/0000:07:00.0", root + "/" + port + "/0000:01:00.0/0000:02:01.0/0000:05:00.0/0000:06:00.0/0000:08:00.0", 0, 0, topology.PXB},
		"two ports of the host bridge":  {root + "/" + port + "/0000:01:00.0", root + "/0000:00:02.0/0000:02:00.0", 0, 0, topology.PHB},
		"both in the host bridge":       {root + "/0000:00:03.0", root + "/0000:00:04.0", 0, 0, topology.PHB},
		"switches at one host bridge":   {root + "/" + port + "/0000:01:00.0/0000:02:00.0/0000:03:00.0", root + "/0000:00:02.0/0000:04:00.0/0000:05:00.0/0000:06:00.0", 0, 0, topology.PHB},
		"two host bridges of a node":    {root + "/" + port + "/0000:01:00.0", "pci0000:40/0000:40:01.0/0000:41:00.0", 1, 1, topology.NODE},
		"two nodes":                     {root + "/" + port + "/0000:01:00.0", "pci0000:40/0000:40:01.0/0000:41:00.0", 0, 1, topology.SYS},
		"two host bridges, no node":     {root + "/" + port + "/0000:01:00.0", "pci0000:40/0000:40:01.0/0000:41:00.0", -1, -1, topology.SYS},
		"one host bridge, no node":      {root + "/" + port + "/0000:01:00.0", root + "/0000:00:02.0/0000:02:00.0", -1, -1, topology.PHB},
		"domains with the same numbers": {"pci0000:00/0000:00:01.0/0000:01:00.0", "pci0001:00/0001:00:01.0/0001:01:00.0", 0, 0, topology.NODE},
		"host bridges below a platform": {"platform/soc/pci0000:00/0000:00:01.0/0000:01:00.0", "platform/soc/pci0000:00/0000:00:02.0/0000:02:00.0", 0, 0, topology.PHB},
		"a domain below a controller":   {"pci0000:d7/0000:d7:05.5/pci10000:00/10000:00:02.0/10000:01:00.0", "pci0000:d7/0000:d7:05.5/pci10000:00/10000:00:03.0/10000:02:00.0", 0, 0, topology.PHB},
		"below no host bridge":          {"strange/0000:01:00.0", root + "/" + port + "/0000:02:00.0", 0, 0, topology.UnknownPath},
	} {
		t.Run(name, func(t *testing.T) {
			var b strings.Builder
			b.WriteString(base + "-- proc/self/cgroup --\n-- proc/self/mountinfo --\n-- sys/devices/system/node/online --\n0-1\n" +
				"-- sys/devices/system/node/node0/cpulist --\n0-3\n-- sys/devices/system/node/node1/cpulist --\n4-7\n")
			for i, dir := range []string{c.a, c.b} {
				fmt.Fprintf(&b, "-- sys/bus/pci/devices/%s -> ../../../devices/%s --\n", filepath.Base(dir), dir)
				fmt.Fprintf(&b, "-- sys/devices/%s/vendor --\n0x10de\n-- sys/devices/%s/class --\n0x030200\n-- sys/devices/%s/numa_node --\n%d\n", dir, dir, dir, []int{c.nodeA, c.nodeB}[i])
			}
			top := discover(t, topology.Options{Root: tree(t, b.String())})
			p, ok := topology.Between(top, "GPU0", "GPU1")
			back, _ := topology.Between(top, "GPU1", "GPU0")
			if !ok || p != c.want || back != c.want {
				t.Errorf("%q, back %q, %v; want %q; warnings %q", p, back, ok, c.want, top.Warnings)
			}
			if c.want == topology.UnknownPath && !strings.Contains(said(top.Warnings), "below no host bridge") {
				t.Errorf("warnings %q", top.Warnings)
			}
		})
	}
}

// TestNICLevels: a pair that meets a stricter level meets the looser ones.
func TestNICLevels(t *testing.T) {
	for machine, want := range map[string][3]int{"dgx-a100": {12, 10, 4}, "mig": {1, 1, 1}, "vm": {}, "workstation": {}} {
		top := discover(t, topology.Options{Root: readOnly(t, machine)})
		var got [3]int
		var looser []string
		for i, level := range []topology.NICLevel{topology.NICPresent, topology.NICActive, topology.NICAddressed} {
			names := []string{}
			for _, n := range top.NICsAt(level) {
				names = append(names, n.Name)
				if i > 0 && !slices.Contains(looser, n.Name) {
					t.Errorf("%s: %s meets level %d and not the one before", machine, n.Name, i)
				}
			}
			got[i], looser = len(names), names
		}
		if got != want {
			t.Errorf("%s: %v at the three levels, want %v", machine, got, want)
		}
	}
}

// nicTree is a card with one port.
func nicTree(state, layer string) string {
	const dir = "sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0"
	return base + "-- proc/self/cgroup --\n-- proc/self/mountinfo --\n-- sys/class/infiniband/mlx5_0 -> ../../devices/pci0000:00/0000:00:01.0/0000:01:00.0/infiniband/mlx5_0 --\n" +
		"-- " + dir + "/infiniband/mlx5_0/ports/1/state --\n" + state + "\n-- " + dir + "/infiniband/mlx5_0/ports/1/link_layer --\n" + layer + "\n" +
		"-- " + dir + "/net/ib0/dev_port --\n0\n" + verbs("uverbs0", "mlx5_0")
}

// verbs is the device by which programs use a card.
func verbs(device, card string) string {
	return "-- sys/class/infiniband_verbs/" + device + "/ibdev --\n" + card + "\n-- dev/infiniband/" + device + " --\n"
}

// TestNICsThatMayNotBeUsed: a card without a device that this process may open counts at no
// level, and is listed all the same.
func TestNICsThatMayNotBeUsed(t *testing.T) {
	const ip = "-- proc/net/if_inet6 --\nfd000000000000000000000000000001 02 40 00 80 ib0\n"
	for name, c := range map[string]struct {
		files string
		want  string
	}{
		"its device":          {"", "/dev/infiniband/uverbs0"},
		"another's device":    {"-- sys/class/infiniband_verbs/uverbs0/ibdev --\nmlx5_1\n", ""},
		"not given to it":     {"-- dev/infiniband/uverbs0/not-a-device --\n", ""},
		"of another number":   {"-- sys/class/infiniband_verbs/uverbs0/ibdev --\nmlx5_1\n" + verbs("uverbs7", "mlx5_0"), "/dev/infiniband/uverbs7"},
		"no number of a card": {"-- sys/class/infiniband_verbs/uverbs0/ibdev --\n\n", ""},
	} {
		t.Run(name, func(t *testing.T) {
			text := nicTree("4: ACTIVE", "InfiniBand")
			if strings.Contains(c.files, "uverbs0/ibdev") {
				text = strings.Replace(text, "-- sys/class/infiniband_verbs/uverbs0/ibdev --\nmlx5_0\n", "", 1)
			}
			if strings.Contains(c.files, "uverbs0/not") {
				text = strings.Replace(text, "-- dev/infiniband/uverbs0 --\n", "", 1)
			}
			top := discover(t, topology.Options{Root: tree(t, text+ip+c.files)})
			if len(top.NICs) != 1 || top.NICs[0].Device != c.want {
				t.Fatalf("got %+v, warnings %q", top.NICs, top.Warnings)
			}
			counts := 0
			for _, level := range []topology.NICLevel{topology.NICPresent, topology.NICActive, topology.NICAddressed} {
				counts += len(top.NICsAt(level))
			}
			if want := 3; c.want == "" && counts != 0 || c.want != "" && counts != want {
				t.Errorf("it counts at %d levels", counts)
			}
			if told := len(top.Warnings) == 1 && strings.Contains(top.Warnings[0].What, "it does not count"); told != (c.want == "") || !told && len(top.Warnings) > 0 {
				t.Errorf("warnings %q", top.Warnings)
			}
		})
	}
}

func TestNICAddresses(t *testing.T) {
	const routes = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
	const trie = "Local:\n  |-- 10.1.2.3\n     /32 host LOCAL\n"
	for name, c := range map[string]struct {
		state, files string
		want         topology.NICLevel
		warns        string
	}{
		"down, with an address": {state: "1: DOWN", files: "-- proc/net/fib_trie --\n" + trie + "-- proc/net/route --\n" + routes + "ib0 0000010A 00000000 0001 0 0 0 0000FFFF 0 0 0\n", want: topology.NICPresent},
		"IPv4":                  {state: "4: ACTIVE", files: "-- proc/net/fib_trie --\n" + trie + "-- proc/net/route --\n" + routes + "ib0 0000010A 00000000 0001 0 0 0 0000FFFF 0 0 0\n", want: topology.NICAddressed},
		"of another interface":  {state: "4: ACTIVE", files: "-- proc/net/fib_trie --\n" + trie + "-- proc/net/route --\n" + routes + "ib0 0000010A 00000000 0001 0 0 0 0000FFFF 0 0 0\neth0 0002010A 00000000 0001 0 0 0 00FFFFFF 0 0 0\n", want: topology.NICActive},
		"a route by a gateway":  {state: "4: ACTIVE", files: "-- proc/net/fib_trie --\n" + trie + "-- proc/net/route --\n" + routes + "ib0 0000010A 0101010A 0003 0 0 0 0000FFFF 0 0 0\n", want: topology.NICActive},
		"IPv6":                  {state: "4: ACTIVE", files: "-- proc/net/if_inet6 --\nfd000000000000000000000000000001 02 40 00 80 ib0\n", want: topology.NICAddressed},
		"IPv6 of the link":      {state: "4: ACTIVE", files: "-- proc/net/if_inet6 --\nfe800000000000000000000000000001 02 40 20 80 ib0\n", want: topology.NICActive},
		"initializing":          {state: "2: INIT", files: "-- proc/net/if_inet6 --\nfd000000000000000000000000000001 02 40 00 80 ib0\n", want: topology.NICPresent},
		"garbage":               {state: "?", files: "-- proc/net/fib_trie --\n|-- x\n/32 host LOCAL\n-- proc/net/route --\nib0 1 2 3 4 5 6 7\nib0 0 0\n-- proc/net/if_inet6 --\nx x x x x ib0\n", want: topology.NICPresent, warns: "is not a state"},
	} {
		t.Run(name, func(t *testing.T) {
			top := discover(t, topology.Options{Root: tree(t, nicTree(c.state, "InfiniBand")+c.files)})
			if len(top.NICs) != 1 || topology.Level(top.NICs[0]) != c.want || top.NICs[0].PCIAddress != "0000:01:00.0" {
				t.Errorf("got %+v, want level %d", top.NICs, c.want)
			}
			if c.warns == "" && len(top.Warnings) > 0 || !strings.Contains(said(top.Warnings), c.warns) {
				t.Errorf("warnings %q", top.Warnings)
			}
		})
	}
}

// TestStackedInterfaces: where a card is bonded, or has VLANs, what is made of its interface has
// the addresses.
func TestStackedInterfaces(t *testing.T) {
	const net = "sys/devices/virtual/net/"
	link := func(lower, upper string) string {
		if lower == "ib0" {
			return "-- sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/net/ib0/upper_" + upper + " -> ../../../../../virtual/net/" + upper + " --\n"
		}
		return "-- " + net + lower + "/upper_" + upper + " -> ../" + upper + " --\n"
	}
	iface := func(name string) string { return "-- " + net + name + "/mtu --\n1500\n" }
	addresses := func(name string) (all []netip.Addr, err error) {
		if a, ok := map[string]string{"bond0": "10.0.0.1", "bond0.7": "10.7.0.1", "ib0.9": "10.9.0.1", "other": "10.8.0.1"}[name]; ok {
			all = append(all, netip.MustParseAddr(a))
		}
		return all, nil
	}
	for name, c := range map[string]struct {
		files, ifaces, addresses, warns string
	}{
		"a VLAN":                   {files: link("ib0", "ib0.9") + iface("ib0.9"), ifaces: "ib0 ib0.9", addresses: "10.9.0.1"},
		"a bond":                   {files: link("ib0", "bond0") + iface("bond0") + iface("other"), ifaces: "ib0 bond0", addresses: "10.0.0.1"},
		"VLANs of a bond":          {files: link("ib0", "bond0") + link("bond0", "bond0.7") + iface("bond0.7"), ifaces: "ib0 bond0 bond0.7", addresses: "10.0.0.1 10.7.0.1"},
		"a ring":                   {files: link("ib0", "bond0") + link("bond0", "x") + link("x", "bond0") + iface("x"), ifaces: "ib0 bond0 x", addresses: "10.0.0.1"},
		"a bond that is not there": {files: link("ib0", "bond0"), ifaces: "ib0", warns: "upper_bond0: an interface that is not there"},
	} {
		t.Run(name, func(t *testing.T) {
			top := discover(t, topology.Options{Root: tree(t, nicTree("4: ACTIVE", "Ethernet")+c.files), Addresses: addresses})
			port := top.NICs[0].Ports[0]
			if strings.Join(port.Interfaces, " ") != c.ifaces || strings.Join(port.Addresses, " ") != c.addresses {
				t.Errorf("got %+v", port)
			}
			if want := c.addresses != ""; (topology.Level(top.NICs[0]) == topology.NICAddressed) != want {
				t.Errorf("level %d", topology.Level(top.NICs[0]))
			}
			if all := said(top.Warnings); !strings.Contains(all, c.warns) || c.warns == "" && all != "" {
				t.Errorf("warnings %q", top.Warnings)
			}
		})
	}
}

func TestVisibleDevices(t *testing.T) {
	root := readOnly(t, "dgx-a100")
	for value, want := range map[string]string{
		"": "", "-1": "", " ": "", "NoDevFiles": "", "0": "0", "2,0": "2 0", " 7 , 6 ": "7 6", "1,-1,0": "1", "0,1,2,3,4,5,6,7": "0 1 2 3 4 5 6 7",
		"8": "error", "0,8": "error", "0,0": "error", "x": "error", "0,x": "error", "0,": "error", ",": "error", "-2": "error", "0x1": "error", "1.0": "error", "99999999999999999999": "error", "all": "error",
		"GPU-0": "0 1 2 3 4 5 6 7", // of which the bus knows nothing
	} {
		top, err := topology.Discover(t.Context(), topology.Options{Root: root, LookupEnv: env(value)})
		if want == "error" {
			if !errors.Is(err, topology.ErrVisibleDevices) || !strings.Contains(err.Error(), "CUDA_VISIBLE_DEVICES") || !strings.Contains(err.Error(), strconv.Quote(value)) {
				t.Errorf("%q: %v", value, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%q: %v", value, err)
			continue
		}
		var got []string
		for _, g := range top.GPUs {
			got = append(got, fmt.Sprint(g.Index))
		}
		if strings.Join(got, " ") != want || top.Limits.HiddenGPUs != 8-len(got) {
			t.Errorf("%q: %q, %d hidden; want %q", value, got, top.Limits.HiddenGPUs, want)
		}
		if (len(top.Warnings) > 0) != strings.HasPrefix(value, "GPU") {
			t.Errorf("%q: warnings %q", value, top.Warnings)
		}
	}
	// A machine without a GPU has nothing that a value could be checked against.
	top, err := topology.Discover(t.Context(), topology.Options{Root: readOnly(t, "vm"), LookupEnv: env("0,GPU-1")})
	if err != nil || len(top.GPUs) != 0 || len(top.Warnings) != 2 {
		t.Errorf("got %+v, %v", top, err)
	}
	// The environment of the tests is not that of a recorded machine.
	t.Setenv("CUDA_VISIBLE_DEVICES", "none of them")
	if top := discover(t, topology.Options{Root: root}); len(top.GPUs) != 8 {
		t.Errorf("%d GPUs are seen", len(top.GPUs))
	}
	for _, root := range []string{"", "/", "//", "/proc/.."} {
		if _, err := topology.Discover(t.Context(), topology.Options{Root: root}); !errors.Is(err, topology.ErrVisibleDevices) {
			t.Errorf("this machine, as %q: %v", root, err)
		}
	}
}

// busGPU is an NVIDIA GPU on the PCI bus that a driver has.
func busGPU(address, driver string) string {
	dir := "sys/devices/pci0000:00/" + address
	return fmt.Sprintf("-- sys/bus/pci/devices/%s -> ../../../devices/pci0000:00/%[1]s --\n-- %[2]s/vendor --\n0x10de\n-- %[2]s/class --\n0x030200\n-- %[2]s/device --\n0x2330\n", address, dir) +
		fmt.Sprintf("-- %s/driver -> ../../../bus/pci/drivers/%s --\n-- sys/bus/pci/drivers/%[2]s/bind-%[3]s --\n", dir, driver, address)
}

// NVIDIA's driver does not count GPUs that are given to virtual machines, and CUDA neither.
func TestForeignGPUsAreNotCounted(t *testing.T) {
	root := tree(t, base+busGPU("0000:00:01.0", "vfio-pci")+busGPU("10000:00:02.0", "nvidia")+busGPU("2000:00:03.0", "nvidia")+busGPU("0000:00:04.0", "nouveau"))
	for value, want := range map[string]string{
		"unset": "0=2000:00:03.0 1=10000:00:02.0 2=0000:00:01.0 3=0000:00:04.0",
		"0":     "0=2000:00:03.0", "1,0": "1=10000:00:02.0 0=2000:00:03.0", "2": "error",
	} {
		o := topology.Options{Root: root, LookupEnv: env(value)}
		if value == "unset" {
			o.LookupEnv = nil
		}
		top, err := topology.Discover(t.Context(), o)
		got := "error"
		if err == nil {
			got = ""
			for _, g := range top.GPUs {
				got += fmt.Sprintf(" %d=%s", g.Index, g.PCIAddress)
			}
		}
		if strings.TrimSpace(got) != want || err != nil && !strings.Contains(err.Error(), "there are 2") {
			t.Errorf("%s: %q, %v; want %q", value, got, err, want)
		}
	}
	// With none of NVIDIA's driver it is as if there was no GPU.
	top, err := topology.Discover(t.Context(), topology.Options{Root: tree(t, base+busGPU("0000:00:01.0", "vfio-pci")), LookupEnv: env("0")})
	if err != nil || len(top.GPUs) != 0 || top.Limits.HiddenGPUs != 1 || !strings.Contains(said(top.Warnings), "none that is known") {
		t.Errorf("got %+v, %v", top, err)
	}
}

// CUDA does not count GPUs that differ as the driver does, except by request.
func TestVisibleOrder(t *testing.T) {
	two := busGPU("0000:00:01.0", "nvidia") + strings.Replace(busGPU("0000:00:02.0", "nvidia"), "0x2330", "0x1db6", 1)
	root := tree(t, base+two)
	top := discover(t, topology.Options{Root: root, LookupEnv: env("1")})
	if !strings.Contains(said(top.Warnings), "CUDA_DEVICE_ORDER") {
		t.Errorf("warnings %q", top.Warnings)
	}
	top = discover(t, topology.Options{Root: root, LookupEnv: func(name string) (string, bool) {
		return map[string]string{"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}[name], true
	}})
	if strings.Contains(said(top.Warnings), "CUDA_DEVICE_ORDER") || top.GPUs[0].PCIAddress != "0000:00:02.0" {
		t.Errorf("got %+v, warnings %q", top.GPUs, top.Warnings)
	}
}

// TestVisibleIndexIsNoUUID: digits are an index, also where UUIDs begin with them.
func TestVisibleIndexIsNoUUID(t *testing.T) {
	source := func(context.Context) ([]topology.GPU, error) {
		return []topology.GPU{{Index: 0, UUID: "12"}, {Index: 1, UUID: "01"}}, nil
	}
	for value, want := range map[string]string{"0": "12", "1": "01"} {
		top := discover(t, topology.Options{Root: readOnly(t, "vm"), GPUs: source, LookupEnv: env(value)})
		if len(top.GPUs) != 1 || top.GPUs[0].UUID != want {
			t.Errorf("%s: %+v, want the GPU %s", value, top.GPUs, want)
		}
	}
}

func TestMemoryNode(t *testing.T) {
	top := discover(t, topology.Options{Root: readOnly(t, "dgx-a100")})
	if n := top.MemoryNode(3); n != 3 {
		t.Errorf("node 3: %d", n)
	}
	top.Limits.MemoryNodes = topology.Set{0, 5}
	if a, b := top.MemoryNode(3), top.MemoryNode(7); a != 0 || b != 5 {
		t.Errorf("of nodes 0 and 5, %d is near to 3 and %d to 7", a, b)
	}
	top.Nodes[5].MemoryBytes = 0
	if n := top.MemoryNode(7); n != 0 {
		t.Errorf("of node 0 alone: %d", n)
	}
	if n := top.MemoryNode(topology.Unknown); n != 0 {
		t.Errorf("of node 0 alone, from nowhere: %d", n)
	}
	top.Limits.MemoryNodes = topology.Set{0, 1}
	if n := top.MemoryNode(topology.Unknown); n != topology.Unknown {
		t.Errorf("from nowhere: %d", n)
	}
}

// TestRandomDamage: files, links and directories of all machines are removed and garbled at
// random, more and more of them: warnings, never an error, and nothing that makes no sense.
func TestRandomDamage(t *testing.T) {
	trees, steps := 2, 8
	if testing.Short() {
		trees = 1
	}
	for _, machine := range machines {
		t.Run(machine, func(t *testing.T) {
			t.Parallel()
			for seed := range testseed.Each(t, trees-1) {
				rng := rand.New(rand.NewPCG(seed, uint64(len(machine))))
				root := unpack(t, machine)
				for step := range steps {
					damage(t, rng, root)
					checkDamaged(t, root, fmt.Sprintf("seed %d, step %d", seed, step))
				}
			}
		})
	}
}

func checkDamaged(t *testing.T, root, where string) {
	t.Helper()
	top, err := topology.Discover(t.Context(), topology.Options{Root: root, LookupEnv: env("")})
	if err != nil {
		t.Fatalf("%s: %v", where, err)
	}
	if len(top.Nodes) == 0 || len(top.GPUs) != 0 || strings.Contains(asJSON(t, top), "null") {
		t.Errorf("%s: %s", where, asJSON(t, top))
	}
	if top, err = topology.Discover(t.Context(), topology.Options{Root: root}); err != nil {
		t.Fatalf("%s: %v", where, err)
	}
	m := top.Matrix()
	for i := range m.Devices {
		for j := range m.Devices {
			if m.Paths[i][j] != m.Paths[j][i] {
				t.Errorf("%s: %s to %s: %q, back %q", where, m.Devices[i], m.Devices[j], m.Paths[i][j], m.Paths[j][i])
			}
		}
	}
	if l := top.Limits; l.MemoryBytes < 0 || l.CPUs < 0 || top.String() == "" {
		t.Errorf("%s: limits %+v", where, l)
	}
	if _, err := topology.DiskOf(t.Context(), "/tmp/x", topology.Options{Root: root}); err != nil {
		t.Fatalf("%s: %v", where, err)
	}
}

// damage harms up to a fiftieth of the entries below root.
func damage(t *testing.T, rng *rand.Rand, root string) {
	t.Helper()
	var paths []string
	if err := filepath.WalkDir(root, func(p string, _ os.DirEntry, err error) error {
		if p != root {
			paths = append(paths, p)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if len(paths) == 0 {
		return // all is gone
	}
	garbage := []string{"", "\x00\xff", "-1", "18446744073709551616", "0-4294967295", "4:", strings.Repeat("x", 5000), "0x10de", "../..", "0:0 0:0\n- - -\n"}
	for range 1 + rng.IntN(1+len(paths)/50) {
		p := paths[rng.IntN(len(paths))]
		info, err := os.Lstat(p)
		if err != nil {
			continue // went with its directory
		}
		if rng.IntN(3) == 0 || info.IsDir() {
			if info.IsDir() && rng.IntN(4) > 0 {
				continue // most damage is to single files
			}
			err = os.RemoveAll(p)
		} else {
			err = errors.Join(os.Remove(p), os.WriteFile(p, []byte(garbage[rng.IntN(len(garbage))]), 0o644))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}
