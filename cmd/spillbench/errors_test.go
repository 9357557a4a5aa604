package main

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// TestErrors: everything that can be given wrongly ends with the status that the
// help names, and one line that says what to do.
func TestErrors(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	whole := writeTable(t, "t.parquet", 2, 5000)
	content, err := os.ReadFile(whole)
	if err != nil {
		t.Fatal(err)
	}
	file := writeFile(t, "file", "x")
	missing := filepath.Join(t.TempDir(), "missing")
	big := writeTable(t, "big.arrow", 1, 60_000)
	for _, c := range []struct {
		name   string
		args   []string
		status int
		want   []string
	}{
		{"unknown flag", []string{"--htm5=x"}, 2, []string{"--htm5", "--help"}},
		{"unknown codec", []string{"--codec=lz4"}, 2, []string{"lz4", "auto, none, s2, zstd or bitpack"}},
		{"unknown flag of run", []string{"run", "--htm5=x"}, 2, []string{"--htm5"}},
		{"run flag of verify", []string{"verify", "--passes=2", whole}, 2, []string{"--passes"}},
		{"argument of topo", []string{"topo", "x"}, 2, []string{"topo", `unknown command "x"`}},
		{"fault of topo", []string{"topo", "--fault=op=read,kind=eio"}, 2, []string{"--fault"}},
		{"engine flag of topo", []string{"topo", "--gpu=sim"}, 2, []string{"--gpu"}},
		{"unknown command", []string{"bench"}, 2, []string{`unknown command "bench" for "spillbench"`, "see spillbench --help"}},
		{"file for a command", []string{whole}, 2, []string{"spillbench run " + whole + "; "}},
		{"files for a command", []string{whole, file, "--passes=2"}, 2,
			[]string{"spillbench run " + whole + " " + file + "; "}},
		{"argument of run", []string{"run", missing}, 2, []string{missing, "no such file"}},
		{"second argument of run", []string{"run", whole, missing}, 2, []string{missing, "no such file"}},
		{"a terminal's command in a name", []string{"run", missing + "\n\x1b[31m\u202e"}, 2, []string{missing + ` \x1b[31m\u202e`}},
		{"a terminal's command in a flag", []string{"run", "--\x1b[31m"}, 2, []string{`--\x1b[31m`}},
		{"empty argument of run", []string{"run", ""}, 2, []string{"want FILE"}},
		{"empty input", []string{"--input="}, 2, []string{"want FILE", "--input"}},
		{"verify nothing", []string{"verify"}, 2, []string{"verify needs the name of a file"}},
		{"verify no name", []string{"verify", whole, ""}, 2, []string{"verify needs the name of a file"}},

		{"help on nothing", []string{"help", "nope"}, 2, []string{`unknown command "nope" for "spillbench"`, "see spillbench --help"}},
		{"help on too much", []string{"help", "run", "nope"}, 2, []string{`unknown command "nope" for "spillbench run"`}},
		{"no result file", []string{"--json="}, 2, []string{"--json", "want FILE or -"}},

		{"mistyped flag", []string{"run", "--pases=2"}, 2, []string{"unknown flag: --pases (see spillbench run --help)"}},
		{"mistyped flag of the root", []string{"--polcy=lru"}, 2, []string{"unknown flag: --polcy (see spillbench --help)"}},
		{"flag as Go has it", []string{"run", "-passes", "2"}, 2, []string{"-passes"}},
		{"mistyped flag of all commands", []string{"topo", "--cpu-profile=x"}, 2, []string{"--cpu-profile"}},
		{"hidden flag, mistyped", []string{"compare", "--gpu-memry=1MiB"}, 2, []string{"unknown flag: --gpu-memry (see"}},
		{"version as a command", []string{"version"}, 2, []string{`unknown command "version"`}},
		{"mistyped command", []string{"verfiy", whole}, 2, []string{"verfiy", "did you mean verify?"}},
		{"mistyped command of trace", []string{"trace", "reply"}, 2, []string{"did you mean replay?", "see spillbench trace --help"}},
		{"trace and no more", []string{"trace"}, 2, []string{"subcommand", "see spillbench trace --help"}},
		{"mistyped help", []string{"help", "bandwith"}, 2, []string{"did you mean bandwidth?"}},
		{"mistyped policy", []string{"--policy=lur"}, 2, []string{`"lur"`, "lru"}},
		{"where the choices are", []string{"run", "--policy=mru"}, 2, []string{"--policy", "see spillbench run --help"}},
		{"mistyped codec", []string{"--codec=zst"}, 2, []string{`"zst"`, "zstd"}},
		{"mistyped peer", []string{"compare", "--peer=arow-ipc"}, 2, []string{`"arow-ipc"`, "want arrow-ipc"}},
		{"mistyped format", []string{"topo", "--format=jsno"}, 2, []string{"want table, json, csv or markdown (see"}},
		{"mistyped kinds", []string{"bandwidth", "--between=gpu,hsot"}, 2, []string{"hsot", "host"}},
		{"mistyped fault", []string{"--fault=op=raed,kind=eio"}, 2, []string{"raed", "want read,"}},
		{"mistyped kind of fault", []string{"--fault=op=read,kind=bitfilp"}, 2, []string{"bitfilp", "bitflip"}},
		{"mistyped key of a fault", []string{"--fault=op=read,knid=eio"}, 2, []string{"knid", "kind"}},
		{"unknown format", []string{"--format=xml"}, 2, []string{"--format", "table, json, csv, markdown or benchfmt"}},
		{"mistyped format of report", []string{"report", whole, "--format=htm"}, 2, []string{": want table, csv, markdown or benchfmt (see"}},
		{"format that report does not print", []string{"report", whole, "--format=jsno"}, 2, []string{": want table, csv, markdown or benchfmt (see"}},
		{"mistyped format of verify", []string{"verify", whole, "--format=bnchfmt"}, 2, []string{": want table, json, csv or markdown (see"}},
		{"no format", []string{"topo", "--format="}, 2, []string{"--format", "table"}},
		{"two results on standard output", []string{"--format=csv", "--json=-"}, 2, []string{"--json -", "--format csv", "--json FILE"}},
		{"one result twice", []string{"topo", "--format=json", "--json=-"}, 2, []string{"--json -", "--format json"}},
		{"a quiet table", []string{"--format=table", "--quiet"}, 2, []string{"--quiet", "--format table"}},
		{"figures of no measurement", []string{"verify", whole, "--format=benchfmt"}, 2, []string{`"benchfmt" for "--format"`, "want table, json, csv or markdown (see"}},

		{"no number", []string{"--passes=abc"}, 2,
			[]string{`"abc" for "--passes" flag`, "want a number from 0 to 1000000 (see spillbench --help)"}},
		{"negative seed", []string{"--seed=-1"}, 2, []string{`"-1" for "--seed" flag`}},
		{"huge number", []string{"--passes=99999999999999999999"}, 2, []string{"--passes", "from 0 to 1000000"}},
		{"no numbers", []string{"bandwidth", "--threads=1,a"}, 2, []string{"--threads", `"1,a"`}},
		{"neither true nor false", []string{"--encrypt=maybe"}, 2, []string{`"maybe" for "--encrypt" flag`}},
		{"no share", []string{"--limit=x"}, 2, []string{`"x" for "--limit" flag`}},
		{"no duration", []string{"--monitor-period=5"}, 2, []string{"--monitor-period", "missing unit in duration"}},

		{"no GPUs", []string{"--gpus=0"}, 2, []string{`"0" for "--gpus" flag`, "1 to 64"}},
		{"too many GPUs", []string{"--gpu=sim", "--gpus=65"}, 2, []string{`"65" for "--gpus" flag`, "1 to 64"}},
		{"bad size", []string{"--gpu-memory=12x"}, 2, []string{"12x", "--gpu-memory"}},
		{"negative size", []string{"--host-memory=-1"}, 2, []string{"-1", "negative"}},
		{"zero size", []string{"--gpu-memory=0"}, 2, []string{"above zero"}},
		{"share of no GPU", []string{"--gpu=sim", "--gpu-memory=50%"}, 2, []string{"give it in bytes", "--gpu-memory"}},
		{"tiny GPU", []string{"--gpu-memory=10"}, 2, []string{"--gpu-memory 10", "4KiB"}},
		{"tiny host", []string{"--host-memory=4KiB"}, 2, []string{"--host-memory"}},
		{"bad disk size", []string{"--disk=/=1zz"}, 2, []string{"1zz", "DIR=SIZE"}},
		{"tiny disk", []string{"--disk", t.TempDir() + "=1"}, 2, []string{"--disk ", "=1 is less than any batch takes", "4KiB"}},
		{"no disk name", []string{"--disk==1MiB"}, 2, []string{"DIR"}},
		{"bad marks", []string{"--stop=0.9"}, 2, []string{"0.9", "--stop"}},
		{"marks that are no numbers", []string{"--limit=NaN"}, 2, []string{"limit NaN", "--limit <= 1"}},
		{"bad policy", []string{"--policy=mru"}, 2, []string{"mru", "lru"}},
		{"bad place", []string{"--place=disk"}, 2, []string{"disk", "fits"}},
		{"bad backend", []string{"--gpu=opencl"}, 2, []string{"opencl", "cuda or sim"}},
		{"no period", []string{"--monitor-period=0s"}, 2, []string{"--monitor-period", "50ms"}},
		{"no patience", []string{"--stall-timeout=0s"}, 2, []string{"--stall-timeout", "30s"}},
		{"no workers", []string{"--workers=0"}, 2, []string{"--workers", "1 to"}},
		{"no number of repeats", []string{"--repeat=x"}, 2, []string{`"x" for "--repeat" flag`, "from 1 to 1000000"}},
		{"negative passes", []string{"--passes=-1"}, 2, []string{"--passes", "0 to"}},
		{"too many partitions", []string{"--partitions=1000000"}, 2, []string{"--partitions"}},
		{"no fault", []string{"--fault="}, 2, []string{"--fault", "op=read,kind=eio,at=3"}},
		{"bad fault", []string{"--fault=op=read,kind=boom"}, 2, []string{"--fault", "kind=boom", "bitflip"}},
		{"fault that cannot be", []string{"verify", whole, "--fault=op=alloc,kind=bitflip"}, 2, []string{"bitflip cannot happen to an allocation", "kind=oom"}},
		{"bad rate", []string{"--write-ahead=30%"}, 2, []string{"--write-ahead", "64MiB"}},
		{"bad throttle", []string{"--disk-throttle=fast"}, 2, []string{"--disk-throttle", "fast"}},
		{"no throttle", []string{"--disk-throttle=0"}, 2, []string{"--disk-throttle", "above zero"}},
		{"share of a speed", []string{"verify", whole, "--disk-throttle=50%"}, 2,
			[]string{`"50%" for "--disk-throttle"`, "64MiB"}},
		{"bad rows", []string{"verify", "--rows-per-batch=-1", whole}, 2, []string{"--rows-per-batch"}},

		{"missing input", []string{"run", "--input=" + missing + "/x.parquet"}, 2, []string{missing + "/x.parquet", "no such file"}},
		{"second input missing", []string{"run", "--input", whole, "--input=" + missing}, 2, []string{missing}},
		{"broken Parquet", []string{"run", "--input", writeFile(t, "b.parquet", "PAR1 and no more")}, 2, []string{"b.parquet", "Parquet"}},
		{"truncated Parquet", []string{"run", "--input", writeFile(t, "c.parquet", string(content[:len(content)/2]))}, 2, []string{"c.parquet"}},
		{"directory", []string{"run", "--input", t.TempDir()}, 2, []string{"directory"}},
		{"no batches", []string{"run", "--input", writeFile(t, "h.csv", "a,b\n")}, 2, []string{"no batches"}},
		{"verify missing", []string{"verify", missing + ".arrow"}, 2, []string{missing + ".arrow"}},
		{"verify broken", []string{"verify", writeFile(t, "d.arrow", "ARROW1\x00\x00broken")}, 2, []string{"d.arrow"}},

		{"missing spill directory", []string{"--disk=" + missing}, 2,
			[]string{"--disk " + missing, "no such file or directory"}},
		{"spill directory is a file", []string{"--disk", file}, 2, []string{file, "not a directory"}},
		{"result in a missing directory", []string{"--json=" + missing + "/r.json"}, 2, []string{"--json " + missing + "/r.json"}},
		{"result is a directory", []string{"--json", t.TempDir()}, 2, []string{"directory"}},
		{"missing root", []string{"topo", "--root=" + missing}, 2, []string{"--root " + missing}},

		{"no CUDA", []string{"--gpu=cuda"}, 3, []string{"--gpu sim"}},
		{"more disk than there is", []string{"--disk", t.TempDir() + "=4EiB"}, 3, []string{"--disk"}},
		{"disk full", []string{soon, "--gpu-memory=1MiB", "--host-memory=1MiB", "--disk", t.TempDir() + "=1MiB"}, 3, []string{"--disk"}},
		{"no room for a batch", []string{"run", "--input", big, "--gpu-memory=1MiB", "--host-memory=1MiB", "--disk", t.TempDir() + "=1MiB"}, 3,
			[]string{"big.arrow, batch 1", "--rows-per-batch"}},
		{"more memory than there is", []string{"--host-memory=99%"}, 3, []string{"which is too little", "--gpu-memory and --host-memory", "together at most"}},
		{"more memory than there is, of others", []string{"compare", "--peer=arrow-ipc", "--host-memory=100%"}, 3, []string{"which is too little"}},
		{"no room to verify", []string{"verify", big, "--gpu-memory=1MiB"}, 3, []string{"twice", "--gpu-memory"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := command(t, t.Context(), c.args...)
			if r.status != c.status {
				t.Errorf("ended with %d, want %d", r.status, c.status)
			}
			if !strings.HasPrefix(r.stderr, "spillbench: ") || strings.Count(r.stderr, "\n") != 1 ||
				!strings.HasSuffix(r.stderr, "\n") {
				t.Errorf("standard error is not one line: %q", r.stderr)
			}
			for _, want := range c.want {
				if !strings.Contains(r.stderr, want) {
					t.Errorf("%q does not say %q", r.stderr, want)
				}
			}
		})
	}
}

// TestUnwritableSpillDirectory: even for a user that may do all, there are directories in which no
// file can be made.
func TestUnwritableSpillDirectory(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("needs Linux's /proc")
	}
	if r := command(
		t,
		t.Context(),
		"--disk=/proc",
	); r.status != 2 ||
		!strings.Contains(r.stderr, "--disk /proc: not writable") {
		t.Errorf("ended with %d: %q", r.status, r.stderr)
	}
}

// TestNoTempDirectory: the machine's fault, not the caller's.
func TestNoTempDirectory(t *testing.T) {
	t.Setenv("TMPDIR", filepath.Join(t.TempDir(), "absent"))
	var stdout, stderr strings.Builder
	if status := Main(
		t.Context(),
		small,
		&stdout,
		&stderr,
	); status != 3 ||
		!strings.Contains(stderr.String(), "--disk DIR") {
		t.Errorf("ended with %d: %q", status, stderr.String())
	}
}

// TestHelp: every command explains itself on standard output.
func TestHelp(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"--help"}, {"run", "--help"}, {"verify", "-h"}, {"topo", "--help"}, {"help", "run"}} {
		if r := succeed(
			t,
			args...); !strings.Contains(r.stdout, "--json FILE") &&
			!strings.Contains(r.stdout, "--json `FILE`") {
			t.Errorf("%q printed %q", args, r.stdout)
		}
	}
}
