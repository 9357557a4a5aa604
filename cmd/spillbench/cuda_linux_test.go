package main

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/internal/testseed"
)

// cardMemory is what the emulated card has.
const cardMemory = 16 << 20

// withLibrary runs spillbench as a process of its own whose dynamic linker looks for libraries in
// dir first, with more in its environment. Nothing may be left in the temp directory.
func withLibrary(t *testing.T, dir string, env []string, args ...string) ran {
	t.Helper()
	tmp := t.TempDir()
	cmd := exec.CommandContext(t.Context(), os.Args[0], args...)
	cmd.Env = append(
		os.Environ(),
		commandChild+"=plain "+tmp,
		"TMPDIR="+tmp,
		"LD_LIBRARY_PATH="+dir+":"+os.Getenv("LD_LIBRARY_PATH"),
	)
	cmd.Env = append(cmd.Env, env...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	var exit *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
		t.Errorf("%q left %v (%v)", args, left, err)
	}
	return ran{status: cmd.ProcessState.ExitCode(), stdout: stdout.String(), stderr: stderr.String()}
}

// onCUDA runs it with an emulated card; it must end with 0 and without complaint.
func onCUDA(t *testing.T, args ...string) ran {
	t.Helper()
	cfg := cudatest.Config{Memory: cardMemory}
	r := withLibrary(t, filepath.Dir(cudatest.New(t, cfg).Path), cfg.Environ(), args...)
	r.stderr = besidesTheMachine(r.stderr)
	if r.status != 0 {
		t.Fatalf("%q ended with %d: %s", args, r.status, r.stderr)
	}
	return r
}

// isEmulated checks how the card is named: what is emulated is never reported as a GPU.
func isEmulated(t *testing.T, env report.Env) {
	t.Helper()
	if env.GPU != "Spillway CUDA emulator 0" || env.Driver != "CUDA 12.8" || env.PCIeLink != "" {
		t.Errorf("the GPU is %q, its driver %q, its link %q", env.GPU, env.Driver, env.PCIeLink)
	}
}

func backends(spaces []report.Space) (names []string) {
	for _, s := range spaces {
		names = append(names, s.Backend)
	}
	return names
}

// TestRunOnCUDA: a card does the job, requested or found. In the end nothing is in it, every batch
// was checked there, and the output does not call it simulated.
func TestRunOnCUDA(t *testing.T) {
	t.Parallel()
	tried := 0
	for name, args := range map[string][]string{
		"cuda":  {"run", "--gpu=cuda", "--passes=2"},
		"auto":  {"run"},
		"share": {"run", "--gpu=cuda", "--gpu-memory=6.25%"},
	} {
		if tried++; testseed.Raced && tried > 1 { // any one: the order of a map is random
			continue
		}
		t.Run(name, func(t *testing.T) {
			args = append(args, "--host-memory=1MiB", "--json=-")
			if name != "share" {
				args = append(args, "--gpu-memory=1MiB")
			}
			var doc report.Run
			r := onCUDA(t, args...)
			decode(t, r.stdout, &doc)
			if r.stderr != "" {
				t.Errorf("there is something to complain about: %s", r.stderr)
			}
			isEmulated(t, doc.Env)
			if got := backends(doc.Spaces); !slices.Equal(got, []string{"cuda", "host", "disk"}) {
				t.Errorf("the spaces are served by %q", got)
			}
			if gpu := doc.Spaces[0]; gpu.CapacityBytes != 1<<20 || gpu.PeakBytes == 0 || gpu.EndBytes != 0 {
				t.Errorf("the GPU space is %+v", gpu)
			}
			if !doc.Verify.Checked || doc.Verify.Batches < doc.Input.Batches || doc.Verify.Mismatches != 0 {
				t.Errorf("verified %+v of %d", doc.Verify, doc.Input.Batches)
			}
			for _, w := range doc.Warnings {
				if w.Cause == causes.Simulated {
					t.Errorf("%+v", w)
				}
			}
		})
	}
}

// TestVerifyOnCUDA: every edge of the card, there and back.
func TestVerifyOnCUDA(t *testing.T) {
	t.Parallel()
	var doc report.Verify
	decode(
		t,
		onCUDA(
			t,
			"verify",
			"--gpu=cuda",
			"--gpu-memory=4MiB",
			"--host-memory=4MiB",
			"--json=-",
			writeTable(t, "t.arrow", 2, 500),
		).stdout,
		&doc,
	)
	isEmulated(t, doc.Env)
	if f := doc.Files[0]; f.Batches != 2 || f.Edges != 6*6 || f.Mismatches != 0 || f.Error != "" {
		t.Errorf("%+v", f)
	}
}

// TestBandwidthOnCUDA: every edge of the card is measured, beside its limit.
func TestBandwidthOnCUDA(t *testing.T) {
	t.Parallel()
	var doc report.Bandwidth
	decode(
		t,
		onCUDA(
			t,
			"bandwidth",
			"--gpu=cuda",
			"--gpu-memory=1MiB",
			"--host-memory=1MiB",
			"--sizes=64KiB",
			"--threads=1",
			"--json=-",
		).stdout,
		&doc,
	)
	isEmulated(t, doc.Env)
	seen := map[string]bool{}
	for _, row := range doc.Rows {
		seen[row.From+" "+row.To] = true
		if row.GiBPerS <= 0 || row.LimitGiBPerS <= 0 {
			t.Errorf("%+v", row)
		}
	}
	for _, edge := range []string{"gpu:0 host:0", "host:0 gpu:0", "gpu:0 disk:0", "disk:0 gpu:0"} {
		if !seen[edge] {
			t.Errorf("%s was not measured: %v", edge, seen)
		}
	}
}

// TestNoCUDA: without a driver, or with one that finds no device, --gpu cuda ends with 3 and one
// line that names what is missing and what to do. Otherwise the GPU is simulated, and the output
// says that and its reason.
func TestNoCUDA(t *testing.T) {
	if testing.Short() {
		t.Skip("needs seconds: run without -short")
	}
	t.Parallel()
	none := cudatest.Config{Devices: -1}
	old := cudatest.Config{Version: 10020}
	for name, c := range map[string]struct {
		dir  string
		env  []string
		says string
	}{
		"no library": {t.TempDir(), nil, "no CUDA driver library"},
		"no driver":  {filepath.Dir(writeFile(t, "libcuda.so.1", "not a library")), nil, "no CUDA driver library"},
		"no device":  {filepath.Dir(cudatest.New(t, none).Path), none.Environ(), "CUDA_ERROR_NO_DEVICE"},
		"too old":    {filepath.Dir(cudatest.New(t, old).Path), old.Environ(), "10.2"},
	} {
		t.Run(name, func(t *testing.T) {
			if name == "no library" {
				if _, err := cuda.Load(""); !errors.Is(err, cuda.ErrNoLibrary) {
					t.Skip("needs a machine without a driver")
				}
			}
			noCUDA(t, c.dir, c.env, c.says)
		})
	}
}

func noCUDA(t *testing.T, dir string, env []string, says string) {
	r := withLibrary(t, dir, env, append([]string{"run", "--gpu=cuda"}, small...)...)
	if r.status != 3 || strings.Count(r.stderr, "\n") != 1 || !strings.Contains(r.stderr, says) ||
		!strings.Contains(r.stderr, "install NVIDIA's driver") ||
		!strings.Contains(r.stderr, "--gpu sim") {
		t.Errorf("with cuda ended with %d: %q", r.status, r.stderr)
	}
	r = withLibrary(t, dir, env, "run", "--gpu-memory=25%")
	if r.status != 2 || strings.Count(r.stderr, "\n") != 1 || !strings.Contains(r.stderr, says) ||
		!strings.Contains(r.stderr, "--gpu-memory 25%") ||
		!strings.Contains(r.stderr, "give a size") {
		t.Errorf("with a share of no card ended with %d: %q", r.status, r.stderr)
	}
	args := append([]string{"run", "--rows-per-batch=2000"}, small...)
	r = withLibrary(t, dir, env, append(args, "--json=-")...)
	var doc report.Run
	decode(t, r.stdout, &doc)
	i := slices.IndexFunc(doc.Warnings, func(w diag.Warning) bool { return w.Cause == causes.Simulated })
	if r.status != 0 || doc.Env.GPU != "sim" || doc.Env.Driver != "" || i < 0 {
		t.Fatalf("with auto ended with %d: %+v, %+v", r.status, doc.Env, doc.Warnings)
	}
	w := doc.Warnings[i]
	if w.Space != "gpu:0" || !strings.Contains(w.What, says) || w.Remedy == "" {
		t.Errorf("%+v does not say %q", w, says)
	}
	if strings.Count(r.stderr, "a simulated GPU replaces a real one") != 1 || !strings.Contains(r.stderr, says) {
		t.Errorf("the notes are %q", r.stderr)
	}
}

// TestRealDriverWithoutDevice is TestNoCUDA with NVIDIA's own library, where it is installed on a
// machine that has no device.
func TestRealDriverWithoutDevice(t *testing.T) {
	if _, err := cuda.Load(""); err == nil || errors.Is(err, cuda.ErrNoLibrary) {
		t.Skipf("needs NVIDIA's driver, and no device: %v", err)
	}
	noCUDA(t, t.TempDir(), nil, "CUDA_ERROR_NO_DEVICE")
}

// TestRunOnSeveralCUDA: each GPU that the driver shows has a space, or as many as --gpus allows, and
// takes part. More than there are is refused with their number.
func TestRunOnSeveralCUDA(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	cfg := cudatest.Config{Memory: cardMemory, Devices: 2}
	library := filepath.Dir(cudatest.New(t, cfg).Path)
	for args, gpus := range map[string]int{"--gpu=cuda": 2, "--gpu=auto": 2, "--gpu=cuda --gpus=2": 2, "--gpu=cuda --gpus=1": 1} {
		t.Run(args, func(t *testing.T) {
			args := append(strings.Fields(args), "run", "--gpu-memory=1MiB", "--host-memory=1MiB", "--json=-")
			r := withLibrary(t, library, cfg.Environ(), args...)
			if r.status != 0 {
				t.Fatalf("ended with %d: %s", r.status, r.stderr)
			}
			var doc report.Run
			decode(t, r.stdout, &doc)
			want := append(slices.Repeat([]string{"cuda"}, gpus), "host", "disk")
			if got := backends(doc.Spaces); !slices.Equal(got, want) {
				t.Errorf("the spaces are served by %q, want %q", got, want)
			}
			everyGPUWorked(t, doc, gpus, 1<<20)
		})
	}
	for _, gpu := range []string{"cuda", "auto"} {
		r := withLibrary(
			t,
			library,
			cfg.Environ(),
			"run",
			"--gpu="+gpu,
			"--gpus=3",
			"--gpu-memory=1MiB",
			"--host-memory=1MiB",
		)
		if r.status != 3 || strings.Count(r.stderr, "\n") != 1 ||
			!strings.Contains(r.stderr, "--gpus 3: NVIDIA's driver shows 2 GPUs") {
			t.Errorf("--gpu %s ended with %d: %q", gpu, r.status, r.stderr)
		}
	}
}
