//go:build linux && (amd64 || arm64)

package cudatest

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
)

//go:embed testdata/emulator
var sources embed.FS

// errNoCompiler is why tests are skipped.
var errNoCompiler = errors.New("the CUDA emulator needs a C compiler and the C library's headers")

// compiled is the library, compiled once for all tests of a binary.
var compiled = sync.OnceValues(compile)

func compile() (_ []byte, err error) {
	compiler, err := findCompiler()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "spillway-emulator-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	files, err := unpack(dir)
	if err != nil {
		return nil, err
	}
	out := filepath.Join(dir, "libcuda.so.1")
	args := append([]string{"-shared", "-fPIC", "-O2", "-Wall", "-pthread", "-fvisibility=hidden", "-o", out}, files...)
	if text, err := exec.Command(compiler, args...).CombinedOutput(); err != nil {
		if lacksHeaders(text) {
			return nil, fmt.Errorf("%w: %s", errNoCompiler, firstLine(text))
		}
		return nil, fmt.Errorf("compiling the CUDA emulator: %w\n%s", err, text)
	}
	return os.ReadFile(out)
}

func findCompiler() (string, error) {
	for _, name := range []string{"gcc", "cc", "clang"} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("%w: gcc, cc and clang are not there", errNoCompiler)
}

// unpack writes the sources to dir and returns those to compile.
func unpack(dir string) (files []string, err error) {
	const from = "testdata/emulator"
	entries, err := sources.ReadDir(from)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		text, err := sources.ReadFile(from + "/" + e.Name())
		if err != nil {
			return nil, err
		}
		path := filepath.Join(dir, e.Name())
		if err := os.WriteFile(path, text, 0o600); err != nil {
			return nil, err
		}
		if filepath.Ext(path) == ".c" {
			files = append(files, path)
		}
	}
	return files, nil
}

// lacksHeaders says whether it was the system's headers that the compiler did not find.
func lacksHeaders(text []byte) bool {
	return bytes.Contains(text, []byte(".h: No such file")) && !bytes.Contains(text, []byte("emulator.h: No such file"))
}

func firstLine(text []byte) string {
	line, _, _ := strings.Cut(string(text), "\n")
	return line
}

// without takes a function's name out of a library, so that the dynamic linker does not find
// it: as in the library of an older driver. One compilation serves for all.
func without(lib []byte, name string) ([]byte, error) {
	old := []byte("\x00" + name + "\x00")
	if !bytes.Contains(lib, old) {
		return nil, fmt.Errorf("the CUDA emulator has no function %s", name)
	}
	return bytes.ReplaceAll(lib, old, append([]byte{0, 'x'}, old[2:]...)), nil
}
