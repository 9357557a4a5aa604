package cdevice

import (
	"fmt"
	"slices"
	"strings"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/tier"
)

// The keys under which fields keep their extension.
const (
	extensionName = "ARROW:extension:name"
	extensionData = "ARROW:extension:metadata"
)

// How large the trees may be that are read: more is a mistake, or an attack.
const (
	maxDepth   = 64
	maxStructs = 1 << 20
	maxBuffers = 4 * maxStructs // in all structs of an array
)

// schemaWriter lays out the structs of a schema.
type schemaWriter struct {
	mem   *memory
	id    uintptr
	count int64
	path  image.Path
}

// field fills out, which may be anywhere.
func (w *schemaWriter) field(out *Schema, f arrow.Field) error {
	w.path = append(w.path, f.Name)
	defer func() { w.path = w.path[:len(w.path)-1] }()
	w.count++
	dt, meta := f.Type, f.Metadata
	if e, ok := dt.(arrow.ExtensionType); ok {
		if meta.FindKey(extensionName) < 0 {
			meta = arrow.NewMetadata(slices.Concat(meta.Keys(), []string{extensionName, extensionData}),
				slices.Concat(meta.Values(), []string{e.ExtensionName(), e.Serialize()}))
		}
		dt = e.StorageType()
		if _, ok := dt.(arrow.ExtensionType); ok {
			return unsupported(w.path, "an extension of an extension")
		}
	}
	text, ok := format(dt)
	if !ok {
		return unsupported(w.path, "the type %s", dt)
	}
	if f.Nullable {
		out.Flags |= flagNullable
	}
	out.Format, out.Name, out.Metadata = w.mem.text(text), w.mem.text(f.Name), w.mem.put(encoded(meta))
	out.Release, out.PrivateData = callbacks().schema, w.id
	switch t := dt.(type) {
	case *arrow.DictionaryType:
		if t.Ordered {
			out.Flags |= flagOrdered
		}
		at, dict := place[Schema](w.mem, 1)
		out.Dictionary = at
		return w.field(&dict[0], arrow.Field{Type: t.ValueType, Nullable: true})
	case *arrow.MapType:
		if t.KeysSorted {
			out.Flags |= flagKeysSorted
		}
	}
	nested, ok := dt.(arrow.NestedType)
	if !ok {
		return nil
	}
	at, structs := placeAll[Schema](w.mem, nested.NumFields())
	out.Children, out.NChildren = at, int64(len(structs))
	for i, f := range nested.Fields() {
		if err := w.field(&structs[i], f); err != nil {
			return err
		}
	}
	return nil
}

// schemaReader reads structs from outside the engine.
type schemaReader struct {
	path    image.Path
	structs int64 // with those that are only announced, because room is made for all children at once
}

// record reads the schema of a record: a struct.
func (r *schemaReader) record(s *Schema) (_ *arrow.Schema, err error) {
	defer func() { // arrow-go panics on some types, and extensions are foreign code
		if p := recover(); p != nil {
			err = r.path.Invalid("a type that cannot be made: %v", p)
		}
	}()
	f, err := r.field(s)
	if err != nil {
		return nil, err
	}
	t, ok := f.Type.(*arrow.StructType)
	if !ok {
		return nil, unsupported(r.path, "a %s: a record is a struct", f.Type)
	}
	meta := f.Metadata
	return arrow.NewSchema(t.Fields(), &meta), nil
}

// field reads a struct and what it points to.
func (r *schemaReader) field(s *Schema) (f arrow.Field, err error) {
	if r.structs > maxStructs || len(r.path) > maxDepth {
		return f, r.path.Invalid("a schema of more than %d fields, or nested deeper than %d", maxStructs, maxDepth)
	}
	if s.Release == 0 {
		return f, r.path.Invalid("a schema that is released")
	}
	named, ok := true, false
	if s.Name != 0 {
		f.Name, named = textAt(s.Name)
	}
	r.path = append(r.path, fmt.Sprintf("%.100q", f.Name))
	text := ""
	if s.Format != 0 {
		text, ok = textAt(s.Format)
	}
	if !named || !ok {
		return f, r.path.Invalid("no format, or a name or format without an end")
	}
	if f.Metadata, err = metadata(r.path, s.Metadata); err != nil {
		return f, err
	}
	f.Nullable = s.Flags&flagNullable != 0
	var children []arrow.Field
	switch {
	case s.NChildren < 0 || s.NChildren > maxStructs-r.structs:
		return f, r.path.Invalid("%d children, with %d fields before them", s.NChildren, r.structs)
	case s.NChildren > 0 && s.Children == 0:
		return f, r.path.Invalid("%d children that are missing", s.NChildren)
	case s.NChildren > 0:
		r.structs += s.NChildren
		children = make([]arrow.Field, s.NChildren)
		for i, c := range several[uintptr](s.Children, s.NChildren) {
			if c == 0 {
				return f, r.path.Invalid("child %d is missing", i)
			}
			if children[i], err = r.field(at[Schema](c)); err != nil {
				return f, err
			}
		}
	}
	if f.Type, err = typeOf(r.path, text, s.Flags, children); err != nil {
		return f, err
	}
	if s.Dictionary != 0 {
		if !arrow.IsInteger(f.Type.ID()) {
			return f, r.path.Invalid("a dictionary under %s", f.Type)
		}
		r.structs++
		values, err := r.field(at[Schema](s.Dictionary))
		if err != nil {
			return f, err
		}
		f.Type = &arrow.DictionaryType{IndexType: f.Type, ValueType: values.Type, Ordered: s.Flags&flagOrdered != 0}
	}
	if f, err = r.extension(f); err == nil {
		r.path = r.path[:len(r.path)-1]
	}
	return f, err
}

// extension makes a field of a registered extension out of its storage. One that is not
// registered stays what it is stored as, with its metadata.
func (r *schemaReader) extension(f arrow.Field) (arrow.Field, error) {
	i := f.Metadata.FindKey(extensionName)
	if i < 0 {
		return f, nil
	}
	known := arrow.GetExtensionType(f.Metadata.Values()[i])
	if known == nil {
		return f, nil
	}
	data := ""
	if j := f.Metadata.FindKey(extensionData); j >= 0 {
		data = f.Metadata.Values()[j]
	}
	dt, err := known.Deserialize(f.Type, data)
	if err != nil {
		return f, r.path.Invalid("the extension %s: %v", known.ExtensionName(), err)
	}
	var keys, values []string
	for j, k := range f.Metadata.Keys() {
		if k != extensionName && k != extensionData {
			keys, values = append(keys, k), append(values, f.Metadata.Values()[j])
		}
	}
	f.Type, f.Metadata = dt, arrow.NewMetadata(keys, values)
	return f, nil
}

// unsupported returns an error for what the engine does not support in an array.
func unsupported(p image.Path, format string, args ...any) error {
	what := fmt.Sprintf(format, args...)
	if len(p) > 0 {
		what = strings.Join(p, ".") + ": " + what
	}
	return fmt.Errorf("cdevice: %w: %s", tier.ErrNotSupported, what)
}
