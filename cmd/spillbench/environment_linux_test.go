package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// unmountable is the status of a child that could not mount anything.
const unmountable = 77

// childCommand runs spillbench as a process of its own. how may be "mount DIR" and
// "mount-read-only DIR": then it puts a file system of 4 MiB there first, with two
// directories in it. Or "cgroup DIR": then it joins that cgroup first.
func childCommand(how string, args []string) int {
	verb, dir, _ := strings.Cut(how, " ")
	if verb == "cgroup" {
		if err := joinCgroup(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return unmountable
		}
		return Main(context.Background(), args, os.Stdout, os.Stderr)
	}
	if strings.HasPrefix(verb, "mount") {
		err := unix.Mount("spillway", dir, "tmpfs", 0, "size=4m")
		for _, name := range []string{"a", "b"} {
			err = errors.Join(err, os.Mkdir(filepath.Join(dir, name), 0o700))
		}
		if err == nil && verb == "mount-read-only" {
			err = unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, "")
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return unmountable
		}
	}
	status := Main(context.Background(), args, os.Stdout, os.Stderr)
	for _, name := range []string{"a", "b"} {
		if left, _ := os.ReadDir(filepath.Join(dir, name)); len(left) != 0 {
			fmt.Fprintln(os.Stderr, "left:", left)
		}
	}
	return status
}

// inNamespace runs spillbench in a process that has file systems of its own, for which
// no privilege is needed where the system lets users have name spaces. Its temp directory is tmp.
func inNamespace(t *testing.T, id int, how, tmp string, args ...string) ran {
	t.Helper()
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), commandChild+"="+how+" "+tmp, "TMPDIR="+tmp)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: id, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: id, HostID: os.Getgid(), Size: 1}},
	}
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Skip("needs user and mount name spaces without privileges: ", err)
	}
	r := ran{status: cmd.ProcessState.ExitCode(), stdout: stdout.String(), stderr: stderr.String()}
	if r.status == unmountable {
		t.Skip("needs leave to mount in a name space of its own: ", r.stderr)
	}
	return r
}

// TestRealDirectories: spill directories that are really read-only, another user's, full, or gone
// in the middle end with the status and the line that the contract names.
func TestRealDirectories(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		how    string
		id     int // of the user
		args   []string
		status int
		says   []string
	}{
		{"read-only", "mount-read-only", 0, []string{"--disk=DIR/a"}, 2, []string{"--disk DIR/a: not writable: read-only file system", "name a directory that you may write to"}},
		{"somebody else's", "plain", 1000, []string{"--disk=DIR"}, 2, []string{"--disk DIR: not writable: permission denied", "name a directory that you may write to"}},
		{"somebody else's temp", "plain", 1000, nil, 3, []string{"the temp directory DIR: not writable: permission denied", "--disk DIR"}},
		{"read-only temp", "mount-read-only", 0, nil, 3, []string{"the temp directory DIR: not writable: read-only file system", "--disk DIR"}},
		{"room for some", "mount", 0, []string{soon, "--disk=DIR/a=3MiB", "--gpu-memory=1MiB", "--host-memory=1MiB"}, 3, []string{"give --disk DIR=SIZE more room"}},
		// Each has room when it is opened, and together they have not.
		{"full", "mount", 0, []string{soon, "--disk=DIR/a=3584KiB", "--disk=DIR/b=3584KiB", "--gpu-memory=1MiB", "--host-memory=1MiB", "--rows-per-batch=1000"}, 3,
			[]string{"no space left on device", "make room there, or name another directory", "DIR/"}},
		{"larger than what is free", "mount", 0, []string{"--disk=DIR/a=1GiB"}, 3, []string{"DIR/a", "capacity 1073741824", "make room there, or name another directory"}},
		{"enough", "mount", 0, []string{"--disk=DIR/a=3584KiB", "--gpu-memory=512KiB", "--host-memory=512KiB"}, 0, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			if err := os.Chmod(dir, 0o555); err != nil { // a user that mounts there does not mind
				t.Fatal(err)
			}
			args := []string{"run", "--quiet"}
			for _, a := range c.args {
				args = append(args, strings.ReplaceAll(a, "DIR", dir))
			}
			r := inNamespace(t, c.id, c.how, dir, args...)
			if r.status != c.status || strings.Count(r.stderr, "\n") != min(1, r.status) {
				t.Errorf("ended with %d, want %d: %q", r.status, c.status, r.stderr)
			}
			for _, want := range c.says {
				if !strings.Contains(strings.ReplaceAll(r.stderr, dir, "DIR"), want) {
					t.Errorf("%q does not say %q", r.stderr, want)
				}
			}
			if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
				t.Errorf("left %v, %v", left, err)
			}
		})
	}
}

// TestSpillDirectoryVanishes while a run is under way: nothing is wrong with what is
// open, or the line names the directory.
func TestSpillDirectoryVanishes(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "spill")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	removed := make(chan error, 1)
	go func() {
		for ctx.Err() == nil && !holdsFileIn(dir) {
			runtime.Gosched()
		}
		removed <- os.Remove(dir) // it is empty: the files have no names
	}()
	r := command(t, t.Context(), soon, "--gpu-memory=4MiB", "--host-memory=4MiB", "--disk", dir+"=64MiB", "--quiet")
	stop()
	if err := <-removed; err != nil {
		t.Fatal(err)
	}
	if r.status != 0 && (r.status != 3 || !strings.Contains(r.stderr, dir) || !strings.Contains(r.stderr, "name another directory") || strings.Count(r.stderr, "\n") != 1) {
		t.Errorf("ended with %d: %q", r.status, r.stderr)
	}
}

// TestKilledRunLeavesNothing: a run that is killed, at whatever moment, leaves no spill file
// and no part of a result.
func TestKilledRunLeavesNothing(t *testing.T) {
	t.Parallel()
	kills := 8
	if testing.Short() {
		kills = 3
	}
	dir := t.TempDir()
	rng := rand.New(rand.NewPCG(3, 4))
	for range kills {
		cmd := exec.Command(os.Args[0], "run", "--gpu-memory=1MiB", "--host-memory=1MiB", "--repeat=1000", "--quiet",
			"--disk", dir+"=1GiB", "--json", filepath.Join(dir, "result.json"))
		cmd.Env = append(os.Environ(), commandChild+"=plain", "TMPDIR="+dir)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		for looks := rng.IntN(400); looks > 0 && !ended(cmd.Process.Pid); {
			if processHolds(cmd.Process.Pid, dir) {
				looks-- // it is at work, and a bit later each time
			}
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Error(err)
		}
		err := cmd.Wait()
		if cmd.ProcessState.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
			t.Errorf("it was not killed: %v", err)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
			t.Fatalf("left %v, %v", left, err)
		}
	}
}

// processHolds says whether a process has a file in dir open.
func processHolds(pid int, dir string) bool {
	fds, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	for _, fd := range fds {
		if to, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, fd.Name())); err == nil && strings.HasPrefix(to, dir+"/") {
			return true
		}
	}
	return false
}

// ended reports whether a process is over, even without a Wait for it.
func ended(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || bytes.Contains(stat, []byte(") Z "))
}
