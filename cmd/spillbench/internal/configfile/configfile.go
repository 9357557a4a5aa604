// Package configfile reads the file of --config: a mapping in YAML from the names of flags to their
// values.
//
//	policy: lru            ──Parse──▶  {policy [lru] line 1}
//	disk: [/a, /b=10GiB]               {disk [/a /b=10GiB] line 2}
//
// What a name means is the caller's business. The parser is go.yaml.in/yaml: it is kept by the YAML
// organization, and the module has it already, for cobra's pages.
//
// Its functions are pure and may be called at the same time.
package configfile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"

	"go.yaml.in/yaml/v3"
)

// MaxBytes is the largest file that Parse reads. A configuration takes some lines.
const MaxBytes = 1 << 20

// Entry is one key of the file and the texts of its values: one, or those of a list.
type Entry struct {
	Key    string
	Values []string
	List   bool // the values were given as a list
	Line   int  // of the key, from 1
}

// Error says in which line what is wrong. Line is 0 if that is not known.
type Error struct {
	Line int
	What string
}

func (e *Error) Error() string {
	if e.Line == 0 {
		return e.What
	}
	return fmt.Sprintf("line %d: %s", e.Line, e.What)
}

// Parse returns the entries in the order of the file. An empty file has none. Texts are as they were
// typed: 0.90 stays 0.90, and off is no boolean. An error is an *Error of one line.
func Parse(text []byte) ([]Entry, error) {
	if len(text) > MaxBytes {
		return nil, &Error{What: fmt.Sprintf("it has more than %d bytes", MaxBytes)}
	}
	dec := yaml.NewDecoder(bytes.NewReader(text))
	var doc yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return nil, nil
	case err != nil:
		return nil, &Error{What: oneLine(err)}
	}
	var more yaml.Node
	if err := dec.Decode(&more); err == nil {
		return nil, &Error{Line: more.Line, What: "a second document begins"}
	} else if !errors.Is(err, io.EOF) {
		return nil, &Error{What: oneLine(err)}
	}
	return entries(doc.Content[0])
}

// oneLine is what the parser says, in one line without its name.
func oneLine(err error) string {
	return strings.TrimPrefix(strings.Join(strings.Fields(err.Error()), " "), "yaml: ")
}

func entries(top *yaml.Node) (all []Entry, err error) {
	if top.Kind == yaml.ScalarNode && top.Tag == "!!null" {
		return nil, nil // only comments, or ---
	}
	if top.Kind != yaml.MappingNode {
		return nil, &Error{top.Line, "want lines such as policy: lru"}
	}
	lines := make(map[string]int)
	for i := 0; i+1 < len(top.Content); i += 2 {
		key, value := top.Content[i], top.Content[i+1]
		if key.Kind != yaml.ScalarNode {
			return nil, &Error{key.Line, "want the name of a flag before the colon"}
		}
		if first, ok := lines[key.Value]; ok {
			return nil, &Error{key.Line, fmt.Sprintf("%s was set in line %d already", key.Value, first)}
		}
		lines[key.Value] = key.Line
		e := Entry{Key: key.Value, Line: key.Line}
		if e.Values, e.List, err = values(key, value); err != nil {
			return nil, err
		}
		all = append(all, e)
	}
	return all, nil
}

// values returns the texts of a value.
func values(key, value *yaml.Node) (texts []string, list bool, err error) {
	items := []*yaml.Node{value}
	if value.Kind == yaml.SequenceNode {
		items, list = value.Content, true
	}
	for _, n := range items {
		switch {
		case n.Kind == yaml.AliasNode:
			return nil, false, &Error{n.Line, key.Value + ": aliases are not supported: write the value itself"}
		case n.Kind != yaml.ScalarNode:
			return nil, false, &Error{n.Line, key.Value + ": want a value, or a list of values"}
		case n.Tag == "!!null":
			return nil, false, &Error{n.Line, key.Value + " has no value"}
		}
		texts = append(texts, n.Value)
	}
	if len(texts) == 0 {
		return nil, false, &Error{value.Line, key.Value + ": the list is empty"}
	}
	return texts, list, nil
}
