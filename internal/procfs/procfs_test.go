package procfs

import (
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
)

func TestMeminfo(t *testing.T) {
	for _, c := range []struct {
		text  string
		value int64
		ok    bool
		errs  int
	}{
		{"MemTotal:  1024 kB\n", 1 << 20, true, 0},
		{"Node 3 MemTotal:  1024 kB\n", 1 << 20, true, 0},
		{"MemTotal: 1 kB\nMemTotal: 2 kB\n", 1 << 10, true, 0},
		{"MemTotal: 1024kB", 0, false, 1}, {"MemTotal: 1024\n", 0, false, 1}, {"MemTotal: 1 MB\n", 0, false, 1},
		{"MemTotal: -1 kB\n", 0, false, 1}, {"MemTotal:\n", 0, false, 1}, {"MemTotal: 9007199254740992 kB\n", 0, false, 1},
		{"MemTotal: 9007199254740991 kB\n", 9007199254740991 << 10, true, 0},
		{"MemTotals: 1 kB\n", 0, false, 0}, {"MemTotal 1 kB\n", 0, false, 0}, {":\n", 0, false, 0}, {"", 0, false, 0},
	} {
		values, errs := Meminfo(c.text, "MemTotal")
		if v, ok := values["MemTotal"]; v != c.value || ok != c.ok || len(errs) != c.errs {
			t.Errorf("%q: %v, %v, want %d", c.text, values, errs, c.value)
		}
	}
}

func TestCPUInfo(t *testing.T) {
	for _, c := range []struct {
		text, model, cpus string
	}{
		{"processor\t: 0\nmodel name\t: A  B\nprocessor\t: 1\nmodel name\t: C\n", "A B", "0-1"},
		{"processor\t: 1\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\nprocessor\t: 0\n", "ARM implementer 0x41 part 0xd4f", "0-1"},
		{"processor\t: 0\ncpu\t\t: POWER9, altivec supported\n", "POWER9, altivec supported", "0"},
		{"processor : x\n", "", ""}, {"", "", ""},
	} {
		model, cpus := CPUInfo(c.text)
		if want, _ := List(c.cpus); model != c.model || !slices.Equal(cpus, want) {
			t.Errorf("%q: %q, %v", c.text, model, cpus)
		}
	}
}

func TestMountinfo(t *testing.T) {
	mounts, errs := Mountinfo(`36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 propagate_from:2 - ext3 /dev/root rw,errors=continue
37 36 0:5 / /a\040b\134c\0 ro,relatime - tmpfs tmpfs rw

38 36 0:6 / /x rw - overlay overlay ro,upperdir=/u\054v
39 36 0:7 / /y rw - fuse  rw
40 36 0:8 / /z rw - 9p src
`)
	want := []Mount{
		{Device: "98:0", Root: "/mnt1", Point: "/mnt2", FileSystem: "ext3", Source: "/dev/root", Options: []string{"rw", "errors=continue"}},
		{Device: "0:5", Root: "/", Point: `/a b\c\0`, FileSystem: "tmpfs", Source: "tmpfs", Options: []string{"rw"}, ReadOnly: true},
		{Device: "0:6", Root: "/", Point: "/x", FileSystem: "overlay", Source: "overlay", Options: []string{"ro", "upperdir=/u", "v"}, ReadOnly: true},
		{Device: "0:7", Root: "/", Point: "/y", FileSystem: "fuse", Source: "rw"},
		{Device: "0:8", Root: "/", Point: "/z", FileSystem: "9p", Source: "src"},
	}
	if !reflect.DeepEqual(mounts, want) || len(errs) != 0 {
		t.Errorf("got %+v, %v", mounts, errs)
	}
	for _, line := range []string{"x", "1 2 3 / /a rw - a b c", "1 2 3:4 / a rw - a b c", "1 2 3:4 / /a - a b c", "1 2 3:4 / /a rw a b c", "1 2 3:4 / /a rw - a", "1 2 a:4 / /a rw - a b c"} {
		if got, errs := Mountinfo(line); len(got) != 0 || len(errs) != 1 {
			t.Errorf("%q: %+v, %v", line, got, errs)
		}
	}
}

func TestCgroup(t *testing.T) {
	groups, errs := Cgroup("11:cpu,cpuacct:/a:b\n1:name=systemd:/x\n0::/user.slice\n\nbad\n0::relative\n")
	want := []Group{{[]string{"cpu", "cpuacct"}, "/a:b"}, {[]string{"name=systemd"}, "/x"}, {nil, "/user.slice"}}
	if !reflect.DeepEqual(groups, want) || len(errs) != 2 {
		t.Errorf("got %+v, %v", groups, errs)
	}
}

func TestLimitAndQuota(t *testing.T) {
	for text, want := range map[string]int64{"max": NoLimit, "1": 1, "9223372036854771712": NoLimit, "9223372036854710272": NoLimit, "4611686018427387903": 4611686018427387903, "18446744073709551615": NoLimit, "0": 0, "": 0, "-1": 0, "1k": 0, "99999999999999999999": 0} {
		if got, err := Limit(text); got != want || (err == nil) != (want > 0) {
			t.Errorf("Limit(%q) = %d, %v; want %d", text, got, err, want)
		}
	}
	for text, want := range map[string]float64{
		"max 100000": 0, "max": 0, "-1 100000": 0, "-1": 0, "50000 100000": 0.5, "150000": 1.5, "300000 100000": 3,
		"": -1, "0 100000": -1, "1 0": -1, "max 0": -1, "1 2 3": -1, "a b": -1, "-2 100000": -1,
	} {
		got, err := Quota(text)
		if err != nil {
			got = -1
		}
		if got != want {
			t.Errorf("Quota(%q) = %v, %v; want %v", text, got, err, want)
		}
	}
}

func TestLinkSpeed(t *testing.T) {
	for text, want := range map[string]int{"2.5 GT/s PCIe": 1, "5 GT/s": 2, "5.0 GT/s PCIe": 2, "8.0 GT/s PCIe": 3, "16.0 GT/s PCIe": 4, "32.0 GT/s PCIe": 5, "64.0 GT/s PCIe": 6, "128.0 GT/s PCIe": 7, "Unknown": 0, "": 0} {
		if got := LinkSpeed(text); got != want {
			t.Errorf("LinkSpeed(%q) = %d, want %d", text, got, want)
		}
	}
}

func TestPrintable(t *testing.T) {
	for text, want := range map[string]string{"  a \t b\n": "a b", "\x1b[31mred\x07": "[31mred", "\xff\xfe": "", "ü": "ü"} {
		if got := Printable(text); got != want {
			t.Errorf("printable(%q) = %q, want %q", text, got, want)
		}
	}
	if got := Label(strings.Repeat("ü", 300)); len(got) > MaxNameBytes || strings.Trim(got, "ü") != "" {
		t.Errorf("a long name: %d bytes, %q", len(got), got)
	}
}

func FuzzMeminfo(f *testing.F) {
	f.Add("MemTotal: 1 kB\nNode 0 MemFree: 2 kB\n")
	f.Add("MemTotal: 99999999999999999999 kB")
	f.Fuzz(func(t *testing.T, s string) {
		values, _ := Meminfo(s, "MemTotal", "MemFree")
		for key, v := range values {
			if v < 0 || v%1024 != 0 {
				t.Errorf("%q: %s = %d", s, key, v)
			}
		}
		model, cpus := CPUInfo(s)
		if len(model) > MaxNameBytes || !slices.IsSorted(cpus) {
			t.Errorf("%q: %q, %v", s, model, cpus)
		}
	})
}

func FuzzMountinfo(f *testing.F) {
	f.Add(`36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue`)
	f.Add(`37 36 0:5 / /a\040b\13 ro - tmpfs tmpfs rw`)
	f.Fuzz(func(t *testing.T, s string) {
		mounts, errs := Mountinfo(s)
		if len(mounts)+len(errs) > strings.Count(s, "\n")+1 {
			t.Errorf("%q: %d mounts, %d errors", s, len(mounts), len(errs))
		}
		for _, m := range mounts {
			if !strings.HasPrefix(m.Point, "/") || !IsDeviceNumber(m.Device) {
				t.Errorf("%q: %+v", s, m)
			}
			if got, ok := MountOf(mounts, m.Point); !ok || len(got.Point) > len(m.Point) {
				t.Errorf("%q: %q is on %+v", s, m.Point, got)
			}
		}
	})
}

func FuzzCgroup(f *testing.F) {
	f.Add("4:memory:/docker/abc\n0::/\n", "max", "150000 100000", "10 21")
	f.Add("a:b", "18446744073709551616", "1 0", "10 0")
	f.Fuzz(func(t *testing.T, cgroup, limit, quota, distances string) {
		groups, _ := Cgroup(cgroup)
		for _, g := range groups {
			if !strings.HasPrefix(g.Path, "/") {
				t.Errorf("%q: %+v", cgroup, g)
			}
		}
		if n, err := Limit(limit); err == nil && n <= 0 {
			t.Errorf("Limit(%q) = %d", limit, n)
		}
		if q, err := Quota(quota); err == nil && (q < 0 || math.IsInf(q, 0) || math.IsNaN(q)) {
			t.Errorf("Quota(%q) = %v", quota, q)
		}
		if d, err := Distances(distances, 2); err == nil && len(d) != 2 {
			t.Errorf("Distances(%q) = %v", distances, d)
		}
		if cpus, nodes, _ := Status(cgroup); !slices.IsSorted(cpus) || !slices.IsSorted(nodes) {
			t.Errorf("Status(%q) = %v, %v", cgroup, cpus, nodes)
		}
	})
}
func FuzzAddresses(f *testing.F) {
	f.Add("Local:\n|-- 10.0.0.1\n/32 host LOCAL\n", "Iface Destination\nib0 0000000A 00000000 0001 0 0 0 00FFFFFF 0 0 0\n", "fd000000000000000000000000000001")
	f.Add("|-- \n/32 host LOCAL\n", "a b c d e f g h\n", "x")
	f.Fuzz(func(t *testing.T, trie, routes, six string) {
		for iface, addresses := range Addresses(trie, routes, six) {
			for _, a := range addresses {
				if !a.IsValid() || a.Zone() != "" || iface == "" {
					t.Errorf("%q, %q, %q: %q has %v", trie, routes, six, iface, a)
				}
			}
		}
	})
}

// TestAddresses: an IPv4 address belongs to the smallest network that has no gateway.
func TestAddresses(t *testing.T) {
	const trie = "Main:\n  |-- 10.1.2.3\n     /32 host LOCAL\n  |-- 10.1.2.0\n     /24 link UNICAST\n" +
		"Local:\n  |-- 10.1.2.3\n     /32 host LOCAL\n  |-- 10.9.0.1\n     /32 host LOCAL\n"
	const routes = "Iface Destination Gateway Flags RefCnt Use Metric Mask\n" +
		"eth0 00000000 0101010A 0003 0 0 0 00000000\neth1 0000000A 00000000 0001 0 0 0 000000FF\n" +
		"ib0 0002010A 00000000 0001 0 0 0 00FFFFFF\nib1 0002010A 00000000 0001 0 0 0 00FFFFFF\n" +
		"ib2 0302010A 0101010A 0007 0 0 0 FFFFFFFF\nib3 0002010A 00000000 0001 0 0 0 FF00FFFF\n"
	const six = "fd000000000000000000000000000001 02 40 00 80 ib0\nx 1 2 3 4 ib0\n0A000001 02 40 00 80 ib0\n"
	got := fmt.Sprint(Addresses(trie, routes, six))
	if want := "map[eth1:[10.9.0.1] ib0:[10.1.2.3 fd00::1]]"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// TestCPUTimes: each CPU's own line counts, with the time that the host gave to others, and lines that
// are not understood do not.
func TestCPUTimes(t *testing.T) {
	const text = `cpu  1373485 37963 495528 631861 9318 0 7737 2112 0 0
cpu0 100 20 30 4000 500 6 7 8 90 1
cpu12 1 2 3 4
cpu3 1 2 x 4 5
cpu4 1 2
cpus 1 2 3 4 5
intr 103089943 0 0 0
`
	want := map[int]CPUTime{0: {Busy: 100 + 20 + 30 + 6 + 7 + 8, Idle: 4500}, 12: {Busy: 6, Idle: 4}}
	if got := CPUTimes(text); !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if got := CPUTimes(""); len(got) != 0 {
		t.Errorf("%v of an empty text", got)
	}
}
