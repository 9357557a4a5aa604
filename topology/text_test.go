package topology

import (
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// oneFile returns a tree with one file.
func oneFile(t *testing.T, file, text string) *tree {
	root := t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, filepath.Dir(file)), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, file), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	tree, err := openTree(t.Context(), root)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tree.root.Close() })
	return tree
}

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
		tree := oneFile(t, systemMemory, c.text)
		m := tree.meminfo(systemMemory)
		if errs := len(tree.warned); m.TotalBytes != c.value || (errs == 0) != c.ok || c.ok == false && errs != c.errs+1 {
			t.Errorf("%q: %v, %v, want %d", c.text, m, tree.warned, c.value)
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
		model, cpus := parseCPUInfo(c.text)
		if want, _ := parseSet(c.cpus); model != c.model || !slices.Equal(cpus, want) {
			t.Errorf("%q: %q, %v", c.text, model, cpus)
		}
	}
}

func TestMountinfo(t *testing.T) {
	tree := oneFile(t, selfMounts, `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 propagate_from:2 - ext3 /dev/root rw,errors=continue
37 36 0:5 / /a\040b\134c\0 ro,relatime - tmpfs tmpfs rw

38 36 0:6 / /x rw - overlay overlay ro,upperdir=/u\054v
39 36 0:7 / /y rw - fuse  rw
40 36 0:8 / /z rw - 9p src
`)
	tree.readMounts()
	want := []mount{
		{Mount{"/mnt2", "ext3", "/dev/root", false}, "98:0", "/mnt1", []string{"rw", "errors=continue"}},
		{Mount{`/a b\c\0`, "tmpfs", "tmpfs", true}, "0:5", "/", []string{"rw"}},
		{Mount{"/x", "overlay", "overlay", true}, "0:6", "/", []string{"ro", "upperdir=/u", "v"}},
		{Mount{"/y", "fuse", "rw", false}, "0:7", "/", nil},
		{Mount{"/z", "9p", "src", false}, "0:8", "/", nil},
	}
	if !reflect.DeepEqual(tree.mounts, want) || len(tree.warned) != 0 {
		t.Errorf("got %+v, %v", tree.mounts, tree.warned)
	}
	for _, line := range []string{"x", "1 2 3 / /a rw - a b c", "1 2 3:4 / a rw - a b c", "1 2 3:4 / /a - a b c", "1 2 3:4 / /a rw a b c", "1 2 3:4 / /a rw - a", "1 2 a:4 / /a rw - a b c"} {
		tree := oneFile(t, selfMounts, line)
		if tree.readMounts(); len(tree.mounts) != 0 || len(tree.warned) != 1 {
			t.Errorf("%q: %+v, %v", line, tree.mounts, tree.warned)
		}
	}
}

func TestCgroup(t *testing.T) {
	tree := oneFile(t, selfCgroups, "")
	groups := tree.parseCgroups("11:cpu,cpuacct:/a:b\n1:name=systemd:/x\n0::/user.slice\n\nbad\n0::relative\n")
	want := map[string]string{"cpu": "/a:b", "cpuacct": "/a:b", "name=systemd": "/x", "": "/user.slice"}
	if !maps.Equal(groups, want) || len(tree.warned) != 2 {
		t.Errorf("got %+v, %v", groups, tree.warned)
	}
}

func TestLimitAndQuota(t *testing.T) {
	for text, want := range map[string]int64{"max": 0, "1": 1, "9223372036854771712": 0, "9223372036854710272": 0, "4611686018427387903": 4611686018427387903, "18446744073709551615": 0, "0": -1, "": -1, "-1": -1, "1k": -1, "99999999999999999999": -1} {
		got, err := parseLimit(text)
		if err != nil {
			got = -1
		}
		if got != want {
			t.Errorf("parseLimit(%q) = %d, %v; want %d", text, got, err, want)
		}
	}
	for text, want := range map[string]float64{
		"max 100000": 0, "max": 0, "-1 100000": 0, "-1": 0, "50000 100000": 0.5, "150000": 1.5, "300000 100000": 3,
		"": -1, "0 100000": -1, "1 0": -1, "max 0": -1, "1 2 3": -1, "a b": -1, "-2 100000": -1,
	} {
		got, err := parseQuota(text)
		if err != nil {
			got = -1
		}
		if got != want {
			t.Errorf("parseQuota(%q) = %v, %v; want %v", text, got, err, want)
		}
	}
}

func TestPrintable(t *testing.T) {
	for text, want := range map[string]string{"  a \t b\n": "a b", "\x1b[31mred\x07": "[31mred", "\xff\xfe": "", "ü": "ü"} {
		if got := printable(text); got != want {
			t.Errorf("printable(%q) = %q, want %q", text, got, want)
		}
	}
	if got := label(strings.Repeat("ü", 300)); len(got) > maxNameBytes || strings.Trim(got, "ü") != "" {
		t.Errorf("a long name: %d bytes, %q", len(got), got)
	}
}

func FuzzMeminfo(f *testing.F) {
	f.Add("MemTotal: 1 kB\nNode 0 MemFree: 2 kB\n")
	f.Add("MemTotal: 99999999999999999999 kB")
	f.Fuzz(func(t *testing.T, s string) {
		m := oneFile(t, systemMemory, s).meminfo(systemMemory)
		for _, v := range []int64{m.TotalBytes, m.FreeBytes, m.AvailableBytes, m.SwapBytes} {
			if v < 0 || v%1024 != 0 {
				t.Errorf("%q: %+v", s, m)
			}
		}
		model, cpus := parseCPUInfo(s)
		if len(model) > maxNameBytes || !slices.IsSorted(cpus) {
			t.Errorf("%q: %q, %v", s, model, cpus)
		}
	})
}

func FuzzMountinfo(f *testing.F) {
	f.Add(`36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue`)
	f.Add(`37 36 0:5 / /a\040b\13 ro - tmpfs tmpfs rw`)
	f.Fuzz(func(t *testing.T, s string) {
		tree := oneFile(t, selfMounts, s)
		tree.readMounts()
		if n := len(tree.mounts) + len(tree.warned) + tree.unlisted; n > strings.Count(s, "\n")+1 {
			t.Errorf("%q: %d mounts and warnings", s, n)
		}
		for _, m := range tree.mounts {
			if !strings.HasPrefix(m.Point, "/") || !isDeviceNumber(m.device) {
				t.Errorf("%q: %+v", s, m)
			}
			if got, ok := tree.mountOf(m.Point); !ok || len(got.Point) > len(m.Point) {
				t.Errorf("%q: %q is on %+v", s, m.Point, got)
			}
		}
	})
}

func FuzzCgroup(f *testing.F) {
	f.Add("4:memory:/docker/abc\n0::/\n", "max", "150000 100000", "10 21")
	f.Add("a:b", "18446744073709551616", "1 0", "10 0")
	f.Fuzz(func(t *testing.T, cgroup, limit, quota, distances string) {
		tree := oneFile(t, selfStatus, cgroup)
		for _, group := range tree.parseCgroups(cgroup) {
			if !strings.HasPrefix(group, "/") {
				t.Errorf("%q: %s", cgroup, group)
			}
		}
		if n, err := parseLimit(limit); err == nil && n < 0 {
			t.Errorf("parseLimit(%q) = %d", limit, n)
		}
		if q, err := parseQuota(quota); err == nil && (q < 0 || math.IsInf(q, 0) || math.IsNaN(q)) {
			t.Errorf("parseQuota(%q) = %v", quota, q)
		}
		if d, err := parseDistances(distances, 2); err == nil && len(d) != 2 {
			t.Errorf("parseDistances(%q) = %v", distances, d)
		}
		if cpus, nodes := tree.affinity(); !slices.IsSorted(cpus) || !slices.IsSorted(nodes) {
			t.Errorf("affinity of %q: %v, %v", cgroup, cpus, nodes)
		}
	})
}

func FuzzAddresses(f *testing.F) {
	f.Add("Local:\n|-- 10.0.0.1\n/32 host LOCAL\n", "Iface Destination\nib0 0000000A 00000000 0001 0 0 0 00FFFFFF 0 0 0\n", "fd000000000000000000000000000001")
	f.Add("|-- \n/32 host LOCAL\n", "a b c d e f g h\n", "x")
	f.Fuzz(func(t *testing.T, trie, routes, six string) {
		for iface, addresses := range parseAddresses(trie, routes, six) {
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
	got := fmt.Sprint(parseAddresses(trie, routes, six))
	if want := "map[eth1:[10.9.0.1] ib0:[10.1.2.3 fd00::1]]"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}
