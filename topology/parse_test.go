package topology

import (
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
)

func TestParseSet(t *testing.T) {
	for text, want := range map[string]Set{
		"": {}, "\n": {}, "0": {0}, "0-3\n": {0, 1, 2, 3}, "3,1,2,1": {1, 2, 3}, " 0-1 , 5 ": {0, 1, 5}, "0-2,1-4": {0, 1, 2, 3, 4},
		"0-9:2/4": {0, 1, 4, 5, 8, 9}, "65535": {65535}, "7-7": {7}, "0-3:1/8": {0},
	} {
		if got, err := ParseSet(text); err != nil || !slices.Equal(got, want) || got == nil {
			t.Errorf("ParseSet(%q) = %v, %v; want %v", text, got, err, want)
		}
	}
	for _, text := range []string{
		",", "0,", ",0", "-", "0-", "-3", "3-1", "a", "0x1", "1.5", "+1", "1 2", "65536", "0-65536", "4294967295",
		"18446744073709551616", "0-3:2", "0-3:0/2", "0-3:3/2", "5:1/2", "0-3:1/0", "\x00", "٣", strings.Repeat("0,", maxRanges) + "0",
	} {
		if got, err := ParseSet(text); err == nil {
			t.Errorf("ParseSet(%.40q) = %v, want an error", text, got)
		}
	}
	if got := (Set{0, 1, 2, 4, 6, 7}).String(); got != "0-2,4,6-7" {
		t.Errorf("String: %q", got)
	}
	if got := (Set{1, 2, 3}).Intersect(Set{3, 4}); !slices.Equal(got, Set{3}) {
		t.Errorf("Intersect: %v", got)
	}
	s := Set{9}
	if err := s.UnmarshalText([]byte("x")); err == nil || !slices.Equal(s, Set{9}) {
		t.Errorf("UnmarshalText: %v, %v", s, err)
	}
}

func TestParseMeminfo(t *testing.T) {
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
		values, errs := parseMeminfo(c.text, "MemTotal")
		if v, ok := values["MemTotal"]; v != c.value || ok != c.ok || len(errs) != c.errs {
			t.Errorf("%q: %v, %v, want %d", c.text, values, errs, c.value)
		}
	}
}

func TestParseCPUInfo(t *testing.T) {
	for _, c := range []struct {
		text, model, cpus string
	}{
		{"processor\t: 0\nmodel name\t: A  B\nprocessor\t: 1\nmodel name\t: C\n", "A B", "0-1"},
		{"processor\t: 1\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\nprocessor\t: 0\n", "ARM implementer 0x41 part 0xd4f", "0-1"},
		{"processor\t: 0\ncpu\t\t: POWER9, altivec supported\n", "POWER9, altivec supported", "0"},
		{"processor : x\n", "", ""}, {"", "", ""},
	} {
		model, cpus := parseCPUInfo(c.text)
		if model != c.model || cpus.String() != c.cpus {
			t.Errorf("%q: %q, %s", c.text, model, cpus)
		}
	}
}

func TestParseMountinfo(t *testing.T) {
	mounts, errs := parseMountinfo(`36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 propagate_from:2 - ext3 /dev/root rw,errors=continue
37 36 0:5 / /a\040b\134c\0 ro,relatime - tmpfs tmpfs rw

38 36 0:6 / /x rw - overlay overlay ro,upperdir=/u\054v
39 36 0:7 / /y rw - fuse  rw
40 36 0:8 / /z rw - 9p src
`)
	want := []mount{
		{device: "98:0", root: "/mnt1", point: "/mnt2", fileSystem: "ext3", source: "/dev/root", options: []string{"rw", "errors=continue"}},
		{device: "0:5", root: "/", point: `/a b\c\0`, fileSystem: "tmpfs", source: "tmpfs", options: []string{"rw"}, readOnly: true},
		{device: "0:6", root: "/", point: "/x", fileSystem: "overlay", source: "overlay", options: []string{"ro", "upperdir=/u", "v"}, readOnly: true},
		{device: "0:7", root: "/", point: "/y", fileSystem: "fuse", source: "rw"},
		{device: "0:8", root: "/", point: "/z", fileSystem: "9p", source: "src"},
	}
	if !reflect.DeepEqual(mounts, want) || len(errs) != 0 {
		t.Errorf("got %+v, %v", mounts, errs)
	}
	for _, line := range []string{"x", "1 2 3 / /a rw - a b c", "1 2 3:4 / a rw - a b c", "1 2 3:4 / /a - a b c", "1 2 3:4 / /a rw a b c", "1 2 3:4 / /a rw - a", "1 2 a:4 / /a rw - a b c"} {
		if got, errs := parseMountinfo(line); len(got) != 0 || len(errs) != 1 {
			t.Errorf("%q: %+v, %v", line, got, errs)
		}
	}
}

func TestParseCgroup(t *testing.T) {
	groups, errs := parseCgroup("11:cpu,cpuacct:/a:b\n1:name=systemd:/x\n0::/user.slice\n\nbad\n0::relative\n")
	want := []group{{[]string{"cpu", "cpuacct"}, "/a:b"}, {[]string{"name=systemd"}, "/x"}, {nil, "/user.slice"}}
	if !reflect.DeepEqual(groups, want) || len(errs) != 2 {
		t.Errorf("got %+v, %v", groups, errs)
	}
}

func TestParseLimitAndQuota(t *testing.T) {
	for text, want := range map[string]int64{"max": noLimit, "1": 1, "9223372036854771712": noLimit, "9223372036854710272": noLimit, "4611686018427387903": 4611686018427387903, "18446744073709551615": noLimit, "0": 0, "": 0, "-1": 0, "1k": 0, "99999999999999999999": 0} {
		if got, err := parseLimit(text); got != want || (err == nil) != (want > 0) {
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

func TestBusAddress(t *testing.T) {
	for text, want := range map[string]bool{
		"0000:3b:00.0": true, "10000:e1:00.0": true, "00000000:3b:00.0": false, "0000:3B:00.0": false, "3b:00.0": false, "": false, "..": false,
	} {
		if got := isBusAddress(text); got != want {
			t.Errorf("isBusAddress(%q) = %v, want %v", text, got, want)
		}
	}
}

func TestParseLinkSpeed(t *testing.T) {
	for text, want := range map[string]int{"2.5 GT/s PCIe": 1, "5 GT/s": 2, "5.0 GT/s PCIe": 2, "8.0 GT/s PCIe": 3, "16.0 GT/s PCIe": 4, "32.0 GT/s PCIe": 5, "64.0 GT/s PCIe": 6, "128.0 GT/s PCIe": 7, "Unknown": 0, "": 0} {
		if got := parseLinkSpeed(text); got != want {
			t.Errorf("parseLinkSpeed(%q) = %d, want %d", text, got, want)
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

func FuzzParseSet(f *testing.F) {
	for _, s := range []string{"0-3,8", "0-9:2/4", "3-1", "4294967295", "", ","} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		set, err := ParseSet(s)
		if err != nil {
			return
		}
		if !slices.IsSorted(set) || len(slices.Compact(slices.Clone(set))) != len(set) || len(set) > maxSetMember+1 {
			t.Errorf("ParseSet(%q): %d members, not ascending or too many", s, len(set))
		}
		if back, err := ParseSet(set.String()); err != nil || !slices.Equal(back, set) {
			t.Errorf("ParseSet(%q) prints as %q, which is %v, %v", s, set, back, err)
		}
	})
}

func FuzzParseMeminfo(f *testing.F) {
	f.Add("MemTotal: 1 kB\nNode 0 MemFree: 2 kB\n")
	f.Add("MemTotal: 99999999999999999999 kB")
	f.Fuzz(func(t *testing.T, s string) {
		values, _ := parseMeminfo(s, "MemTotal", "MemFree")
		for key, v := range values {
			if v < 0 || v%1024 != 0 {
				t.Errorf("%q: %s = %d", s, key, v)
			}
		}
		model, cpus := parseCPUInfo(s)
		if len(model) > maxNameBytes || !slices.IsSorted(cpus) {
			t.Errorf("%q: %q, %v", s, model, cpus)
		}
	})
}

func FuzzParseMountinfo(f *testing.F) {
	f.Add(`36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue`)
	f.Add(`37 36 0:5 / /a\040b\13 ro - tmpfs tmpfs rw`)
	f.Fuzz(func(t *testing.T, s string) {
		mounts, errs := parseMountinfo(s)
		if len(mounts)+len(errs) > strings.Count(s, "\n")+1 {
			t.Errorf("%q: %d mounts, %d errors", s, len(mounts), len(errs))
		}
		for _, m := range mounts {
			if !strings.HasPrefix(m.point, "/") || !isDeviceNumber(m.device) {
				t.Errorf("%q: %+v", s, m)
			}
			if got, ok := mountOf(mounts, m.point); !ok || len(got.point) > len(m.point) {
				t.Errorf("%q: %q is on %+v", s, m.point, got)
			}
		}
	})
}

func FuzzParseCgroup(f *testing.F) {
	f.Add("4:memory:/docker/abc\n0::/\n", "max", "150000 100000", "10 21")
	f.Add("a:b", "18446744073709551616", "1 0", "10 0")
	f.Fuzz(func(t *testing.T, cgroup, limit, quota, distances string) {
		groups, _ := parseCgroup(cgroup)
		for _, g := range groups {
			if !strings.HasPrefix(g.path, "/") {
				t.Errorf("%q: %+v", cgroup, g)
			}
		}
		if n, err := parseLimit(limit); err == nil && n <= 0 {
			t.Errorf("parseLimit(%q) = %d", limit, n)
		}
		if q, err := parseQuota(quota); err == nil && (q < 0 || math.IsInf(q, 0) || math.IsNaN(q)) {
			t.Errorf("parseQuota(%q) = %v", quota, q)
		}
		if d, err := parseDistances(distances, 2); err == nil && len(d) != 2 {
			t.Errorf("parseDistances(%q) = %v", distances, d)
		}
		if cpus, nodes, _ := parseStatus(cgroup); !slices.IsSorted(cpus) || !slices.IsSorted(nodes) {
			t.Errorf("parseStatus(%q) = %v, %v", cgroup, cpus, nodes)
		}
	})
}
