package main

import (
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/internal/leases"
)

// TestQuotaOfTheEnvironment: what limits this process, in the table and the document.
func TestQuotaOfTheEnvironment(t *testing.T) {
	if r := succeed(t, "quota"); !strings.Contains(r.stdout, "limit of GPU memory: none") ||
		!strings.Contains(r.stdout, "ledger: none") {
		t.Errorf("printed %q", r.stdout)
	} else if strings.Contains(r.stdout, "file system") || strings.Contains(r.stdout, "I/O") {
		t.Errorf("it describes a disk, of which it knows nothing: %q", r.stdout)
	}
	t.Setenv("NVSHARE_GPU_MEMORY_LIMIT", "1536Mi")
	t.Setenv("NVSHARE_GPU_MEMORY_OVERSUB_RATIO", "1.5")
	t.Setenv("SPILLWAY_GPU_PHYSICAL_MEMORY_MB", "8192")
	r := succeed(t, "quota")
	for _, want := range []string{"1.5GiB", "NVSHARE_GPU_MEMORY_LIMIT", "ratio", "1.50", "8.0 GiB"} {
		if !strings.Contains(r.stdout, want) {
			t.Errorf("no %q in %q", want, r.stdout)
		}
	}
	var doc report.Quota
	decode(t, succeed(t, "quota", "--json=-").stdout, &doc)
	if doc.Command != "quota" || doc.Limit != "1.5GiB" || doc.LimitBytes != 3<<29 ||
		doc.Source != "NVSHARE_GPU_MEMORY_LIMIT" || doc.Ratio != 1.5 || doc.PhysicalBytes != 8<<30 ||
		doc.Holders == nil {
		t.Errorf("%+v", doc)
	}
	t.Setenv("SPILLWAY_GPU_MEMORY_LIMIT", "12.5%")
	line := regexp.MustCompile(`a share is of all GPUs\) .*\n  12\.5% +SPILLWAY_GPU_MEMORY_LIMIT `)
	if r := succeed(t, "quota"); !line.MatchString(r.stdout) {
		t.Errorf("printed %q", r.stdout)
	}
}

// TestQuotaShowsHolders: the holders on this node.
func TestQuotaShowsHolders(t *testing.T) {
	if runtime.GOOS != "linux" && runtime.GOOS != "darwin" {
		t.Skip("needs Linux or darwin, for locked files")
	}
	dir := filepath.Join(t.TempDir(), "ledger")
	lease, err := leases.Join(leases.Terms{Dir: dir, Device: "GPU-1", Group: "etl", Quota: 1 << 30, Physical: 8 << 30})
	if err != nil {
		t.Fatal(err)
	}
	defer lease.Close()
	if err := lease.Charge(1 << 20); err != nil {
		t.Fatal(err)
	}
	r := succeed(t, "quota", "--ledger", dir)
	for _, want := range []string{dir, "GPU-1", "etl", "1.0 GiB", "1.0 MiB"} {
		if !strings.Contains(r.stdout, want) {
			t.Errorf("no %q in %q", want, r.stdout)
		}
	}
	t.Setenv("SPILLWAY_GPU_QUOTA_DIR", dir)
	var doc report.Quota
	decode(t, succeed(t, "quota", "--json=-").stdout, &doc)
	if len(doc.Holders) != 1 || doc.Holders[0].PID != os.Getpid() || doc.Holders[0].Live != 1<<20 || doc.Ledger != dir {
		t.Errorf("%+v", doc)
	}
	if r := command(t, t.Context(), "quota", "--ledger", filepath.Join(dir, "none")); r.status != 2 {
		t.Errorf("a ledger that is not there: %d, %s", r.status, r.stderr)
	}
}

// TestQuotaOfABrokenLedger: a ledger whose files were removed is reported, and so is an unreadable
// one; the holders are shown all the same.
func TestQuotaOfABrokenLedger(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" && runtime.GOOS != "darwin" {
		t.Skip("needs Linux or darwin, for locked files")
	}
	dir := filepath.Join(t.TempDir(), "ledger")
	lease, err := leases.Join(leases.Terms{Dir: dir, Device: "GPU-1", Physical: 8 << 30})
	if err != nil {
		t.Fatal(err)
	}
	defer lease.Close()
	broken := func(want string) {
		t.Helper()
		r := command(t, t.Context(), "quota", "--ledger", dir)
		if r.status != 3 || strings.Count(r.stderr, "\n") != 1 || !strings.Contains(r.stderr, want) ||
			!strings.Contains(r.stdout, "GPU-1") {
			t.Errorf("%d, %q, %q", r.status, r.stderr, r.stdout)
		}
	}
	file := func(gpu string) string {
		t.Helper()
		all, err := filepath.Glob(filepath.Join(dir, gpu, "lease-*"))
		if err != nil || len(all) != 1 {
			t.Fatal(all, err)
		}
		return all[0]
	}
	if err := os.Remove(file("GPU-1")); err != nil {
		t.Fatal(err)
	}
	if err := lease.Charge(1); err != nil {
		t.Fatal(err)
	}
	broken("were removed while processes use it")
	damaged, err := leases.Join(leases.Terms{Dir: dir, Device: "GPU-2", Physical: 8 << 30})
	if err != nil {
		t.Fatal(err)
	}
	defer damaged.Close()
	if err := os.WriteFile(file("GPU-2"), []byte("no lease"), 0o600); err != nil {
		t.Fatal(err)
	}
	broken(filepath.Base(file("GPU-2")) + ", whose process is alive, cannot be read")
}

// TestWrongQuotas: an invalid variable in the environment is wrong use, reported in one line that
// quotes it, whatever the command needs it for.
func TestWrongQuotas(t *testing.T) {
	for _, args := range [][]string{{"quota"}, append([]string{"run"}, small...)} {
		t.Run(args[0], func(t *testing.T) {
			t.Setenv("SPILLWAY_GPU_MEMORY_LIMIT", "4 GiB")
			r := command(t, t.Context(), args...)
			if r.status != 2 || strings.Count(r.stderr, "\n") != 1 ||
				!strings.Contains(r.stderr, `SPILLWAY_GPU_MEMORY_LIMIT: "4 GiB"`) {
				t.Errorf("%d, %s", r.status, r.stderr)
			}
		})
	}
}

// TestRunUnderAQuota: a run obeys the limit of the environment and says so.
func TestRunUnderAQuota(t *testing.T) {
	t.Setenv("SPILLWAY_GPU_MEMORY_LIMIT", "1Mi")
	r := command(t, t.Context(), "run", "--gpu-memory=4MiB", "--host-memory=1MiB", "--json=-")
	if r.status != 0 || !strings.Contains(r.stderr, "quota") {
		t.Fatalf("%d, %s", r.status, r.stderr)
	}
	var doc report.Run
	decode(t, r.stdout, &doc)
	if doc.Config.GPUMemoryBytes != 1<<20 {
		t.Errorf("the GPU space has %d bytes", doc.Config.GPUMemoryBytes)
	}
	for _, s := range doc.Spaces {
		if s.ID == "gpu:0" && s.PeakBytes > 1<<20 {
			t.Errorf("the peak is %d", s.PeakBytes)
		}
	}
}

func TestQuotaShares(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "ledger")
	for _, c := range []struct {
		args   []string
		status int
		says   string
	}{
		{[]string{"--share", "GPU-1"}, 2, "--ledger"},
		{[]string{"--ledger", dir, "--share", ""}, 2, "without a name"},
	} {
		if r := command(t, t.Context(), append([]string{"quota"}, c.args...)...); r.status != c.status ||
			!strings.Contains(r.stderr, c.says) {
			t.Errorf("%q: %d, %q", c.args, r.status, r.stderr)
		}
	}
	r := command(t, t.Context(), "quota", "--ledger", dir, "--share", "GPU-1", "--share", "GPU-2")
	if runtime.GOOS != "linux" || os.Geteuid() != 0 {
		if r.status != 3 || strings.Count(r.stderr, "\n") != 1 {
			t.Errorf("without root: %d, %q", r.status, r.stderr)
		}
		return
	}
	info, err := os.Stat(filepath.Join(dir, "GPU-2"))
	if r.status != 0 || err != nil || info.Mode().Perm() != 0o777 || info.Mode()&os.ModeSticky == 0 {
		t.Errorf("%d, %q: %v, %v", r.status, r.stderr, info, err)
	}
	all := t.TempDir()
	if err := os.Chmod(all, 0o777|os.ModeSticky); err != nil {
		t.Fatal(err)
	}
	if r := command(t, t.Context(), "quota", "--ledger", all, "--share", "GPU-1"); r.status != 3 ||
		!strings.Contains(r.stderr, "written to by others") {
		t.Errorf("a directory that others could write to: %d, %q", r.status, r.stderr)
	}
}
