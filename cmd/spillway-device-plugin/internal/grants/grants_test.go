package grants

import (
	"errors"
	"io/fs"
	"maps"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/spillway-db/spillway/cmd/spillway-device-plugin/internal/gpus"
	"github.com/spillway-db/spillway/internal/leases"
)

func open(t *testing.T, root string, ratio *big.Rat) *Store {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: the ledger is root's")
	}
	s, err := Open(root, ratio, gpus.Sim(2, 1<<30))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func TestPut(t *testing.T) {
	root := filepath.Join(t.TempDir(), "node")
	s := open(t, root, big.NewRat(3, 2))
	g := Grant{Name: "units-1", GPUs: gpus.Sim(1, 1<<30), Limit: 256 << 20}
	first, err := s.Put(g)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"SPILLWAY_GPU_MEMORY_LIMIT": "256Mi", "NVSHARE_GPU_MEMORY_LIMIT": "256Mi", "SPILLWAY_GPU_MEMORY_OVERSUB_RATIO": "1.5",
		"NVSHARE_GPU_PHYSICAL_MEMORY_MB": "1024", "SPILLWAY_GPU_QUOTA_GROUP": "units-1", "NVIDIA_VISIBLE_DEVICES": "void",
	} {
		if first.Env[name] != want {
			t.Errorf("%s is %q, not %q", name, first.Env[name], want)
		}
	}
	// It may be repeated, by a process that was started again and beside others.
	s.Close()
	again := open(t, root, big.NewRat(3, 2))
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			a, err := again.Put(g)
			if err != nil || !maps.Equal(a.Env, first.Env) || !slices.Equal(a.Mounts, first.Mounts) {
				t.Errorf("%+v, %v; before %+v", a, err, first)
			}
		})
	}
	all.Wait()
	entries, err := os.ReadDir(first.Mounts[1].Host)
	if err != nil || len(entries) != 1 {
		t.Errorf("%v is left beside the limits, %v", entries, err)
	}
	if names, err := s.Names(); err != nil || !slices.Equal(names, []string{"units-1"}) {
		t.Errorf("%v, %v", names, err)
	}
	for range 2 {
		if err := s.Remove("units-1"); err != nil {
			t.Error(err)
		}
	}
	if names, err := s.Names(); err != nil || len(names) > 0 {
		t.Errorf("%v, %v", names, err)
	}
}

func TestWholeAndRealGPUs(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "node"), nil)
	a, err := s.Put(
		Grant{Name: "gpus-1", GPUs: []gpus.GPU{{UUID: "GPU-1", Memory: 1 << 30}, {UUID: "GPU-2", Memory: 2 << 30}}},
	)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"SPILLWAY_GPU_MEMORY_LIMIT", "SPILLWAY_GPU_PHYSICAL_MEMORY_MB"} {
		if value, ok := a.Env[name]; ok {
			t.Errorf("%s is %s for whole GPUs of two sizes", name, value)
		}
	}
	if a.Env["NVIDIA_VISIBLE_DEVICES"] != "GPU-1,GPU-2" || a.Env["SPILLWAY_GPU_MEMORY_OVERSUB_RATIO"] != "1" {
		t.Errorf("%v", a.Env)
	}
}

// Whatever the umask is and whoever made the directories, others reach what is mounted and nothing else.
func TestModes(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0o077))
	root := filepath.Join(t.TempDir(), "node")
	if err := os.MkdirAll(filepath.Join(root, "ledger"), 0o777); err != nil { // as a container runtime does
		t.Fatal(err)
	}
	// An earlier version let all users write to the ledger's directory.
	if err := errors.Join(os.Chmod(root, 0o755), os.Chmod(filepath.Join(root, "ledger"), 0o777)); err != nil {
		t.Fatal(err)
	}
	s := open(t, root, nil)
	a, err := s.Put(Grant{Name: "units-1", GPUs: gpus.Sim(1, 1<<30), Limit: 256 << 20})
	if err != nil {
		t.Fatal(err)
	}
	limits := a.Mounts[1].Host
	for path, want := range map[string]os.FileMode{root: 0o700, s.Ledger(): 0o755, filepath.Join(s.Ledger(), "sim-0"): 0o777, limits: 0o755, filepath.Join(limits, "environment"): 0o644} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: %v, %v; want %v", path, info.Mode(), err, want)
		}
	}
}

func TestNames(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "node"), nil)
	for _, name := range []string{"", ".", "..", "a/b", "../a", "a b", "a\n", strings.Repeat("a", 64)} {
		if _, err := s.Put(Grant{Name: name, GPUs: gpus.Sim(1, 1<<30)}); err == nil {
			t.Errorf("%q is put", name)
		}
		if err := s.Remove(name); err == nil {
			t.Errorf("%q is removed", name)
		}
	}
}

// A directory that is used for something else keeps its mode, and is refused.
func TestOpenRefuses(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: the ledger is root's")
	}
	used := t.TempDir()
	if err := os.Chmod(used, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(used, "x"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(used, link); err != nil {
		t.Fatal(err)
	}
	for root, want := range map[string]string{used: "such as x", link: "is no directory", "run": "is not an absolute path"} {
		if _, err := Open(
			root,
			nil,
			nil,
		); err == nil || !strings.Contains(err.Error(), want) ||
			strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", root, err)
		}
	}
	if info, err := os.Stat(used); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
}

// A directory has one Store at a time, so two processes cannot give the same memory.
func TestOneStore(t *testing.T) {
	root := filepath.Join(t.TempDir(), "node")
	s := open(t, root, nil)
	if _, err := Open(
		root,
		nil,
		gpus.Sim(1, 1<<30),
	); err == nil ||
		!strings.Contains(err.Error(), "another one runs with --dir "+root+": end it") {
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	open(t, root, nil)
}

// A grant's note is kept beside what its containers see. Without GPUs there is no grant, and of one that
// could not be made nothing is left.
func TestNote(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "node"), nil)
	g := Grant{Name: "claim-1", GPUs: gpus.Sim(1, 1<<30), Note: "first"}
	for _, g.Note = range []string{"first", "second"} {
		a, err := s.Put(g)
		if err != nil {
			t.Fatal(err)
		}
		if note, err := s.Note(g.Name); note != g.Note || err != nil {
			t.Errorf("%q, %v", note, err)
		}
		for _, m := range a.Mounts {
			if _, err := os.Stat(filepath.Join(m.Host, "note")); err == nil {
				t.Errorf("containers see the note in %s", m.Host)
			}
		}
	}
	if entries, err := os.ReadDir(s.dir(g.Name)); err != nil || len(entries) != 2 {
		t.Errorf("%v, %v", entries, err)
	}
	if _, err := s.Note("claim-2"); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	none := Grant{Name: "claim-2"}
	if _, err := s.Put(none); err == nil || !strings.Contains(err.Error(), "has no GPU") {
		t.Error(err)
	}
	bad := Grant{Name: "claim-3", GPUs: gpus.Sim(1, 1<<30), Note: strings.Repeat("x", 1<<20)}
	var old syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &old); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Setrlimit(
		syscall.RLIMIT_FSIZE,
		&syscall.Rlimit{Cur: 1 << 16, Max: old.Max},
	); err != nil { // as a full disk
		t.Fatal(err)
	}
	_, err := s.Put(bad)
	_, again := s.Put(Grant{Name: g.Name, GPUs: g.GPUs, Note: bad.Note})
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &old); err != nil {
		t.Fatal(err)
	}
	if err == nil || again == nil {
		t.Errorf("put in spite of the disk: %v, %v", err, again)
	}
	if names, err := s.Names(); err != nil || !slices.Equal(names, []string{"claim-1"}) {
		t.Errorf("%v, %v", names, err)
	}
	if entries, err := os.ReadDir(s.dir(g.Name)); err != nil || len(entries) != 2 {
		t.Errorf("%v, %v", entries, err)
	}
	if note, err := s.Note(g.Name); note != "second" || err != nil {
		t.Errorf("%q, %v", note, err)
	}
}

// Processes that count with another ratio or size than the flags say are found before a new container fails.
func TestOutdated(t *testing.T) {
	root := filepath.Join(t.TempDir(), "node")
	s := open(t, root, big.NewRat(3, 2))
	list := gpus.Sim(2, 1<<30+1<<19) // a process is told whole MiB
	check := func(want string) {
		t.Helper()
		got, err := s.Outdated(list)
		if err != nil || want == "" && got != "" || !strings.Contains(got, want) || strings.Contains(got, "\n") {
			t.Errorf("%q, %v; want %q", got, err, want)
		}
	}
	check("")
	l, err := leases.Join(
		leases.Terms{Dir: s.Ledger(), Device: "sim-1", Group: "units-1", Physical: 1 << 30, Advertised: 3 << 29},
	)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	check("")
	s.Close()
	s = open(t, root, nil)
	check(
		"GPUs in use with another --ratio or --reserve: 1, such as sim-1, of which processes may promise 1.5 GiB of 1.0 GiB, now 1.0 GiB of 1.0 GiB",
	)
	s.Close()
	s = open(t, root, big.NewRat(3, 2))
	list[1].Memory = 512 << 20
	check("now 768.0 MiB of 512.0 MiB")
}
