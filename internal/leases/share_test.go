//go:build linux

package leases_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/spillway-db/spillway/internal/leases"
)

var users = [...]*syscall.Credential{{Uid: 12345, Gid: 12345}, {Uid: 23456, Gid: 23456}}

// sharedLedger returns a ledger that all users may join, in a directory that they reach.
func sharedLedger(t *testing.T) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: it starts processes of other users")
	}
	dir := filepath.Join(t.TempDir(), "ledger")
	if err := os.Chmod(filepath.Dir(filepath.Dir(dir)), 0o755); err != nil { // the test's own
		t.Fatal(err)
	}
	for p := filepath.Dir(dir); p != "/"; p = filepath.Dir(p) {
		if info, err := os.Stat(p); err != nil || info.Mode().Perm()&1 == 0 {
			t.Skipf("needs a temporary directory that all users reach: %s, %v", p, err)
		}
	}
	if err := leases.Share(dir, device); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestUsersShareAQuota: processes of two users and root never hold more than a quota, see each
// other, and find free what one held that was killed. They cannot remove each other's files.
func TestUsersShareAQuota(t *testing.T) {
	dir := sharedLedger(t)
	var all []*child
	for _, u := range append(users[:], nil) {
		c := launch(t, u, dir, 1000)
		if got := c.read(t); got != "joined" {
			t.Fatalf("user %+v: %s", u, got)
		}
		all = append(all, c)
	}
	all[0].must(t, "charge 600")
	for _, c := range all[1:] {
		if got := c.ask(t, "charge 401"); !strings.Contains(got, "no room") {
			t.Errorf("above the quota: %s", got)
		}
	}
	all[1].must(t, "charge 400")
	held, err := leases.Holders(dir)
	if err != nil || len(held) != 3 {
		t.Fatalf("held: %+v, %v", held, err)
	}
	others := 0 // files of processes that are not root's
	if err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil || info.Sys().(*syscall.Stat_t).Uid == 0 {
			return err
		}
		if others++; info.Mode().Perm() != 0o644 {
			t.Errorf("%s has mode %v: all must read it, and its owner alone write to it", path, info.Mode())
		}
		return nil
	}); err != nil || others != 2 {
		t.Errorf("%d files are those of other users than root, %v", others, err)
	}
	all[0].kill(t)
	all[1].must(t, "charge 500")
	if got := leaseFiles(t, dir); len(got) != 3 {
		t.Errorf("a user removed what is another's: %q", got)
	}
	all[2].must(t, "charge 100")
	if err := leases.Share(dir, device, "GPU-2"); err != nil {
		t.Fatal(err)
	}
	if got := leaseFiles(t, dir); len(got) != 2 {
		t.Errorf("once root has made room: %q", got)
	}
	if got := all[1].ask(t, "charge 1"); !strings.Contains(got, "no room") {
		t.Errorf("above the quota, once another GPU is shared: %s", got)
	}
	if err := os.Chmod(filepath.Dir(dir), 0o700); err != nil {
		t.Fatal(err)
	}
	if got := launch(t, users[0], dir, 1000).read(t); !strings.Contains(got, "permission denied") {
		t.Errorf("who does not reach the ledger: %s", got)
	}
}

// TestNoSharedLedger: users cannot join a ledger that only looks as if root had shared it.
func TestNoSharedLedger(t *testing.T) {
	for name, c := range map[string]struct {
		change func(dir string) error
		want   string
	}{
		"another's directory": {func(dir string) error { return os.Chown(dir, 23456, -1) }, "belongs to user 23456"},
		"writable by all":     {func(dir string) error { return os.Chmod(dir, 0o777) }, "written to by others"},
		"a sticky directory": {func(dir string) error { return os.Chmod(dir, 0o777|fs.ModeSticky) },
			"written to by others"},
		"another's GPU": {func(dir string) error { return os.Chown(filepath.Join(dir, device), 23456, -1) },
			"belongs to user 23456"},
		"a GPU that is not sticky": {func(dir string) error { return os.Chmod(filepath.Join(dir, device), 0o777) },
			"written to by others"},
		"a user's GPU": {func(dir string) error { return os.Chown(filepath.Join(dir, device), 12345, -1) },
			"written to by others"},
		"a private GPU": {func(dir string) error { return os.Chmod(filepath.Join(dir, device), 0o700) },
			"permission denied"},
		"a GPU that is a link": {func(dir string) error {
			return errors.Join(os.Rename(filepath.Join(dir, device), filepath.Join(dir, "x")),
				os.Symlink("x", filepath.Join(dir, device)))
		}, "link"},
		"a GPU that does not exist": {func(dir string) error { return os.RemoveAll(filepath.Join(dir, device)) },
			"has not shared " + device},
	} {
		dir := sharedLedger(t)
		if err := c.change(dir); err != nil {
			t.Fatal(err)
		}
		if got := launch(t, users[0], dir, 1000).read(t); !strings.Contains(got, c.want) {
			t.Errorf("%s: %s; want %q", name, got, c.want)
		}
	}
}

// Share makes nothing shared where others could have put something before.
func TestShareRefuses(t *testing.T) {
	base := filepath.Dir(sharedLedger(t))
	mk := func(name string, mode fs.FileMode, uid int) string {
		p := filepath.Join(base, name)
		if err := errors.Join(os.Mkdir(p, 0o700), os.Chmod(p, mode), os.Chown(p, uid, -1)); err != nil {
			t.Fatal(err)
		}
		return p
	}
	for name, dir := range map[string]string{
		"sticky":    mk("sticky", 0o777|fs.ModeSticky, 0),
		"writable":  mk("writable", 0o720, 0),
		"another's": mk("theirs", 0o700, 12345),
	} {
		if err := leases.Share(dir, device); err == nil {
			t.Errorf("%s: it is shared", name)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
			t.Errorf("%s: left: %v, %v", name, left, err)
		}
	}
	mine := mk("mine", 0o755, 0)
	me := join(t, terms(mine, "g", 1000, 1000))
	charge(t, me, 1)
	if err := errors.Join(leases.Share(mine, device), leases.Share(mine, device)); err != nil {
		t.Error(err)
	}
	charge(t, me, 999) // a lease from before goes on
}

// A call of Share that was interrupted, or failed at one of its GPUs, can be repeated.
func TestShareAgain(t *testing.T) {
	for name, undo := range map[string]func(dir string) error{
		"no GPU yet":     func(dir string) error { return os.RemoveAll(filepath.Join(dir, device)) },
		"a private GPU":  func(dir string) error { return os.Chmod(filepath.Join(dir, device), 0o700) },
		"nothing opened": func(string) error { return nil },
	} {
		dir := sharedLedger(t)
		if err := errors.Join(os.Chmod(dir, 0o700), undo(dir)); err != nil {
			t.Fatal(err)
		}
		dead := filepath.Join(dir, device, "lease-1-abc")
		if err := os.WriteFile(dead, nil, 0o600); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
		if err := leases.Share(dir, device); err != nil {
			t.Errorf("%s: %v", name, err)
		} else if _, err := os.Stat(dead); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: the file of a dead process stays: %v", name, err)
		} else if got := launch(t, users[0], dir, 1000).read(t); got != "joined" {
			t.Errorf("%s: %s", name, got)
		}
	}
}

// What a user's process puts back, the others can use.
func TestUsersPutBack(t *testing.T) {
	dir := sharedLedger(t)
	a, b := launch(t, users[0], dir, 1000), launch(t, users[1], dir, 1000)
	a.read(t)
	b.read(t)
	a.must(t, "charge 600")
	clean(t, dir)
	for _, c := range []*child{a, b} {
		c.must(t, "charge 15") // a grain
	}
	b.must(t, "charge 370")
	if got := a.ask(t, "charge 1"); !strings.Contains(got, "no room") {
		t.Errorf("above the quota: %s", got)
	}
	if err := leases.Share(dir, device); err != nil {
		t.Error(err)
	}
}

// Where another user can replace the directory, root opens none.
func TestShareBelowAnothers(t *testing.T) {
	base := filepath.Dir(sharedLedger(t))
	for name, c := range map[string]struct {
		mode fs.FileMode
		uid  int
	}{"writable": {0o777, 0}, "another's": {0o755, 12345}} {
		above := filepath.Join(base, name)
		if err := errors.Join(os.Mkdir(above, 0o700), os.Chmod(above, c.mode), os.Chown(above, c.uid, -1)); err != nil {
			t.Fatal(err)
		}
		if err := leases.Share(filepath.Join(above, "x", "ledger"), device); err == nil ||
			!strings.Contains(err.Error(), above+" belongs to user") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A MIG instance has one part of the ledger, by whichever name it is called.
func TestInstanceHasOnePart(t *testing.T) {
	const digits = "8932f937-d72c-4106-c12f-20bd9faed9f6"
	dir := t.TempDir()
	for _, name := range []string{"MIG-" + digits, "GPU-" + digits} {
		l, err := leases.Join(leases.Terms{Dir: dir, Device: name, Group: name, Physical: 1 << 30, Advertised: 1 << 30,
			Quota: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
	}
	holders, err := leases.Holders(dir)
	if err != nil || len(holders) != 2 || holders[0].Device != holders[1].Device {
		t.Errorf("%+v, %v", holders, err)
	}
}

// TestUsersAddNoGPU: a user cannot add anything to a shared ledger. The ledger ignores files that users add
// to the directory of a GPU, unless they look like leases and are locked.
func TestUsersAddNoGPU(t *testing.T) {
	dir := sharedLedger(t)
	l := join(t, terms(dir, "g", 1000, 1000))
	charge(t, l, 10)
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("the ledger has mode %v, %v: only root may add GPUs", info.Mode(), err)
	}
	p := filepath.Join(dir, device, "lease-1-directory")
	if err := errors.Join(os.Mkdir(p, 0o777), os.Chown(p, 12345, -1)); err != nil {
		t.Fatal(err)
	}
	held, err := leases.Holders(dir)
	if err != nil || len(held) != 1 || held[0].Live != 10 {
		t.Errorf("%+v, %v", held, err)
	}
	charge(t, l, 990)
	if err := os.Remove(p); err != nil {
		t.Error(err)
	}
}
