package main

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/inject"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/internal/testseed"
)

// TestFaults: every fault ends as the contract says, with everything given back: survived,
// or found, with status 1 and a line that says what failed and why.
func TestFaults(t *testing.T) {
	t.Parallel()
	const survived, found, either = 0, 1, -1
	first, step := testseed.Share(t, 2)
	for i, c := range []struct {
		fault  string
		status int
		want   string
	}{
		{"op=read,kind=eio,at=2", found, "input/output error"},
		{"op=read,kind=eio,p=1", found, "input/output error"},
		{"op=read,kind=bitflip,at=2", found, "corrupt"},
		{"op=read,kind=bitflip", found, "corrupt"},
		{"op=read,kind=short", survived, ""},
		{"op=read,kind=slow:0.1", survived, ""},

		{"op=write,kind=eio,at=2", survived, ""}, // the batch stays where it is, and moves later
		{"op=write,kind=eio", found, "no space"}, // nothing can leave the GPU
		// A waiter gets the error while a disk is full; otherwise there is none.
		{"op=write,kind=enospc,at=2", either, "no space"},
		{"op=write,kind=enospc", found, "no space"},
		{"op=write,kind=bitflip,at=1", found, "corrupt"},
		{"op=write,kind=short,p=0.5", survived, ""},
		{"op=write,kind=short", survived, ""},
		{"op=write,kind=slow:0.1", survived, ""},
		{"op=write,kind=eio,path=/nowhere/*", survived, ""}, // hits nothing

		{"op=alloc,kind=oom,at=3", survived, ""}, // tried again
		{"op=alloc,kind=oom", found, "gpu:0 has no space"},
		{"op=alloc,kind=eio,at=3", found, "input/output error"},
		{"op=alloc,kind=slow:0.1", survived, ""},

		{"op=copy,kind=eio,at=2", found, "input/output error"},
		// The flipped bit is one of padding, or of a batch that a later checksum covers or not.
		{"op=copy,kind=bitflip,at=2", either, "(--fault op=copy,kind=bitflip,at=2, hits: 1)"},
		{"op=copy,kind=slow:0.1", survived, ""},
	} {
		if i%step != first {
			continue
		}
		t.Run(c.fault, func(t *testing.T) {
			args := append(small, "--fault="+c.fault, "--json=-", "--quiet")
			if strings.Contains(c.fault, "enospc") {
				args = append(args, soon)
			}
			r := command(t, t.Context(), args...)
			if r.status != c.status && (c.status != either || r.status != survived && r.status != found) {
				t.Fatalf("ended with %d, want %d: %s", r.status, c.status, r.stderr)
			}
			if r.status == found {
				if !strings.Contains(r.stderr, c.want) || strings.Count(r.stderr, "\n") != 1 {
					t.Errorf("%q does not say %q in one line", r.stderr, c.want)
				}
				return
			}
			var doc report.Run
			decode(t, r.stdout, &doc)
			if f := doc.Config.Faults; len(f) != 1 || f[0].Spec != c.fault || (f[0].Hits == 0) != strings.Contains(c.fault, "nowhere") {
				t.Errorf("the faults are told as %+v", f)
			}
			if v := doc.Verify; !v.Checked || v.Batches != doc.Input.Batches || v.Mismatches != 0 {
				t.Errorf("verified %+v of %d", v, doc.Input.Batches)
			}
			for _, s := range doc.Spaces {
				if s.EndBytes != 0 {
					t.Errorf("%s ends with %d bytes", s.ID, s.EndBytes)
				}
			}
		})
	}
}

// TestFaultIsNamed where it is the reason, and its status is that of wrong data whatever
// the error would have otherwise.
func TestFaultIsNamed(t *testing.T) {
	t.Parallel()
	r := command(t, t.Context(), append(small, soon, "--fault=op=write,kind=enospc")...)
	if r.status != 1 || !strings.Contains(r.stderr, "--fault op=write,kind=enospc, hits: ") {
		t.Errorf("ended with %d: %s", r.status, r.stderr)
	}
	// Without one that hit, it is the machine's matter.
	r = command(t, t.Context(), soon, "--gpu-memory=1MiB", "--host-memory=1MiB", "--disk", t.TempDir()+"=1MiB", "--fault=op=read,kind=eio,at=1000000")
	if r.status != 3 || strings.Contains(r.stderr, "--fault") {
		t.Errorf("ended with %d: %s", r.status, r.stderr)
	}
	// And slowness is no reason.
	r = command(t, t.Context(), soon, "--gpu-memory=1MiB", "--host-memory=1MiB", "--disk", t.TempDir()+"=1MiB", "--fault=op=write,kind=slow:0.1")
	if r.status != 3 || strings.Contains(r.stderr, "hits") {
		t.Errorf("ended with %d: %s", r.status, r.stderr)
	}
}

func TestSeveralFaults(t *testing.T) {
	t.Parallel()
	doc := runJSON(t, append(small, "--quiet", "--fault=op=read,kind=short,p=0.5", "--fault=op=write,kind=slow:0.1", "--fault=op=copy,kind=slow:0.1,times=3")...)
	f := doc.Config.Faults
	if len(f) != 3 || f[0].Hits == 0 || f[1].Hits == 0 || f[2] != (report.Fault{Spec: "op=copy,kind=slow:0.1,times=3", Hits: 3}) {
		t.Errorf("%+v", f)
	}
}

// hitsOfChance are how many of n operations a fault of writing hits with a seed.
func hitsOfChance(t *testing.T, spec string, seed uint64, n int) (hits int64) {
	t.Helper()
	parsed, err := inject.Parse(spec)
	if err != nil {
		t.Fatal(err)
	}
	faults := inject.New([]inject.Spec{parsed}, 0, seed)
	f, err := faults.Volume().Create(filepath.Join(t.TempDir(), "f"), false)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	faults.Arm()
	for range n {
		if _, err := f.WriteAt([]byte("x"), 0); err != nil {
			t.Fatal(err)
		}
	}
	return faults.Hits()[0]
}

// chanceOfSeed runs a command with a fault that happens by chance, and checks that the chance is
// that of --seed. The document is on standard output.
func chanceOfSeed(t *testing.T, args ...string) ran {
	t.Helper()
	const spec, seed = "op=write,kind=slow:0.001,p=0.5", 7
	r := command(t, t.Context(), append(slices.Clone(args), "--json=-", "--fault="+spec, fmt.Sprint("--seed=", seed))...)
	_, told, _ := strings.Cut(r.stderr, "--fault "+spec+", hits: ")
	var hits int64
	var n int
	if _, err := fmt.Sscanf(told, "%d of %d operations", &hits, &n); r.status != 0 || err != nil || n < 20 {
		t.Fatalf("%q ended with %d, of %d operations (%v): %s", args, r.status, n, err, r.stderr)
	}
	if want := hitsOfChance(t, spec, seed, n); hits != want {
		t.Errorf("%q: %d of %d operations were hit, and with the seed it is %d", args, hits, n, want)
	}
	return r
}

// TestSeedOfFaults: chance is that of --seed. TestCompareFaults and TestBandwidthFaults show
// the same of their commands.
func TestSeedOfFaults(t *testing.T) {
	t.Parallel()
	var doc report.Run
	decode(t, chanceOfSeed(t, append([]string{"run", "--rows-per-batch=500"}, small...)...).stdout, &doc)
	if f := doc.Config.Faults; len(f) != 1 || f[0].Hits == 0 {
		t.Errorf("the faults are told as %+v", f)
	}
}

// TestFaultsAreNoted for people, also those that hit nothing.
func TestFaultsAreNoted(t *testing.T) {
	t.Parallel()
	r := succeed(t, append(small, "--fault=op=read,kind=slow:0.1,times=2", "--fault=op=read,kind=eio,at=1000000")...)
	for _, want := range []string{"--fault op=read,kind=slow:0.1,times=2, hits: 2 of ", "--fault op=read,kind=eio,at=1000000, hits: 0 of "} {
		if !strings.Contains(r.stdout, want) {
			t.Errorf("%q is not in\n%s", want, r.stdout)
		}
	}
}

// TestVerifyFindsFaults: verify goes along every edge, so that each fault meets it.
func TestVerifyFindsFaults(t *testing.T) {
	t.Parallel()
	path := writeTable(t, "t.arrow", 1, 2000)
	for fault, want := range map[string]string{
		"op=read,kind=eio,at=2":      "input/output error",
		"op=read,kind=bitflip,at=1":  "corrupt",
		"op=write,kind=enospc,at=1":  "no space",
		"op=write,kind=bitflip,at=1": "corrupt",
		"op=alloc,kind=oom":          "no space",
		"op=copy,kind=eio,at=1":      "input/output error",
		"op=copy,kind=bitflip,at=1":  "differences",
	} {
		t.Run(fault, func(t *testing.T) {
			r := command(t, t.Context(), "verify", path, "--gpu-memory=4MiB", "--host-memory=4MiB", "--fault="+fault, "--json=-")
			if r.status != 1 || !strings.Contains(r.stderr, want) || !strings.Contains(r.stderr, "--fault "+fault) {
				t.Errorf("ended with %d: %s", r.status, r.stderr)
			}
			var doc report.Verify
			decode(t, r.stdout, &doc)
			if f := doc.Config.Faults; len(f) != 1 || f[0].Spec != fault || f[0].Hits == 0 || doc.Files[0].Error == "" {
				t.Errorf("%+v in %+v", f, doc.Files)
			}
		})
	}
	r := command(t, t.Context(), "verify", path, "--gpu-memory=4MiB", "--host-memory=4MiB", "--quiet", "--fault=op=read,kind=short", "--fault=op=write,kind=short", "--fault=op=copy,kind=slow:0.1")
	if r.status != 0 {
		t.Errorf("ended with %d: %s", r.status, r.stderr)
	}
}

// TestThrottle: the rate is kept, and shown; that it is exact is tested in faultfs. A
// faster disk than this cannot have been.
func TestThrottle(t *testing.T) {
	t.Parallel()
	doc := runJSON(t, append(small, "--disk-throttle=20MiB")...)
	if doc.Config.DiskThrottleBytesPerS != 20<<20 || !slices.Equal(doc.Config.Faults, []report.Fault{}) {
		t.Errorf("%+v", doc.Config)
	}
	moved := int64(0)
	for _, e := range doc.Edges {
		if strings.HasPrefix(e.From, "disk") != strings.HasPrefix(e.To, "disk") {
			moved += e.Bytes
		}
	}
	seconds := 0.0
	for _, p := range doc.Phases {
		seconds += p.Seconds
	}
	if moved == 0 || float64(moved)/seconds > 20<<20*1.1 {
		t.Errorf("%d bytes passed the disk in %v s", moved, seconds)
	}
}
