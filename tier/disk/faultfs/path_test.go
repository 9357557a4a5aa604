package faultfs

import "testing"

// TestPath: a pattern names the file, the whole path, or a directory above it.
func TestPath(t *testing.T) {
	for _, c := range []struct {
		pattern, path string
		want          bool
	}{
		{"", "/a/b/#0", true},
		{"#0", "/a/b/#0", true},
		{"#*", "/a/b/#12", true},
		{"/a/b/#0", "/a/b/#0", true},
		{"/a/b/*", "/a/b/#0", true},
		{"/a/b", "/a/b/#0", true},
		{"/a", "/a/b/c/segment-0001", true},
		{"/a/?/c", "/a/b/c/segment-0001", true},
		{"/", "/a", true},
		{"b", "/a/b/#0", false}, // a name is the file's
		{"/a/c", "/a/b/#0", false},
		{"/a/b/#1", "/a/b/#0", false},
		{"/a/b", "/a/bb/#0", false},
		{"a", "a/#0", true},
		{"[", "/a", false},
	} {
		if r := (Rule{Path: c.pattern}); r.matches(c.path) != c.want {
			t.Errorf("%q matches %q: want %v", c.pattern, c.path, c.want)
		}
	}
}
