//go:build linux && (amd64 || arm64)

package dynlib

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"unsafe"
)

// A text may end where its memory does: what is behind it is not looked at.
func TestTextAtTheEndOfMemory(t *testing.T) {
	page := os.Getpagesize()
	mem, err := syscall.Mmap(-1, 0, 2*page, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Munmap(mem)
	at := page - copy(mem[page-4:], "abc\x00")
	if err := syscall.Mprotect(mem[page:], syscall.PROT_NONE); err != nil {
		t.Fatal(err)
	}
	if got := Text(unsafe.Slice(&mem[at], 200)); got != "abc" {
		t.Errorf("the text is %q", got)
	}
	if got := Text([]byte("all of it")); got != "all of it" {
		t.Errorf("without an end the text is %q", got)
	}
}

// Why a library cannot be opened is what the linker says, also if many fail at a time.
func TestOpenSaysWhy(t *testing.T) {
	dir := t.TempDir()
	done := make(chan error)
	for i := range 8 {
		path := filepath.Join(dir, string(rune('a'+i)))
		if err := os.WriteFile(path, []byte("no library"), 0o600); err != nil {
			t.Fatal(err)
		}
		go func() {
			var wrong error
			for range 200 {
				if _, err := Open(path); err == nil {
					wrong = fmt.Errorf("%s was opened", path)
				} else if !strings.Contains(err.Error(), path) {
					wrong = fmt.Errorf("opening %s says %w", path, err)
				}
			}
			done <- wrong
		}()
	}
	for range 8 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}
