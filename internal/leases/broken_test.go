//go:build linux || darwin

package leases_test

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/internal/leases"
	"github.com/spillway-db/spillway/tier"
)

// clean removes all files of the device's directory, as a cleaner does.
func clean(t *testing.T, dir string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(dir, device))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if err := os.Remove(filepath.Join(dir, device, e.Name())); err != nil {
			t.Fatal(err)
		}
	}
}

// TestRemovedFiles: the first charge that looks at the ledger after files were removed puts back the
// file of its process. Others see what the process holds from then on.
func TestRemovedFiles(t *testing.T) {
	for name, remove := range map[string]func(t *testing.T, dir, own string) error{
		"lease":     func(_ *testing.T, dir, own string) error { return os.Remove(filepath.Join(dir, device, own)) },
		"all files": func(t *testing.T, dir, _ string) error { clean(t, dir); return nil },
		"directory": func(_ *testing.T, dir, _ string) error { return os.RemoveAll(filepath.Join(dir, device)) },
		"ledger":    func(_ *testing.T, dir, _ string) error { return os.RemoveAll(dir) },
		"replaced": func(_ *testing.T, dir, own string) error {
			path := filepath.Join(dir, device, own)
			text, err := os.ReadFile(path)
			return errors.Join(err, os.Rename(path, path+"-old"), os.WriteFile(path, text, 0o600),
				os.Remove(path+"-old"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := ledgerDir(t)
			calls := 0
			mine := terms(dir, "g", 64, 100)
			mine.OnBroken = func() { calls++ }
			a := join(t, mine)
			charge(t, a, 40)
			if err := remove(t, dir, leaseFiles(t, dir)[0]); err != nil {
				t.Fatal(err)
			}
			b := join(t, terms(dir, "g", 64, 100)) // which cannot know
			charge(t, b, 10)
			charge(t, a, 1)
			if calls != 1 || a.Lost() != 1 || b.Lost() != 0 {
				t.Errorf("OnBroken was called %d times; lost %d, %d", calls, a.Lost(), b.Lost())
			}
			wantRefusal(t, b.Charge(14), 14, 13, 51, 64)
			charge(t, a, 13)
			wantRefusal(t, b.Charge(1), 1, 0, 64, 64)
			a.Credit(54)
			charge(t, b, 54)
			held, err := leases.Holders(dir)
			if err != nil || len(held) != 2 || held[0].Lost+held[1].Lost != 1 {
				t.Errorf("holders %+v, %v", held, err)
			}
			if len(leaseFiles(t, dir)) != 2 {
				t.Errorf("leases %q", leaseFiles(t, dir))
			}
		})
	}
}

// TestCleanedAgainAndAgain: three processes of which none was there when another joined
// hold no more from their next charge on.
func TestCleanedAgainAndAgain(t *testing.T) {
	dir := ledgerDir(t)
	var all []*leases.Lease
	for range 3 {
		l := join(t, terms(dir, "g", 64, 64))
		charge(t, l, 37) // it has not read the files of the others yet
		all = append(all, l)
		clean(t, dir)
	}
	charge(t, all[0], 1) // it finds no other file
	for _, l := range append(all[1:], join(t, terms(dir, "g", 64, 64))) {
		_ = l.Charge(1)
	}
	for _, l := range append(all, join(t, terms(dir, "g", 64, 64))) {
		wantRefusal(t, l.Charge(1), 1, 0, 3*37+1, 64)
	}
}

// TestIdleLeaseIsPutBack: a process that charges nothing, and has subscribers, notices as well, and
// that the directory is another one, too.
func TestIdleLeaseIsPutBack(t *testing.T) {
	t.Run("cleaned", func(t *testing.T) { testIdle(t, clean) })
	t.Run("moved away", func(t *testing.T) {
		testIdle(t, func(t *testing.T, dir string) {
			if err := os.Rename(dir, dir+"-old"); err != nil {
				t.Fatal(err)
			}
		})
	})
}

func testIdle(t *testing.T, remove func(t *testing.T, dir string)) {
	dir := ledgerDir(t)
	noticed := make(chan struct{}, 1)
	mine := terms(dir, "g", 64, 64)
	mine.OnBroken = func() { noticed <- struct{}{} }
	a := join(t, mine)
	charge(t, a, 40)
	defer a.Subscribe(func() {})()
	remove(t, dir)
	select {
	case <-noticed:
	case <-time.After(time.Minute):
		t.Fatal("nobody noticed")
	}
	wantRefusal(t, join(t, terms(dir, "g", 64, 64)).Charge(30), 30, 24, 40, 64)
}

// TestDirectoryReplacedWhileJoining: a process that waited for the lock of a directory which was
// moved away counts with those of the new directory.
func TestDirectoryReplacedWhileJoining(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := ledgerDir(t)
		sub := filepath.Join(dir, device)
		if err := os.MkdirAll(sub, 0o700); err != nil {
			t.Fatal(err)
		}
		unlock := lockDir(t, dir)
		var a *leases.Lease
		var joining sync.WaitGroup
		joining.Go(func() { a = join(t, terms(dir, "g", 64, 64)) })
		synctest.Wait() // it has opened the directory, and waits for the lock
		if err := errors.Join(os.Rename(sub, sub+"-old"), os.Mkdir(sub, 0o700)); err != nil {
			t.Fatal(err)
		}
		unlock()
		joining.Wait()
		b := join(t, terms(dir, "g", 64, 64))
		charge(t, b, 60)
		wantRefusal(t, a.Charge(5), 5, 4, 60, 64)
	})
}

// TestReplacedDirectoryIsLocked: a process that waited for the lock of a directory which was replaced waits
// for the lock of the new one, too.
func TestReplacedDirectoryIsLocked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := ledgerDir(t)
		sub := filepath.Join(dir, device)
		if err := os.MkdirAll(sub, 0o700); err != nil {
			t.Fatal(err)
		}
		unlock := lockDir(t, dir)
		var joining sync.WaitGroup
		joining.Go(func() { join(t, terms(dir, "g", 64, 64)) })
		synctest.Wait() // it waits for the lock
		if err := errors.Join(os.Rename(sub, sub+"-old"), os.Mkdir(sub, 0o700)); err != nil {
			t.Fatal(err)
		}
		unlockNew := lockDir(t, dir)
		unlock()
		time.Sleep(time.Second)
		if files := leaseFiles(t, dir); len(files) > 0 {
			t.Errorf("while the directory is locked, a process has created %q", files)
		}
		unlockNew()
		joining.Wait()
	})
}

// TestReplacedFile: a process whose file was replaced notices at its next look, even if no other process has
// looked since.
func TestReplacedFile(t *testing.T) {
	dir := ledgerDir(t)
	a := join(t, terms(dir, "g", 64, 64))
	charge(t, a, 40)
	path := filepath.Join(dir, device, leaseFiles(t, dir)[0])
	text, err := os.ReadFile(path)
	if err := errors.Join(err, os.Remove(path), os.WriteFile(path, text, 0o600)); err != nil {
		t.Fatal(err)
	}
	charge(t, a, 1)
	wantRefusal(t, join(t, terms(dir, "g", 64, 64)).Charge(30), 30, 23, 41, 64)
	if a.Lost() != 1 {
		t.Errorf("lost %d times", a.Lost())
	}
}

// TestLoweredAboveWhatIsAdvertised: a quota can be lowered although the quotas of all groups exceed what is
// advertised, because a group joined while another did not count. It cannot be raised again.
func TestLoweredAboveWhatIsAdvertised(t *testing.T) {
	dir := ledgerDir(t)
	a := join(t, terms(dir, "g", 60, 100))
	clean(t, dir)
	join(t, terms(dir, "h", 60, 100))
	if err := a.SetLimit(50); err != nil {
		t.Error(err)
	}
	if err := a.SetLimit(51); !errors.Is(err, tier.ErrOutOfBudget) {
		t.Errorf("raised above what is advertised: %v", err)
	}
}

// TestCannotBePutBack: while no new file can be created, the lease charges nothing. The removal counts once.
func TestCannotBePutBack(t *testing.T) {
	dir := ledgerDir(t)
	a := join(t, terms(dir, "g", 64, 64))
	charge(t, a, 40)
	if err := errors.Join(os.RemoveAll(dir), os.WriteFile(dir, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := a.Charge(1); !errors.Is(err, syscall.ENOTDIR) || !strings.Contains(err.Error(), dir) {
			t.Errorf("the error does not contain the cause: %v", err)
		}
	}
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	if charge(t, a, 24); a.Lost() != 1 {
		t.Errorf("the removal counts %d times", a.Lost())
	}
	a.Credit(64)
}

// TestRemovedUnderRaces: what is charged and given back while files are removed and put
// back adds up.
func TestRemovedUnderRaces(t *testing.T) {
	dir := ledgerDir(t)
	a := join(t, terms(dir, "g", 1000, 1000))
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for range 300 {
				if err := a.Charge(10); err != nil {
					t.Error(err)
					return
				}
				a.Credit(10)
			}
		})
	}
	all.Go(func() {
		for range 30 {
			entries, _ := os.ReadDir(filepath.Join(dir, device))
			for _, e := range entries {
				_ = os.Remove(filepath.Join(dir, device, e.Name()))
			}
			runtime.Gosched()
		}
	})
	all.Wait()
	if a.Live() != 0 {
		t.Errorf("%d bytes are left", a.Live())
	}
	charge(t, a, 100)
	held, err := leases.Holders(dir)
	if err != nil || len(held) != 1 || held[0].Live != 100 {
		t.Errorf("%+v, %v", held, err)
	}
}
