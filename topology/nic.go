package topology

import (
	"net"
	"net/netip"
	"path"
	"slices"
	"strings"

	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/procfs"
)

const (
	rdmaDevices = "/sys/class/infiniband"
	rdmaVerbs   = "/sys/class/infiniband_verbs"
)

// nics returns the RDMA devices with their ports; none if there are none, which
// is no warning.
func (t *tree) nics(w placing, addresses func(string) ([]netip.Addr, error)) []NIC {
	nics := []NIC{}
	names, _ := t.list(rdmaDevices)
	slices.SortFunc(names, byNumber)
	if addresses == nil {
		addresses = t.addresses(len(names) > 0)
	}
	verbs := map[string]string{}
	if len(names) > 0 {
		verbs = t.verbs()
	}
	for _, name := range names {
		file := path.Join(rdmaDevices, name)
		dir, ok := t.follow(file, "a device")
		if !ok {
			continue
		}
		n := NIC{Name: procfs.Label(name), Bus: []string{}, Node: w.nowhere()}
		bus := busAbove(dir)
		if bus == "" { // the class may hold the devices themselves
			if target, err := t.resolve(path.Join(dir, "device")); err == nil {
				bus = busAbove(target)
			}
		}
		if bus != "" {
			n.PCIAddress, n.Bus, n.Node = path.Base(bus), busPath(bus), t.nodeOf(w, bus)
		} else {
			t.warnf(file, "the card is not on the PCI bus: its node is not known")
		}
		if n.Device = verbs[name]; n.Device == "" {
			t.warnOf(causes.HiddenSys, file, "there is no device in /dev/infiniband by which this process may use the card: it does not count")
		}
		n.Ports = t.ports(dir, bus, addresses)
		nics = append(nics, n)
	}
	return nics
}

// verbs returns the character device that this process may use each RDMA device by. A
// container is shown all cards of its host in /sys, and given the devices of some.
func (t *tree) verbs() map[string]string {
	devices := map[string]string{}
	names, _ := t.list(rdmaVerbs)
	for _, name := range names {
		of, ok := t.want(path.Join(rdmaVerbs, name, "ibdev"))
		device := path.Join("/dev/infiniband", name)
		if ok && of != "" && t.mayUse(device) {
			devices[of] = device
		}
	}
	return devices
}

// byNumber puts mlx5_2 before mlx5_10.
func byNumber(a, b string) int {
	x, y := strings.TrimRight(a, "0123456789"), strings.TrimRight(b, "0123456789")
	if x == y && len(a) != len(b) {
		return len(a) - len(b)
	}
	return strings.Compare(a, b)
}

// ports reads the ports of the RDMA device in dir, whose card is in bus.
func (t *tree) ports(dir, bus string, addresses func(string) ([]netip.Addr, error)) []Port {
	ports := []Port{}
	names, ok := t.list(path.Join(dir, "ports"))
	if !ok {
		t.warnf(path.Join(dir, "ports"), "not there: the card's ports are not known")
	}
	slices.SortFunc(names, byNumber)
	for _, name := range names {
		number, err := procfs.Member(name)
		if err != nil || number == 0 {
			t.warnf(path.Join(dir, "ports", name), "%s is not a port", procfs.Quote(name))
			continue
		}
		ports = append(ports, t.port(path.Join(dir, "ports", name), number))
	}
	if bus != "" {
		t.addInterfaces(ports, path.Join(bus, "net"), addresses)
	}
	return ports
}

func (t *tree) port(dir string, number int) Port {
	p := Port{Number: number, Interfaces: []string{}, Addresses: []string{}}
	if state, ok := t.need(path.Join(dir, "state")); ok { // as "4: ACTIVE"
		_, word, found := strings.Cut(state, ":")
		if p.State = procfs.Label(word); !found || p.State == "" {
			t.warnf(path.Join(dir, "state"), "%s is not a state", procfs.Quote(state))
		}
	}
	layer, _ := t.want(path.Join(dir, "link_layer"))
	rate, _ := t.want(path.Join(dir, "rate"))
	p.LinkLayer, p.Rate = procfs.Label(layer), procfs.Label(rate)
	return p
}

// addInterfaces gives the network interfaces in dir to the ports that they are of.
func (t *tree) addInterfaces(ports []Port, dir string, addresses func(string) ([]netip.Addr, error)) {
	names, _ := t.list(dir)
	for _, name := range names {
		i := 0
		if len(ports) != 1 { // cards with one port have a number of their own sometimes
			number, ok := t.number(path.Join(dir, name, "dev_port"))
			i = slices.IndexFunc(ports, func(p Port) bool { return int64(p.Number) == number+1 })
			if !ok || i < 0 {
				t.warnf(path.Join(dir, name), "it is not known of which port the interface is")
				continue
			}
		}
		for _, iface := range t.stackedOn(path.Join(dir, name), map[string]bool{}) {
			ports[i].Interfaces = append(ports[i].Interfaces, procfs.Label(iface))
			of, err := addresses(iface)
			if err != nil {
				t.warn(path.Join(dir, name), err)
			}
			for _, a := range of {
				// Each interface that is up makes itself an address for its link.
				if a.IsValid() && !a.IsLinkLocalUnicast() && !a.IsLoopback() && !a.IsUnspecified() {
					ports[i].Addresses = append(ports[i].Addresses, a.Unmap().WithZone("").String())
				}
			}
		}
	}
}

// stackedOn returns the network interface in dir and those made of it, each once: of a card that is
// bonded, or has VLANs, these have the addresses.
func (t *tree) stackedOn(dir string, seen map[string]bool) []string {
	name := path.Base(dir)
	if seen[name] {
		return nil
	}
	seen[name] = true
	ifaces := []string{name}
	entries, _ := t.list(dir)
	for _, entry := range entries {
		if !strings.HasPrefix(entry, "upper_") {
			continue
		}
		if target, ok := t.follow(path.Join(dir, entry), "an interface"); ok {
			ifaces = append(ifaces, t.stackedOn(target, seen)...)
		}
	}
	return ifaces
}

// addresses returns the function that returns an interface's addresses.
func (t *tree) addresses(needed bool) func(string) ([]netip.Addr, error) {
	if t.live {
		return systemAddresses
	}
	if !needed {
		return func(string) ([]netip.Addr, error) { return nil, nil }
	}
	recorded := t.recordedAddresses()
	return func(name string) ([]netip.Addr, error) { return recorded[name], nil }
}

func systemAddresses(name string) ([]netip.Addr, error) {
	iface, err := net.InterfaceByName(name)
	if err != nil {
		return nil, err
	}
	all, err := iface.Addrs()
	if err != nil {
		return nil, err
	}
	var addresses []netip.Addr
	for _, a := range all {
		if prefix, err := netip.ParsePrefix(a.String()); err == nil {
			addresses = append(addresses, prefix.Addr())
		}
	}
	return addresses, nil
}

// recordedAddresses reads /proc/net. It has IPv6 addresses with their interface. Those of IPv4 are
// in one table and the interfaces of networks in another.
func (t *tree) recordedAddresses() map[string][]netip.Addr {
	addresses := map[string][]netip.Addr{}
	trie, _ := t.want("/proc/net/fib_trie")
	routes, _ := t.want("/proc/net/route")
	networks := few(t, "/proc/net/route", procfs.Routes(routes))
	for _, a := range few(t, "/proc/net/fib_trie", procfs.LocalAddresses(trie)) {
		best, found := procfs.Network{}, false
		for _, n := range networks {
			if n.Prefix.Contains(a) && (!found || n.Prefix.Bits() > best.Prefix.Bits()) {
				best, found = n, true
			}
		}
		if found {
			addresses[best.Interface] = append(addresses[best.Interface], a)
		}
	}
	six, _ := t.want("/proc/net/if_inet6")
	for line := range strings.Lines(six) {
		if f := strings.Fields(line); len(f) == 6 {
			if a, ok := procfs.HexAddress(f[0]); ok {
				addresses[f[5]] = append(addresses[f[5]], a)
			}
		}
	}
	return addresses
}

// few returns the first of many: each address is compared with each network.
func few[T any](t *tree, file string, all []T) []T {
	const most = 4096
	if len(all) > most {
		t.warnf(file, "%d entries: the first %d are looked at", len(all), most)
		return all[:most]
	}
	return all
}
