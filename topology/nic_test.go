package topology

import (
	"testing"
)

func FuzzBusPath(f *testing.F) {
	f.Add("/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/nvme/nvme0")
	f.Add("/pci10000:00/x/pci")
	f.Fuzz(func(t *testing.T, dir string) {
		bus := busPath(dir)
		if len(bus) > 0 && !isHostBridge(bus[0]) {
			t.Errorf("%q: %q does not begin with a host bridge", dir, bus)
		}
		if p := overPCI(device{bus: bus}, device{bus: bus}); (p == PIX) != (len(bus) > 0) {
			t.Errorf("%q is %q from itself", dir, p)
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
