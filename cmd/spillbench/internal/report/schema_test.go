package report

import (
	"encoding"
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

// since are the keys that documents of older programs of this version of the schema do not have.
var since = []string{
	"version",
	"go_version",
	"args",
	"time",
	"extent",
	"planned_bytes",
	"inconclusive",
	"samples",
	"moves_per_edge",
	"disk_slots",
	"goos",
	"goarch",
}

// documents are the commands and what they write.
var documents = map[string]Document{
	"run":           &Run{},
	"verify":        &Verify{},
	"bandwidth":     &Bandwidth{},
	"compare":       &Compare{},
	"quota":         &Quota{},
	"topo":          &Topo{},
	"inspect":       &Inspect{},
	"trace replay":  &Trace{},
	"trace compare": &Trace{},
}

// TestSchemaHasEveryKey: the schema says of each document which keys it has, of which type, and which
// of them are always there: exactly what its Go type says.
func TestSchemaHasEveryKey(t *testing.T) {
	var root map[string]any
	if err := json.Unmarshal([]byte(JSONSchema()), &root); err != nil {
		t.Fatal(err)
	}
	defs := root["$defs"].(map[string]any)
	used := map[string]bool{}
	resolve := func(s map[string]any) map[string]any {
		for s["$ref"] != nil {
			name := strings.TrimPrefix(s["$ref"].(string), "#/$defs/")
			used[name] = true
			s, _ = defs[name].(map[string]any)
		}
		return s
	}
	var check func(at string, of reflect.Type, s map[string]any)
	check = func(at string, of reflect.Type, s map[string]any) {
		s = resolve(s)
		want := ""
		switch of.Kind() {
		case reflect.Pointer:
			check(at, of.Elem(), s)
			return
		case reflect.String:
			want = "string"
		case reflect.Bool:
			want = "boolean"
		case reflect.Float64:
			want = "number"
		case reflect.Slice:
			want = "array"
		case reflect.Struct, reflect.Map:
			want = "object"
		default:
			want = "integer"
		}
		if of == reflect.TypeFor[time.Time]() || of.Implements(reflect.TypeFor[encoding.TextMarshaler]()) {
			want = "string"
		}
		types, several := s["type"].([]any)
		if s["const"] == nil && s["type"] != want && !(several && types[0] == want) {
			t.Errorf("%s: the type is %v, want %s", at, s["type"], want)
			return
		}
		switch {
		case want == "array":
			check(at+"[]", of.Elem(), s["items"].(map[string]any))
		case of.Kind() == reflect.Map:
			check(at+".*", of.Elem(), s["additionalProperties"].(map[string]any))
		case want == "object":
			if s["additionalProperties"] != false {
				t.Errorf("%s: other keys are allowed", at)
			}
			properties, _ := s["properties"].(map[string]any)
			keys, always := map[string]reflect.Type{}, []string{}
			fieldsOf(of, func(key string, optional bool, of reflect.Type) {
				keys[key] = of
				if !optional && !slices.Contains(since, key) {
					always = append(always, key)
				}
			})
			if got, want := slices.Sorted(
				maps.Keys(properties),
			), slices.Sorted(
				maps.Keys(keys),
			); !slices.Equal(
				got,
				want,
			) {
				t.Errorf("%s: schema/spillbench.v1.schema.json has the keys\n%q, and the document\n%q", at, got, want)
				return
			}
			var required []string
			for _, key := range s["required"].([]any) {
				required = append(required, key.(string))
			}
			if slices.Sort(required); !slices.Equal(required, slices.Sorted(slices.Values(always))) {
				t.Errorf("%s: required are %q, and always there %q", at, required, always)
			}
			for key, of := range keys {
				check(at+"."+key, of, properties[key].(map[string]any))
			}
		}
	}
	seen := []string{}
	for _, branch := range root["allOf"].([]any) {
		branch := branch.(map[string]any)
		for _, command := range branch["if"].(map[string]any)["properties"].(map[string]any)["command"].(map[string]any)["enum"].([]any) {
			name := command.(string)
			seen = append(seen, name)
			if documents[name] == nil {
				t.Errorf("there is no command %q", name)
				continue
			}
			check(name, reflect.TypeOf(documents[name]), branch["then"].(map[string]any))
		}
	}
	if slices.Sort(seen); !slices.Equal(seen, slices.Sorted(maps.Keys(documents))) {
		t.Errorf("the schema knows the commands %q", seen)
	}
	for name := range defs {
		if !used[name] {
			t.Errorf("nothing refers to the definition of %s", name)
		}
	}
}

// fieldsOf calls f for each key of a struct, with those of embedded ones.
func fieldsOf(of reflect.Type, f func(key string, optional bool, of reflect.Type)) {
	for i := range of.NumField() {
		field := of.Field(i)
		key, options, _ := strings.Cut(field.Tag.Get("json"), ",")
		switch {
		case field.Anonymous && key == "":
			fieldsOf(field.Type, f)
		case key != "" && key != "-":
			f(key, options == "omitempty", field.Type)
		}
	}
}

// TestSchemaRefuses: a key that the schema does not have, one that is missing, and another type are
// found; documents of older programs are not.
func TestSchemaRefuses(t *testing.T) {
	parsed, err := jsonschema.UnmarshalJSON(strings.NewReader(JSONSchema()))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	if err := c.AddResource("schema.json", parsed); err != nil {
		t.Fatal(err)
	}
	schema, err := c.Compile("schema.json") // which holds it against the schema of schemas
	if err != nil {
		t.Fatal(err)
	}
	good := func() map[string]any {
		doc := &Verify{Header: NewHeader("verify", Env{}, nil), Files: []File{{}}}
		doc.Config.Disks, doc.Config.Faults = []Disk{{}}, []Fault{}
		text, err := json.Marshal(doc)
		if err != nil {
			t.Fatal(err)
		}
		var v map[string]any
		if err := json.Unmarshal(text, &v); err != nil {
			t.Fatal(err)
		}
		return v
	}
	for name, c := range map[string]struct {
		change func(map[string]any)
		valid  bool
	}{
		"a document": {func(map[string]any) {}, true},
		"an older one": {func(v map[string]any) {
			maps.DeleteFunc(v, func(k string, _ any) bool { return slices.Contains(since, k) })
		}, true},
		"another key":         {func(v map[string]any) { v["more"] = 1 }, false},
		"another key, deeper": {func(v map[string]any) { v["env"].(map[string]any)["more"] = 1 }, false},
		"a key less":          {func(v map[string]any) { delete(v, "files") }, false},
		"another type":        {func(v map[string]any) { v["files"] = "none" }, false},
		"another schema":      {func(v map[string]any) { v["schema"] = "spillway.spillbench/v2" }, false},
		"another command":     {func(v map[string]any) { v["command"] = "dance" }, false},
		"no command":          {func(v map[string]any) { delete(v, "command") }, false},
		"of another command":  {func(v map[string]any) { v["command"] = "run" }, false},
		"no time":             {func(v map[string]any) { v["time"] = "today" }, false},
	} {
		doc := good()
		c.change(doc)
		if err := schema.Validate(doc); (err == nil) != c.valid {
			t.Errorf("%s: %v", name, err)
		}
	}
}
