package testfs_test

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/test/testfs"
)

func ExampleParseTree() {
	entries, err := testfs.ParseTree(`a machine with one disk
-- sys/block/sda -> ../devices/pci0000:00/0000:00:17.0/sda --
-- sys/devices/pci0000:00/0000:00:17.0/sda/size --
2048
`)
	fmt.Println(len(entries), entries[0].Path, entries[1].Text, err)
	// Output:
	// 2 sys/block/sda 2048
	//  <nil>
}

func TestParse(t *testing.T) {
	text := "comment\n-- a/b --\nx\n\ny\n-- c/ --\n-- d -> ../nowhere --\n-- e --\n"
	got, err := testfs.ParseTree(text)
	if err != nil {
		t.Fatal(err)
	}
	want := []testfs.Entry{
		{Path: "a/b", Text: "x\n\ny\n"},
		{Path: "c", Kind: testfs.Directory},
		{Path: "d", Kind: testfs.Link, Text: "../nowhere"},
		{Path: "e"},
	}
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("got %+v, want %+v", got, want)
	}
}

func TestParseErrors(t *testing.T) {
	for _, text := range []string{
		"-- ../a --\n",
		"-- /a --\n",
		"-- a//b --\n",
		"-- . --\n",
		"--  --\n",
		"-- a --\n-- a --\n",
		"-- a/ --\ntext\n",
		"-- a -> b --\ntext\n",
	} {
		if got, err := testfs.ParseTree(text); err == nil {
			t.Errorf("%q: got %+v, want an error", text, got)
		}
	}
}

func TestUnpack(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "tree.txtar")
	if err := os.WriteFile(file, []byte("-- root/a:b/f --\nhello\n-- root/link -> a:b/f --\n-- root/empty/ --\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := testfs.UnpackTree(file, dir); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(dir, "root/link")); err != nil || string(got) != "hello\n" {
		t.Errorf("through the link: %q, %v", got, err)
	}
	if info, err := os.Stat(filepath.Join(dir, "root/empty")); err != nil || !info.IsDir() {
		t.Errorf("the directory: %v, %v", info, err)
	}
	if err := testfs.UnpackTree(file, dir); err == nil {
		t.Error("a second time over the first: want an error")
	}
	if err := testfs.UnpackTree(filepath.Join(dir, "missing"), dir); err == nil {
		t.Error("a missing file: want an error")
	}
	if err := testfs.UnpackTree(file, file); err == nil {
		t.Error("into a file: want an error")
	}
}

// A link of the tree must not lead a later entry out of it.
func TestWriteStaysBelow(t *testing.T) {
	outside, dir := t.TempDir(), t.TempDir()
	err := testfs.WriteTree(dir, []testfs.Entry{
		{Path: "out", Kind: testfs.Link, Text: outside},
		{Path: "out/f", Text: "x"},
	})
	if err == nil {
		t.Error("want an error")
	}
	if left, _ := os.ReadDir(outside); len(left) != 0 {
		t.Errorf("written outside: %v", left)
	}
}

func FuzzParse(f *testing.F) {
	f.Add("-- a --\ntext\n-- b/ --\n-- c -> d --\n")
	f.Add("comment only")
	f.Fuzz(func(t *testing.T, text string) {
		entries, err := testfs.ParseTree(text)
		if err != nil {
			return
		}
		for _, e := range entries {
			if !filepath.IsLocal(e.Path) || strings.HasSuffix(e.Path, "/") {
				t.Errorf("path %q", e.Path)
			}
		}
	})
}
