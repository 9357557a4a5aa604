package main

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/system"
)

// probeDir checks that files can be made in dir. What it makes has no name, or
// where that cannot be loses it at once, so that a process killed at any moment
// leaves nothing.
func probeDir(dir string) error {
	f, err := system.OpenNameless(dir)
	if err == nil {
		return f.Close()
	}
	// The error comes from the plain way of making a file: the other may just not exist here.
	if f, err = os.CreateTemp(dir, ".spillbench-*"); err != nil {
		return err
	}
	return errors.Join(os.Remove(f.Name()), f.Close())
}

// storeFile puts a file with this content at path, whole or not at all. The file
// is written without a name where that can be. It has one other than path, for as long
// as a link and a rename take, only if it replaces another.
func storeFile(path string, content []byte) error {
	f, err := system.OpenNameless(filepath.Dir(path))
	if err != nil {
		return writeNamed(path, content)
	}
	_, err = f.Write(content)
	err = errors.Join(err, f.Chmod(0o644))
	if err != nil {
		return errors.Join(err, f.Close())
	}
	if err = system.GiveName(f, path); errors.Is(err, fs.ErrExist) {
		err = replaceBy(f, path)
	}
	if err != nil { // no /proc, or no links
		return errors.Join(f.Close(), writeNamed(path, content))
	}
	return f.Close()
}

// replaceBy puts the nameless f in the place of the file at path.
func replaceBy(f *os.File, path string) error {
	beside, err := os.CreateTemp(filepath.Dir(path), ".spillbench-*") // a name that is not in use
	if err != nil {
		return err
	}
	name := beside.Name()
	if err := errors.Join(os.Remove(name), beside.Close()); err != nil {
		return err
	}
	if err := system.GiveName(f, name); err != nil {
		return err
	}
	return renameOr(name, path)
}

// writeNamed writes a file under a name of its own and renames it.
func writeNamed(path string, content []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".spillbench-*")
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err = errors.Join(err, f.Chmod(0o644), f.Close()); err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return renameOr(f.Name(), path)
}

// renameOr renames a file, or removes it.
func renameOr(from, to string) error {
	if err := os.Rename(from, to); err != nil {
		return errors.Join(err, os.Remove(from))
	}
	return nil
}
