package cfake

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/spillway-db/spillway/internal/dynlib"
)

// small returns a source with two functions, its own header and one of the system.
func small() *Source {
	return &Source{Name: "libsmall.so", Dir: "src", Files: fstest.MapFS{
		"src/own.h": {Data: []byte("#define VALUE 41\n#define API __attribute__((visibility(\"default\")))\n")},
		"src/small.c": {Data: []byte("#include <stdlib.h>\n#include \"own.h\"\n" +
			"API int value(void) { return VALUE; }\nAPI int value_v2(void) { return abs(-VALUE) + 1; }\n")},
	}}
}

// TestWrite checks that libraries have the functions that were not hidden, and leave no files.
func TestWrite(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	t.Run("libraries", func(t *testing.T) {
		s := small()
		whole, less := s.Write(t), s.Write(t, "value")
		for path, names := range map[string][]string{whole: {"value", "value_v2"}, less: {"value_v2"}} {
			lib, err := dynlib.Open(path)
			if errors.Is(err, errors.ErrUnsupported) {
				t.Skip("needs Linux on amd64 or arm64: ", err)
			}
			if err != nil {
				t.Fatal(err)
			}
			for i, name := range []string{"value", "value_v2"} {
				fn := lib.Find(name)
				if (fn != 0) != slices.Contains(names, name) {
					t.Errorf("%s: %s is at %#x", path, name, fn)
				}
				if fn != 0 && int32(dynlib.Call(fn, nil)) != int32(41+i) {
					t.Errorf("%s returns %d", name, dynlib.Call(fn, nil))
				}
			}
			lib.Close()
		}
	})
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 0 {
		t.Errorf("left are %v (%v)", left, err)
	}
}

// A function that does not exist cannot be hidden.
func TestHide(t *testing.T) {
	lib := []byte("..\x00cuInit\x00cuInit_v2\x00")
	got, err := hide(lib, "cuInit")
	if err != nil || string(got) != "..\x00xuInit\x00cuInit_v2\x00" {
		t.Errorf("hide gave %q, %v", got, err)
	}
	if _, err := hide(lib, "cuNone"); err == nil {
		t.Error("a function was hidden that does not exist")
	}
}

// Without a compiler a test is skipped, and the reason names what it needs.
func TestNoCompiler(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	if _, err := small().Compile(); err == nil || !strings.Contains(err.Error(), "gcc") {
		t.Errorf("compiling without a compiler: %v", err)
	}
	t.Run("test", func(t *testing.T) {
		defer func() {
			if !t.Skipped() {
				t.Error("the test was not skipped")
			}
		}()
		small().Write(t)
	})
}

// A missing header of the source's own is not a reason to skip a test.
func TestLacksHeaders(t *testing.T) {
	for text, want := range map[string]bool{
		"small.c:1:10: fatal error: stdlib.h: No such file or directory": true,
		"small.c:2:10: fatal error: own.h: No such file or directory":    false,
		"small.c:3:1: error: expected ';'":                               false,
	} {
		if got := small().lacksHeaders([]byte(text)); got != want {
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
}
