// Package cfake compiles C libraries for tests of code that calls a library that the machine may
// not have.
//
//	Source{Name, Files, Dir} ── Write(t, without...) ──▶ path of the test's own library
//
// A library that is loaded by another path has its own state, so tests may run in parallel. All of
// them share one compilation, even those whose library lacks functions. The files are in the test's
// temporary directory. Without a C compiler Write skips the test. All functions are safe for
// concurrent use.
package cfake

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// Source describes a library. Its source files are compiled as one, so they must not use one static
// name twice. A Source must not be copied after its first use.
type Source struct {
	Name  string // of the library's file, such as libcuda.so.1
	Files fs.FS
	Dir   string // of the sources and their headers in Files

	once sync.Once
	lib  []byte
	err  error
}

// errNoCompiler is the error for which tests are skipped.
var errNoCompiler = errors.New("gcc, cc or clang, or the C library's headers, are missing")

// Write writes the library to a directory of the test and returns its path. The dynamic linker does
// not find the functions in without, as in an older library. Write skips the test if there is no
// compiler.
func (s *Source) Write(t testing.TB, without ...string) (path string) {
	t.Helper()
	s.once.Do(func() { s.lib, s.err = s.Compile() })
	lib, err := s.lib, s.err
	if errors.Is(err, errNoCompiler) {
		t.Skip("needs a C compiler: ", err)
	}
	for _, name := range without {
		if err == nil {
			lib, err = hide(lib, name)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	path = filepath.Join(t.TempDir(), s.Name)
	if err := os.WriteFile(path, lib, 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}

// Compile compiles the library with additional flags and returns its bytes.
func (s *Source) Compile(flags ...string) (_ []byte, err error) {
	compiler, err := findCompiler()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "spillway-cfake-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	file, err := s.unpack(dir)
	if err != nil {
		return nil, err
	}
	out := filepath.Join(dir, s.Name)
	// Compiling without optimization takes a third of the time, and tests copy little.
	flags = append([]string{"-shared", "-fPIC", "-O0", "-Wall", "-pthread", "-fvisibility=hidden", "-o", out}, flags...)
	if text, err := exec.Command(compiler, append(flags, file)...).CombinedOutput(); err != nil {
		if s.lacksHeaders(text) {
			line, _, _ := strings.Cut(string(text), "\n")
			return nil, fmt.Errorf("%w: %s", errNoCompiler, line)
		}
		return nil, fmt.Errorf("compiling %s: %w\n%s", s.Name, err, text)
	}
	return os.ReadFile(out)
}

func findCompiler() (string, error) {
	for _, name := range []string{"gcc", "cc", "clang"} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", errNoCompiler
}

// unpack writes the sources to dir and returns the path of one that includes all of them, so that
// the compiler reads the headers only once, which halves its time.
func (s *Source) unpack(dir string) (all string, err error) {
	entries, err := fs.ReadDir(s.Files, s.Dir)
	if err != nil {
		return "", err
	}
	var includes []byte
	for _, e := range entries {
		text, err := fs.ReadFile(s.Files, s.Dir+"/"+e.Name())
		if err != nil {
			return "", err
		}
		if err := os.WriteFile(filepath.Join(dir, e.Name()), text, 0o600); err != nil {
			return "", err
		}
		if filepath.Ext(e.Name()) == ".c" {
			includes = fmt.Appendf(includes, "#include %q\n", e.Name())
		}
	}
	all = filepath.Join(dir, s.Name+".c")
	return all, os.WriteFile(all, includes, 0o600)
}

// lacksHeaders reports whether the compiler did not find a header of the system.
func (s *Source) lacksHeaders(text []byte) bool {
	own, _ := fs.ReadDir(s.Files, s.Dir)
	for _, e := range own {
		if bytes.Contains(text, []byte(e.Name()+": No such file")) {
			return false
		}
	}
	return bytes.Contains(text, []byte(".h: No such file"))
}

// hide changes a function's name in a library, so that the dynamic linker does not find it.
func hide(lib []byte, name string) ([]byte, error) {
	old := []byte("\x00" + name + "\x00")
	if !bytes.Contains(lib, old) {
		return nil, fmt.Errorf("the library has no function %s", name)
	}
	return bytes.ReplaceAll(lib, old, append([]byte{0, 'x'}, old[2:]...)), nil
}
