package configfile

import (
	"reflect"
	"strings"
	"testing"
)

// TestParse: keys and the texts of their values come as they were typed.
func TestParse(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		want []Entry
	}{
		"empty":        {"", nil},
		"only a note":  {"# nothing\n", nil},
		"only a start": {"---\n", nil},
		"texts":        {"limit: 0.90\nwrite-ahead: off\nencrypt: true\n", []Entry{{"limit", []string{"0.90"}, false, 1}, {"write-ahead", []string{"off"}, false, 2}, {"encrypt", []string{"true"}, false, 3}}},
		"lists":        {"# spill\ndisk:\n  - /a\n  - /b=10GiB\nfault: [\"op=read,kind=eio\"]\n", []Entry{{"disk", []string{"/a", "/b=10GiB"}, true, 2}, {"fault", []string{"op=read,kind=eio"}, true, 5}}},
		"an empty one": {"disk: \"\"\n", []Entry{{"disk", []string{""}, false, 1}}},
	} {
		if got, err := Parse([]byte(c.text)); err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %+v, %v, want %+v", name, got, err, c.want)
		}
	}
}

// TestParseRefuses: what is no mapping of names to values is an error in one line, with its line.
func TestParseRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"policy":                         "line 1: want lines such as policy: lru",
		"- policy":                       "line 1: want lines such as policy: lru",
		"policy: lru\npolicy: lru":       "line 2: policy was set in line 1 already",
		"policy:":                        "line 1: policy has no value",
		"policy: {name: lru}":            "line 1: policy: want a value, or a list of values",
		"disk: [[a]]":                    "line 1: disk: want a value, or a list of values",
		"disk: []":                       "line 1: disk: the list is empty",
		"disk: [a, ~]":                   "line 1: disk has no value",
		"a: &x b\nc: *x":                 "line 2: c: aliases are not supported: write the value itself",
		"[a]: b":                         "line 1: want the name of a flag before the colon",
		"a: b\n---\nc: d":                "a second document begins",
		"a: \"b":                         "unexpected end of stream",
		"\ta: b":                         "found character that cannot start any token",
		strings.Repeat("#", 1<<20) + "#": "it has more than 1048576 bytes",
	} {
		_, err := Parse([]byte(text))
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%.20q: %v, want %q", text, err, want)
		}
	}
}

// FuzzParse: no text makes it panic, and each error has one line.
func FuzzParse(f *testing.F) {
	f.Add([]byte("policy: lru\ndisk: [a, b]\n"))
	f.Add([]byte("a: &x b\nc: *x\n---\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		all, err := Parse(text)
		if err != nil && strings.Contains(err.Error(), "\n") {
			t.Errorf("%q", err)
		}
		for _, e := range all {
			if len(e.Values) == 0 || e.Line == 0 {
				t.Errorf("%+v", e)
			}
		}
	})
}
