package report

import (
	"reflect"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/observe/page"
)

func settingOf(t *testing.T, r page.Run, name string) page.Setting {
	t.Helper()
	for _, s := range r.Settings {
		if s.Name == name {
			return s
		}
	}
	t.Fatalf("there is no setting %q", name)
	return page.Setting{}
}

// TestPageOfRun: a page has the input, what was verified, and what was set.
func TestPageOfRun(t *testing.T) {
	doc := &Run{
		Input:  Input{Sources: []string{"x.parquet"}, Rows: 10, Batches: 97, Bytes: 1 << 30},
		Verify: Verification{Checked: true, Batches: 97, Mismatches: 5},
		Spaces: []Space{{ID: "disk:0", WrittenBytes: 7, ReadBytes: 8}},
	}
	doc.Config.Disks = []Disk{
		{Dir: "/a", CapacityBytes: 1 << 30},
		{Dir: "/b", CapacityBytes: 2 << 30, CapacityGiven: true},
	}
	doc.Config.Faults = []Fault{{Spec: "op=read", Hits: 3}}
	r := PageOf(doc)
	want := page.Input{Sources: []string{"x.parquet"}, Rows: 10, Batches: 97, Bytes: 1 << 30}
	if !reflect.DeepEqual(r.Input, want) {
		t.Errorf("the input is %+v", r.Input)
	}
	if want := (page.Verification{Checked: true, Batches: 97, Mismatches: 5}); r.Verify != want {
		t.Errorf("verified are %+v", r.Verify)
	}
	if s := r.Spaces[0]; s.WrittenBytes != 7 || s.ReadBytes != 8 {
		t.Errorf("the disk is %+v", s)
	}
	if last := r.Facts[len(r.Facts)-1]; last != (page.Pair{Name: "verified", Value: "92 of 97"}) {
		t.Errorf("beside wrong batches stands %+v", last)
	}
	if s := settingOf(
		t,
		r,
		"spill directories",
	); s.Value != "/a (1.0 GiB free) /b (2.0 GiB)" ||
		s.Same != "/a /b (2.0 GiB)" {
		t.Errorf("%+v", s)
	}
	if s := settingOf(t, r, "faults"); s.Value != "op=read (hits: 3)" || s.Same != "op=read" {
		t.Errorf("%+v", s)
	}
	if s := settingOf(t, r, "rows a batch"); s.Value != page.Off {
		t.Errorf("%+v", s)
	}
	if s := settingOf(t, r, "disk slowed to"); s.Value != page.Off || s.Says == "" {
		t.Errorf("%+v", s)
	}
	doc.Input.Sources = []string{Generated + " (seed 1)"}
	doc.Config.DiskThrottleBytesPerS = 100 << 20
	if r = PageOf(doc); !r.Follows {
		t.Error("a generated table is not as large as the memories make it")
	}
	if s := settingOf(t, r, "disk slowed to"); s.Value != "100.0 MiB/s" {
		t.Errorf("%+v", s)
	}
}

// TestPageOfBandwidth: each row has its share of the limit, and the limit says what it is of.
func TestPageOfBandwidth(t *testing.T) {
	doc := &Bandwidth{}
	for _, r := range []BandwidthRow{{From: "host:0", To: "disk:0", LimitOf: "disk I/O"}, {From: "disk:0", To: "gpu:0", LimitOf: "disk I/O"}, {From: "gpu:0", To: "host:0", LimitOf: "memmove"}, {From: "gpu:0", To: "host:0", LimitOf: "driver's copy"}, {From: "gpu:0", To: "host:0", LimitOf: "memmove", BothWays: true}} {
		r.GiBPerS, r.LimitGiBPerS, r.Efficiency, r.Noise = 1, 2, 0.5, 0.01
		doc.Rows = append(doc.Rows, r)
	}
	want := []string{
		"disk I/O from host:0 to disk:0",
		"disk I/O from disk:0 to gpu:0",
		"memmove from gpu:0 to host:0",
		"driver's copy from gpu:0 to host:0",
		"memmove from gpu:0 to host:0",
	}
	for i, f := range PageOf(doc).Figures {
		if f.Share != 0.5 || f.ShareNoise != 0.01 || f.Limit != 2 || f.LimitOf != "The speed of "+want[i] {
			t.Errorf("%+v, want %s", f, want[i])
		}
	}
	doc.Rows[1].Inconclusive = true
	figures := PageOf(doc).Figures
	for i, want := range []string{"50 % of the limit, which varies by 1 %", "cannot be told from the limit, which varies by 1 %"} {
		if text := figures[i].Text; text != want {
			t.Errorf("%q, want %q", text, want)
		}
	}
}

// TestPageOfCompare: the peer is what our rates are shares of.
func TestPageOfCompare(t *testing.T) {
	doc := &Compare{Ratio: Ratios{Write: 2, WriteMin: 1.8, WriteMax: 2.2, Read: 3, ReadMin: 3, ReadMax: 3}}
	doc.Peer.Name, doc.Peer.WriteGiBPerS, doc.Ours.WriteGiBPerS = "p", 1, 2
	f := PageOf(doc).Figures
	if len(f) != 2 || f[0].Share != 2 || f[0].ShareNoise < 0.099 || f[0].ShareNoise > 0.101 ||
		f[0].ShareOf != "of the speed of p" ||
		f[0].Limit != 1 {
		t.Errorf("%+v", f)
	}
	doc.Samples = make([]RoundRates, 3)
	for _, c := range []struct {
		ratio, least, most float64
		want               string
		level              page.Level
	}{
		{2, 1.8, 2.2, "wrote 2.0 times as fast as p, and read 3.0 times as fast as p.", page.Good},
		{1.2, 0.9, 2.2, "wrote about as fast as p (0.90 to 2.20 times), and read 3.0 times as fast as p.", page.Good},
		{0.5, 0.4, 0.6, "wrote 2.0 times slower than p, and read 3.0 times as fast as p.", page.Warn},
	} {
		doc.Ratio.Write, doc.Ratio.WriteMin, doc.Ratio.WriteMax = c.ratio, c.least, c.most
		if p := PageOf(doc); !strings.HasSuffix(p.Headline, c.want) || p.Level != c.level {
			t.Errorf("%q, %v", p.Headline, p.Level)
		}
	}
}
