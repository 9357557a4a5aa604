package topology

import (
	"cmp"
	"encoding/hex"
	"net"
	"net/netip"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/spillway-db/spillway/internal/causes"
)

const (
	// Directories of the kernel's RDMA subsystem, which has RoCE cards too: one entry for each
	// card, and one for each character device.
	rdmaDevices = "/sys/class/infiniband"
	rdmaVerbs   = "/sys/class/infiniband_verbs"
)

// nics returns the RDMA devices with their ports, by name with numbers in order. A machine without
// any is the usual case, and no warning. addresses is Options.Addresses.
func (t *tree) nics(addresses func(string) ([]netip.Addr, error)) []NIC {
	nics := []NIC{}
	names, _ := t.list(rdmaDevices)
	if len(names) == 0 {
		return nics
	}
	slices.SortFunc(names, byNumber)
	switch {
	case addresses != nil:
	case t.live:
		// A recorded machine's addresses must not be looked up on this one.
		addresses = systemAddresses
	default:
		trie, _ := t.want("/proc/net/fib_trie")
		routes, _ := t.want("/proc/net/route")
		inet6, _ := t.want("/proc/net/if_inet6")
		// All interfaces at once: the files have those of the whole machine.
		recorded := parseAddresses(trie, routes, inet6)
		addresses = func(name string) ([]netip.Addr, error) { return recorded[name], nil }
	}

	// A container sees all cards of its host in /sys, and is given the character devices of some. It
	// may use those that it can open to read and write: it has a list of devices besides the rights.
	devices := map[string]string{}
	verbs, _ := t.list(rdmaVerbs)
	for _, name := range verbs {
		card, _ := t.want(rdmaVerbs, name, "ibdev")
		device := path.Join("/dev/infiniband", name)
		// Only opening it shows whether the container's list of devices allows that.
		if f, err := t.openFile(device, os.O_RDWR); err == nil {
			_ = f.Close() // nothing was written
			devices[card] = device
		}
	}

	for _, name := range names {
		file := path.Join(rdmaDevices, name)
		// The entry is a link to the card's directory below its PCI device.
		dir, ok := t.follow(file, "a device")
		if !ok {
			continue
		}
		n := NIC{Name: label(name), Bus: []string{}, Node: t.nowhere(), Device: devices[name]}
		bus := busAbove(dir)
		if bus != "" {
			n.PCIAddress, n.Bus, n.Node = path.Base(bus), busPath(bus), t.nodeOf(bus)
		} else {
			t.warnf(file, "the card is not on the PCI bus: its node is not known")
		}
		// Without a device the card is listed, for the topology, but meets no level.
		if n.Device == "" {
			t.warnOf(causes.HiddenSys, file,
				"there is no device in /dev/infiniband by which this process may use the card: it does not count")
		}
		n.Ports = t.ports(dir, bus, addresses)
		nics = append(nics, n)
	}
	return nics
}

// byNumber compares names that end in numbers: mlx5_2 comes before mlx5_10. It also compares PCI
// addresses, whose domain may have more than four digits: 2000:00:00.0 comes before 10000:00:00.0.
func byNumber(a, b string) int { return cmp.Or(len(a)-len(b), strings.Compare(a, b)) }

// ports reads the ports of the RDMA device in dir, with their network interfaces and the IP
// addresses of those. bus is the directory of the card's PCI device, which has the interfaces;
// without it ports have none.
func (t *tree) ports(dir, bus string, addresses func(string) ([]netip.Addr, error)) []Port {
	ports := []Port{}
	dir = path.Join(dir, "ports")
	names, ok := t.list(dir)
	if !ok {
		t.warnf(dir, "not there: the card's ports are not known")
	}
	slices.SortFunc(names, byNumber)
	for _, name := range names {
		file := path.Join(dir, name)
		number, err := parseMember(name)
		if err != nil || number == 0 {
			t.warnf(file, "%s is not a port", quote(name))
			continue
		}
		p := Port{Number: number, Interfaces: []string{}, Addresses: []string{}}
		if state, ok := t.need(file, "state"); ok { // as "4: ACTIVE"
			_, word, _ := strings.Cut(state, ":")
			if p.State = label(word); p.State == "" {
				t.warnf(path.Join(file, "state"), "%s is not a state", quote(state))
			}
		}
		layer, _ := t.want(file, "link_layer")
		rate, _ := t.want(file, "rate")
		p.LinkLayer, p.Rate = label(layer), label(rate)
		ports = append(ports, p)
	}
	// Interfaces are entries of the PCI device.
	if bus == "" {
		return ports
	}

	// The network interfaces of the card, and those made of them.
	ifaces, _ := t.list(bus, "net")
	// An interface belongs to the port whose number, less 1, is its dev_port
	// (Documentation/ABI/testing/sysfs-class-net).
	for _, name := range ifaces {
		file := path.Join(bus, "net", name)
		i := 0
		if len(ports) != 1 { // cards with one port have a number of their own sometimes
			number, ok := t.count(file, "dev_port")
			i = slices.IndexFunc(ports, func(p Port) bool { return int64(p.Number) == number+1 })
			if !ok || i < 0 {
				t.warnf(file, "it is not known of which port the interface is")
				continue
			}
		}
		for _, iface := range t.stackedOn(file, map[string]bool{}) {
			ports[i].Interfaces = append(ports[i].Interfaces, label(iface))
			of, err := addresses(iface)
			if err != nil {
				t.warn(file, err)
			}
			// Programs bind to an address that other machines reach.
			for _, a := range of {
				// Each interface that is up makes itself an address for its link.
				if a.IsValid() && !a.IsLinkLocalUnicast() && !a.IsLoopback() && !a.IsUnspecified() {
					ports[i].Addresses = append(ports[i].Addresses, a.Unmap().WithZone("").String())
				}
			}
		}
	}
	return ports
}

// stackedOn returns the network interface in dir and those made of it, each once: if a card is
// bonded, or has VLANs, the addresses are on these. The kernel links them with entries
// upper_<name>. seen has the names so far, because an interface may be reached in two ways.
func (t *tree) stackedOn(dir string, seen map[string]bool) []string {
	// The walk ends because each name is entered in seen, even if links form a cycle.
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

// systemAddresses returns the addresses of an interface of this machine.
func systemAddresses(name string) ([]netip.Addr, error) {
	iface, err := net.InterfaceByName(name)
	if err != nil {
		return nil, err
	}
	all, err := iface.Addrs()
	var addresses []netip.Addr
	for _, a := range all {
		if prefix, err := netip.ParsePrefix(a.String()); err == nil {
			addresses = append(addresses, prefix.Addr())
		}
	}
	return addresses, err
}

// parseAddresses returns the IP addresses of a recorded machine by interface. The texts are those
// of /proc/net/fib_trie, route and if_inet6. Only IPv6 addresses come with their interface. The
// kernel lists the local IPv4 addresses without one, so an address gets the interface of the
// smallest network it is in that needs no gateway.
func parseAddresses(trie, routes, inet6 string) map[string][]netip.Addr {
	const gateway = 2 // RTF_GATEWAY
	networks := map[netip.Prefix]string{}
	// First the networks that an interface reaches without a gateway, from the table of IPv4
	// routes, whose numbers are hexadecimal.
	for line := range strings.Lines(routes) {
		f := strings.Fields(line) // Iface Destination Gateway Flags RefCnt Use Metric Mask …
		if len(f) < 8 {
			continue
		}
		to, mask := parseAddress(f[1]), parseAddress(f[7])
		flags, err := strconv.ParseUint(f[3], 16, 32)
		if err != nil || flags&gateway != 0 || !to.Is4() || !mask.Is4() {
			continue
		}
		bits, _ := net.IPMask(mask.AsSlice()).Size() // 0 if it is no mask
		if network, err := to.Prefix(bits); err == nil && networks[network] == "" {
			networks[network] = f[0]
		}
	}

	// fib_trie has two lines for each address, "|-- address" and, if it is the machine's own, "/32
	// host LOCAL". Tables repeat them.
	addresses := map[string][]netip.Addr{}
	seen := map[netip.Addr]bool{}
	var last netip.Addr
	for line := range strings.Lines(trie) {
		line = strings.TrimSpace(line)
		if name, ok := strings.CutPrefix(line, "|-- "); ok {
			last, _ = netip.ParseAddr(name)
			continue
		}
		if !strings.HasPrefix(line, "/32 host LOCAL") || !last.Is4() || seen[last] {
			continue
		}
		seen[last] = true
		// From the smallest network to the largest.
		for bits := 32; bits > 0; bits-- {
			network, _ := last.Prefix(bits) // which is an IPv4 address
			if iface := networks[network]; iface != "" {
				addresses[iface] = append(addresses[iface], last)
				break
			}
		}
	}
	// Lines of if_inet6 are: address, number of the interface, prefix length, scope, flags, name.
	for line := range strings.Lines(inet6) {
		if f := strings.Fields(line); len(f) == 6 {
			if a := parseAddress(f[0]); a.Is6() {
				addresses[f[5]] = append(addresses[f[5]], a)
			}
		}
	}
	return addresses
}

// parseAddress parses an address in hexadecimal digits; the result is invalid if s is none. IPv4
// addresses are printed as a 32-bit number, in the byte order of the machine, which is taken to be
// little-endian.
func parseAddress(s string) netip.Addr {
	b, err := hex.DecodeString(s)
	if err != nil {
		return netip.Addr{}
	}
	if len(b) == 4 {
		slices.Reverse(b)
	}
	a, _ := netip.AddrFromSlice(b) // invalid for any other length
	return a
}
