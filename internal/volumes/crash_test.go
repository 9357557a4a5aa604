package volumes_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// childMain is the process that is killed: mode is "anonymous" or "named", or "keep" for
// persistChild, and the directory is its first argument. It signals the parent when it has written.
func childMain(mode string) {
	if mode == "keep" {
		persistChild()
	}
	cfg := volumes.Config{Dir: os.Args[1], Capacity: 64 * mib}
	if mode == "named" {
		cfg.FS = faultfs.New(disk.OS(), 1, noAnonymous)
	}
	v, err := volumes.Open(cfg)
	if err == nil {
		m, failed := v.Alloc(20*mib, nil)
		if err = failed; err == nil {
			err = m.(tier.FileMemory).WriteAt(context.Background(), aligned(20*mib), 0)
		}
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("written")
	_, _ = os.Stdin.Read(make([]byte, 1)) // until killed, or the parent is gone
}

// startChild starts such a process and waits until it has written.
func startChild(t *testing.T, mode, dir string) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Skip("needs to start a process: ", err)
	}
	child := exec.Command(exe, dir)
	child.Env = append(os.Environ(), childEnv+"="+mode)
	child.Stderr = os.Stderr
	stdin, err := child.StdinPipe() // open until the test ends
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = stdin.Close()
		_ = child.Process.Kill()
		_ = child.Wait()
	})
	line, _ := bufio.NewReader(stdout).ReadString('\n')
	if line != "written\n" {
		t.Fatalf("the child says %q", line)
	}
	return child
}

func names(t *testing.T, dir string) (all []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

// TestKilledProcessLeavesNothing: with anonymous files nothing at all, with named
// ones nothing after the next open; while the process lives, nothing of it is
// touched.
func TestKilledProcessLeavesNothing(t *testing.T) {
	for _, mode := range []string{"anonymous", "named"} {
		t.Run(mode, func(t *testing.T) {
			onLinux(t)
			dir := t.TempDir()
			child := startChild(t, mode, dir)
			alive := names(t, dir)
			if (len(alive) == 0) != (mode == "anonymous") {
				t.Errorf("while the process lives: %v", alive)
			}
			open := func() *volumes.Volume {
				v, err := volumes.Open(volumes.Config{Dir: dir, Capacity: mib})
				if err != nil {
					t.Fatal(err)
				}
				return v
			}
			v := open()
			if got := names(t, dir); !slices.Equal(got, alive) {
				t.Errorf("a volume that was opened beside made %v of %v", got, alive)
			}
			if err := v.Close(); err != nil {
				t.Error(err)
			}
			if err := child.Process.Kill(); err != nil { // SIGKILL
				t.Fatal(err)
			}
			_ = child.Wait()
			if mode == "anonymous" {
				wantEmpty(t, dir)
			}
			v = open()
			wantEmpty(t, dir)
			if w := v.Stats().Warnings; mode == "named" {
				oneLine(t, warned(w), "removed what killed processes left", alive[0])
			} else if len(w) != 0 {
				t.Errorf("warnings: %q", w)
			}
			if err := v.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestForeignFilesAreNotTouched: whatever looks nearly like ours, and what others put
// into directories of ours.
func TestForeignFilesAreNotTouched(t *testing.T) {
	onLinux(t)
	dir := t.TempDir()
	const dead = "spillway-4711-0123456789abcdef"     // abandoned: goes
	const mixed = "spillway-4711-fedcba9876543210"    // abandoned, with a foreign file: only ours go
	const unlocked = "spillway-4711-0000000000000000" // no lock file, and not empty: stays
	const empty = "spillway-4711-1111111111111111"    // killed before it made its lock: goes
	stay := []string{
		"data.parquet", "segment-0000", "lock", "spillway-1-0123456789abcdef", // a file of that name
		"spillway-x-0123456789abcdef/lock", "spillway-1-0123456789abcde/lock", "spillway-1-0123456789abcdef0/lock",
		"spillway-1-0123456789ABCDEF/lock", "xspillway-1-0123456789abcdef/lock", "other/spillway-1-0123456789abcdef/lock",
		mixed + "/notes.txt", mixed + "/segment-12", mixed + "/segment-00000x", mixed + "/segment-0007/file",
		unlocked + "/segment-0000",
	}
	leave := []string{dead + "/lock", dead + "/segment-0000", dead + "/segment-12345", mixed + "/segment-0003"}
	for _, name := range slices.Concat(stay, leave) {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, mixed, "lock"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, empty), 0o700); err != nil {
		t.Fatal(err)
	}
	// A link to a directory that looks abandoned is not one.
	target := filepath.Join(t.TempDir(), "target")
	if err := os.Mkdir(target, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"lock", "segment-0000"} {
		if err := os.WriteFile(filepath.Join(target, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(target, filepath.Join(dir, "spillway-9-0123456789abcdef")); err != nil {
		t.Fatal(err)
	}

	for _, fsys := range []disk.FS{disk.OS(), faultfs.New(disk.OS(), 1, noAnonymous)} {
		v, err := volumes.Open(volumes.Config{Dir: dir, Capacity: 8 * mib, FS: fsys})
		if err != nil {
			t.Fatal(err)
		}
		e := alloc(t, v, 8*mib)
		write(t, e, random(8*mib, 1), 0)
		free(v, e)
		if err := v.Close(); err != nil {
			t.Error(err)
		}
		for _, name := range stay {
			if b, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(b) != name {
				t.Errorf("%s: %q, %v", name, b, err)
			}
		}
		if got := names(t, target); len(got) != 2 {
			t.Errorf("behind the link only %v are left", got)
		}
	}
	for _, name := range append(leave, dead, empty) {
		if _, err := os.Lstat(filepath.Join(dir, name)); !os.IsNotExist(err) {
			t.Errorf("%s is still there: %v", name, err)
		}
	}
}

// TestOpeningAndCleaningBesideEachOther: no volume that is being opened is taken for
// abandoned by one that cleans up.
func TestOpeningAndCleaningBesideEachOther(t *testing.T) {
	onLinux(t)
	dir := t.TempDir()
	done := make(chan error, 4)
	for g := range uint64(4) {
		go func() {
			done <- func() error {
				for i := range uint64(25) {
					v, err := volumes.Open(volumes.Config{Dir: dir, Capacity: mib, FS: faultfs.New(disk.OS(), g<<8|i, noAnonymous)})
					if err != nil {
						return err
					}
					m, err := v.Alloc(mib, nil)
					if err != nil {
						return err
					}
					if err := m.(tier.FileMemory).WriteAt(context.Background(), aligned(page), 0); err != nil {
						return err
					}
					v.Free(m, func() {})
					if err := v.Close(); err != nil {
						return err
					}
				}
				return nil
			}()
		}()
	}
	for range 4 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	wantEmpty(t, dir)
}
