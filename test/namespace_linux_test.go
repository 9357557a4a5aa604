package test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/topology"
)

// inNamespace starts a process that has file systems of its own. That needs no privilege where the
// system lets users have name spaces; elsewhere the test is skipped. root sets whether it may do
// everything in there, which mounting requires.
func inNamespace(root bool) func(*exec.Cmd) {
	id := 0
	if !root {
		id = 1000
	}
	return func(cmd *exec.Cmd) {
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: id, HostID: os.Getuid(), Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: id, HostID: os.Getgid(), Size: 1}},
		}
	}
}

// mount puts a file system of 8 MiB in memory on a directory.
func mount(dir string) error {
	if err := unix.Mount("spillway", dir, "tmpfs", 0, "size=8m"); err != nil {
		return fmt.Errorf("%w: %v", errNoMount, err)
	}
	return nil
}

// errNoMount makes tests skip.
var errNoMount = errors.New("nothing can be mounted")

// namespaceJobs are what TestRealFileSystems has processes do in a directory of their
// own. They return what is wrong.
var namespaceJobs = map[string]func(dir string) error{
	"full":       spillToFull,
	"read-only":  spillToReadOnly,
	"not ours":   spillToForeign,
	"too little": spillToTooLittle,

	"no locked memory":    spillUnlocked,
	"no huge pages":       spillSmallPages,
	"nothing can be seen": spillUnseen,
	"over memory":         spillOverMemory,
}

// TestRealFileSystems: on a file system that is really full, or read-only, and in a directory that
// really has another owner.
func TestRealFileSystems(t *testing.T) {
	t.Parallel()
	for name := range namespaceJobs {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.Chmod(dir, 0o555); err != nil { // root there does not mind
				t.Fatal(err)
			}
			c, err := startChild(t, "namespace", inNamespace(name != "not ours"), dir, name)
			if err != nil {
				t.Skip("needs user and mount name spaces without privileges: ", err)
			}
			_, _ = io.Copy(io.Discard, c.stdout)
			err = c.cmd.Wait()
			if said := c.stderr.String(); strings.Contains(said, errNoMount.Error()) {
				t.Skip("needs leave to mount in a name space of its own: ", said)
			} else if err != nil {
				t.Errorf("%v: %s", err, said)
			}
			if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
				t.Errorf("%v is left, %v", left, err)
			}
		})
	}
}

// openIn opens an engine whose disk is in dir.
func openIn(dir string, capacity int64) (*spillway.Engine, error) {
	top, err := topology.Discover(context.Background(), topology.Options{})
	if err != nil {
		return nil, err
	}
	cfg := spillConfig(dir, nil, top)
	cfg.Disks[0].Capacity = spillway.Bytes(capacity)
	return spillway.Open(context.Background(), cfg)
}

// refused checks that an engine cannot be opened in dir, and that it says all that it should.
func refused(dir string, capacity int64, want error, says ...string) error {
	eng, err := openIn(dir, capacity)
	if err == nil {
		return errors.Join(errors.New("it was opened"), eng.Close())
	}
	return told(err, want, append(says, dir)...)
}

func told(err, want error, says ...string) error {
	if !errors.Is(err, want) {
		return fmt.Errorf("%v is not %w", err, want)
	}
	for _, s := range says {
		if !strings.Contains(err.Error(), s) {
			return fmt.Errorf("%w: does not say %q", err, s)
		}
	}
	return nil
}

func spillToReadOnly(dir string) error {
	if err := mount(dir); err != nil {
		return err
	}
	if err := unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		return fmt.Errorf("%w: %v", errNoMount, err)
	}
	return refused(dir, 4<<20, syscall.EROFS, "read-only file system", "name another directory")
}

func spillToForeign(dir string) error {
	return refused(dir, 4<<20, syscall.EACCES, "permission denied", "may make files there")
}

func spillToTooLittle(dir string) error {
	if err := mount(dir); err != nil {
		return err
	}
	if err := refused(dir, 9<<20, tier.ErrNoSpace, "make room there"); err != nil {
		return err
	}
	eng, err := openIn(dir, 0) // half of it
	if err != nil {
		return err
	}
	s, _ := eng.Reservations().Spaces().ByID(tier.ID{Kind: tier.Disk})
	if n := s.Capacity; n < 7<<19 || n > 4<<20 {
		err = fmt.Errorf("of 8 MiB the disk has %d bytes", n)
	}
	return errors.Join(err, eng.Close())
}

// spillToFull fills the file system when the engine has some of what it may have, and
// makes room again.
func spillToFull(dir string) error {
	if err := mount(dir); err != nil {
		return err
	}
	eng, err := openIn(dir, 6<<20)
	if err != nil {
		return err
	}
	err = errors.Join(fillAndEmpty(eng, dir), eng.Close())
	if left, e := os.ReadDir(dir); e != nil || len(left) != 0 {
		err = errors.Join(err, fmt.Errorf("%v is left, %v", left, e))
	}
	return err
}

func fillAndEmpty(eng *spillway.Engine, dir string) (err error) {
	ctx := context.Background()
	hold, err := eng.Reserve(ctx, reservation.AnyInTier(tier.Disk), 6<<20)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, hold.Release()) }()
	others := filepath.Join(dir, "others")
	if err := os.WriteFile(others, make([]byte, 11<<19), 0o600); err != nil {
		return err
	}
	data := bytes.Repeat([]byte{1, 2, 3, 4}, 1<<18)
	first, err := hold.Alloc(1 << 20)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, first.Release()) }()
	file := first.Memory().(tier.FileMemory)
	if err := file.WriteAt(ctx, data, 0); err != nil {
		return err
	}
	if _, err := hold.Alloc(5 << 20); err == nil {
		return errors.New("room was found on a file system that is full")
	} else if err := told(err, tier.ErrNoSpace, "disk:0 has no space", dir, "make room there, or name another directory"); err != nil {
		return err
	}
	got := make([]byte, len(data))
	if err := file.ReadAt(ctx, got, 0); err != nil || !bytes.Equal(got, data) {
		return fmt.Errorf("what was written reads differently, %v", err)
	}
	if err := os.Remove(others); err != nil {
		return err
	}
	second, err := hold.Alloc(5 << 20)
	if err != nil {
		return fmt.Errorf("when there is room again: %w", err)
	}
	return second.Release()
}
