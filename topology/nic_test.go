package topology

import (
	"strings"
	"testing"
)

func FuzzParseAddresses(f *testing.F) {
	f.Add("Local:\n|-- 10.0.0.1\n/32 host LOCAL\n", "Iface Destination\nib0 0000000A 00000000 0001 0 0 0 00FFFFFF 0 0 0\n", "fd000000000000000000000000000001")
	f.Add("|-- \n/32 host LOCAL\n", "a b c d e f g h\n", "x")
	f.Fuzz(func(t *testing.T, trie, routes, six string) {
		for _, a := range parseLocalAddresses(trie) {
			if !a.Is4() {
				t.Errorf("%q: %v", trie, a)
			}
		}
		for _, n := range parseRoutes(routes) {
			if !n.prefix.IsValid() || n.prefix.Bits() == 0 || n.prefix != n.prefix.Masked() || n.iface == "" {
				t.Errorf("%q: %+v", routes, n)
			}
		}
		if a, ok := parseHexAddress(six); ok && strings.Contains(a.String(), "%") {
			t.Errorf("%q: %v", six, a)
		}
	})
}

func FuzzBusPath(f *testing.F) {
	f.Add("/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/nvme/nvme0")
	f.Add("/pci10000:00/x/pci")
	f.Fuzz(func(t *testing.T, dir string) {
		bus := busPath(dir)
		if len(bus) > 0 && !isHostBridge(bus[0]) {
			t.Errorf("%q: %q does not begin with a host bridge", dir, bus)
		}
		for _, p := range []Path{Path(dir), overPCI(device{bus: bus}, device{bus: bus})} {
			if p.Compare(p) != 0 || p.NVLinks() < 0 {
				t.Errorf("%q is not as near as itself", p)
			}
		}
	})
}

func TestNamesByNumber(t *testing.T) {
	for _, c := range []struct {
		a, b string
		less bool
	}{{"mlx5_2", "mlx5_10", true}, {"mlx5_10", "mlx5_2", false}, {"mlx4_9", "mlx5_1", true}, {"a", "b", true}, {"1", "10", true}, {"mlx5_0", "mlx5_0", false}} {
		if got := byNumber(c.a, c.b) < 0; got != c.less {
			t.Errorf("%s before %s: %v", c.a, c.b, got)
		}
	}
}
