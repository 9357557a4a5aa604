//go:build linux || darwin

package leases_test

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/internal/leases"
	"golang.org/x/sys/unix"
)

// makeSocket leaves a socket behind.
func makeSocket(path string) error {
	short, err := os.MkdirTemp("", "s") // for the name of a socket is bounded
	if err != nil {
		return err
	}
	defer os.RemoveAll(short)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(short, "s"), Net: "unix"})
	if err != nil {
		return err
	}
	l.SetUnlinkOnClose(false)
	return errors.Join(l.Close(), os.Rename(filepath.Join(short, "s"), path))
}

// TestForeignFiles: what is no lease stays, and is no trouble.
func TestForeignFiles(t *testing.T) {
	dir := ledgerDir(t)
	a := join(t, terms(dir, "g", 1000, 1000))
	sub, own := filepath.Join(dir, device), leaseFiles(t, dir)[0]
	foreign := []string{"readme.txt", "lease-of-life.txt", ".lease-draft", "lease-", "lease-empty"}
	for _, name := range foreign {
		text := "not one of ours"
		if name == "lease-empty" {
			text = ""
		}
		if err := os.WriteFile(filepath.Join(sub, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, target := range map[string]string{"lease-link": "/etc/passwd", "lease-nowhere": "nothing",
		"lease-again": own} {
		foreign = append(foreign, name)
		if err := os.Symlink(target, filepath.Join(sub, name)); err != nil {
			t.Fatal(err)
		}
	}
	foreign = append(foreign, "lease-dir", "lease-fifo", "lease-socket")
	if err := errors.Join(
		os.Mkdir(filepath.Join(sub, "lease-dir"), 0o700),
		unix.Mkfifo(filepath.Join(sub, "lease-fifo"), 0o600),
		makeSocket(filepath.Join(sub, "lease-socket")),
	); err != nil {
		t.Fatal(err)
	}
	defer func() {
		for _, name := range foreign {
			if err := os.Remove(filepath.Join(sub, name)); err != nil {
				t.Errorf("%s is gone: %v", name, err)
			}
		}
	}()
	b := join(t, terms(dir, "g", 1000, 1000))
	charge(t, a, 510) // 34 grains
	charge(t, b, 490)
	wantRefusal(t, a.Charge(1), 1, 0, 1000, 1000)
	held, err := leases.Holders(dir)
	if err != nil || len(held) != 2 {
		t.Errorf("%v, %v", held, err)
	}
}

// TestDamagedLease: a lease whose process is alive and that makes no sense is an error, never nothing.
func TestDamagedLease(t *testing.T) {
	for name, damage := range map[string]struct{ old, new string }{
		"no JSON":          {`{`, `[`},
		"another version":  {`"version":3`, `"version":2`},
		"no number":        {`"quota":500`, `"quota":"x"`},
		"a limit of 0":     {`"quota":500`, `"quota":000`},
		"no size":          {`"physical":1000`, `"physical":-100`},
		"too large":        {`"advertised":1000`, `"advertised":1e99`},
		"a negative grain": {`"granted":0`, `"granted":-1`},
		"a negative peak":  {`"peak":0,`, `"peak":-1`},
		"a false number":   {`"granted":0`, `"granted":9223372036854775807`},
		"nothing":          {``, ``},
	} {
		t.Run(name, func(t *testing.T) {
			dir := ledgerDir(t)
			a := join(t, terms(dir, "g", 500, 1000))
			file := filepath.Join(dir, device, leaseFiles(t, dir)[0])
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			damaged := strings.Replace(string(text), damage.old, damage.new, 1)
			if damage.old == "" {
				damaged = ""
			}
			if damaged == string(text) {
				t.Fatalf("%q is not in %s", damage.old, text)
			}
			if err := os.WriteFile(file, []byte(damaged), 0o600); err != nil {
				t.Fatal(err)
			}
			b, err := leases.Join(terms(dir, "h", 1, 1000))
			if err == nil {
				defer b.Close()
			}
			if err == nil || !strings.Contains(err.Error(), filepath.Base(file)) {
				t.Errorf("beside a damaged lease: %v", err)
			}
			if held, err := leases.Holders(dir); err == nil || !strings.Contains(err.Error(), filepath.Base(file)) ||
				len(held) != 0 {
				t.Errorf("holders: %v, %v", held, err)
			}
			if len(leaseFiles(t, dir)) == 0 {
				t.Error("the lease of a living process was removed")
			}
			charge(t, a, 1) // its own next write repairs it
			join(t, terms(dir, "h", 1, 1000))
		})
	}
}

// TestAbandonedLeases: a process that joins or charges removes leases that are not locked, whatever is in
// them, and counts nothing of them. An observer removes nothing.
func TestAbandonedLeases(t *testing.T) {
	dir := ledgerDir(t)
	a := join(t, terms(dir, "g", 1000, 1000))
	charge(t, a, 900)
	sub := filepath.Join(dir, device)
	page, err := os.ReadFile(filepath.Join(sub, leaseFiles(t, dir)[0]))
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string][]byte{"lease-1-abc": page, "lease-2-abc": nil, "lease-3-abc": page[:20]} {
		if err := os.WriteFile(filepath.Join(sub, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if held, err := leases.Holders(dir); err != nil || len(held) != 1 {
		t.Errorf("%v, %v", held, err)
	}
	if len(leaseFiles(t, dir)) != 4 {
		t.Error("who only looked removed something")
	}
	charge(t, a, 100)
	if got := leaseFiles(t, dir); len(got) != 1 {
		t.Errorf("left: %q", got)
	}
}

func TestUnsafeDirectories(t *testing.T) {
	base := t.TempDir()
	mk := func(name string, mode os.FileMode) string {
		p := filepath.Join(base, name)
		if err := errors.Join(os.Mkdir(p, 0o700), os.Chmod(p, mode)); err != nil {
			t.Fatal(err)
		}
		return p
	}
	good := mk("good", 0o700)
	link := filepath.Join(base, "link")
	file := filepath.Join(base, "file")
	if err := errors.Join(os.Symlink(good, link), os.WriteFile(file, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	cases := map[string]struct{ dir, says string }{
		"a link":                {link, "link"},
		"a link with a slash":   {link + "/", "link"},
		"a file":                {file, "directory"},
		"writable by the group": {mk("group", 0o720), "written to by others"},
		"writable by all":       {mk("all", 0o777), "written to by others"},
		"sticky":                {mk("sticky", 0o777|os.ModeSticky), "written to by others"},
	}
	if os.Geteuid() == 0 {
		theirs := mk("theirs", 0o700)
		if err := os.Chown(theirs, 12345, -1); err != nil {
			t.Fatal(err)
		}
		cases["another's"] = struct{ dir, says string }{theirs, "12345"}
	}
	for name, c := range cases {
		_, err := leases.Join(terms(c.dir, "g", 1, 1))
		if err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
	l := join(t, terms(good, "g", 1, 1))
	defer l.Close()
	for path, want := range map[string]os.FileMode{
		filepath.Join(good, device):                         0o700,
		filepath.Join(good, device, leaseFiles(t, good)[0]): 0o644,
	} {
		info, err := os.Stat(path)
		if err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: %v, %v; want %v", path, info.Mode(), err, want)
		}
	}
	if held, err := leases.Holders(filepath.Join(base, "nothing")); err != nil || len(held) != 0 {
		t.Errorf("of a ledger that is not there: %v, %v", held, err)
	}
}
