package main

import (
	"errors"
	"io"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/system"
)

// TestNoNames: looking whether a directory can be written to makes no name in it,
// and a new result only its own, at any moment.
func TestNoNames(t *testing.T) {
	dir := t.TempDir()
	f, err := system.OpenNameless(dir)
	if err != nil {
		t.Skipf("needs files without names: %v", err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	watch, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(watch)
	if _, err := unix.InotifyAddWatch(watch, dir, unix.IN_CREATE|unix.IN_MOVED_TO); err != nil {
		t.Fatal(err)
	}
	if err := probeDir(dir); err != nil {
		t.Fatal(err)
	}
	flags := outputFlags{json: filepath.Join(dir, "r.json")}
	if _, err := flags.open(commandTo(t, io.Discard)); err != nil {
		t.Fatal(err)
	}
	if names := made(t, watch); len(names) != 0 {
		t.Errorf("the checks made %q", names)
	}
	if err := flags.places()[0].write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if names := made(t, watch); !slices.Equal(names, []string{"r.json"}) {
		t.Errorf("writing the result made %q", names)
	}
}

// made returns the names that were made since it was asked last.
func made(t *testing.T, watch int) (names []string) {
	t.Helper()
	buf := make([]byte, 4096)
	n, err := unix.Read(watch, buf)
	if errors.Is(err, unix.EAGAIN) {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	for b := buf[:n]; len(b) >= unix.SizeofInotifyEvent; {
		length := int(b[12]) | int(b[13])<<8 // of the name, padded with zeros
		end := unix.SizeofInotifyEvent + length
		names = append(names, unix.ByteSliceToString(b[unix.SizeofInotifyEvent:end]))
		b = b[end:]
	}
	return names
}
