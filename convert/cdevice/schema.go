package cdevice

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/tier"
)

// The keys of the metadata in which fields keep their extension type, as in the columnar format.
const (
	extensionName = "ARROW:extension:name"
	extensionData = "ARROW:extension:metadata"
)

// The largest trees that are read: more is a mistake, or an attack. Without limits a struct could
// point to itself, and the walk would not end.
const (
	maxDepth    = 64
	maxStructs  = 1 << 20
	maxBuffers  = 4 * maxStructs // in all structs of an array
	maxMetadata = 64 << 20       // bytes of a field
)

// schemaWriter writes the structs of a schema into the memory of an export.
type schemaWriter struct {
	*exported
	path image.Path
}

// field fills out with the struct of f and all below it. out is in the export's memory, or is the
// outermost struct, which the caller copies. An extension is written as its storage, with its name
// and parameters as metadata. A type without a format is tier.ErrNotSupported.
func (w *schemaWriter) field(out *Schema, f arrow.Field) error {
	w.path = append(w.path, f.Name)
	defer func() { w.path = w.path[:len(w.path)-1] }()
	dt, keys, values := f.Type, f.Metadata.Keys(), f.Metadata.Values()
	if e, ok := dt.(arrow.ExtensionType); ok {
		// A program may have left these keys in the metadata of a field with the extension's type.
		if f.Metadata.FindKey(extensionName) < 0 {
			keys = append(slices.Clone(keys), extensionName, extensionData)
			values = append(slices.Clone(values), e.ExtensionName(), e.Serialize())
		}
		dt = e.StorageType()
	}
	text, ok := format(dt)
	if !ok { // of an extension of an extension, too
		return unsupported(w.path, "the type %s", dt)
	}
	// Each struct that is filled in is released by itself.
	w.left.Add(1)
	out.Format, out.Name, out.Metadata = w.text(text), w.text(f.Name), w.put(encoded(keys, values))
	out.Release, out.PrivateData = callbacks().schema, w.id
	if f.Nullable {
		out.Flags |= flagNullable
	}
	switch t := dt.(type) {
	case *arrow.DictionaryType:
		if t.Ordered {
			out.Flags |= flagOrdered
		}
		at, dict := place[Schema](&w.memory, 1)
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
	at, structs := placeAll[Schema](&w.memory, nested.NumFields())
	out.Children, out.NChildren = at, int64(len(structs))
	for i, f := range nested.Fields() {
		if err := w.field(&structs[i], f); err != nil {
			return err
		}
	}
	return nil
}

// encoded returns metadata as the C data interface has it: the number of pairs, and then each key
// and value behind its length. All numbers are 32 bits in the machine's byte order. It returns nil
// for no pairs.
func encoded(keys, values []string) []byte {
	if len(keys) == 0 {
		return nil
	}
	b := binary.NativeEndian.AppendUint32(nil, uint32(len(keys)))
	for i, k := range keys {
		for _, s := range []string{k, values[i]} {
			b = append(binary.NativeEndian.AppendUint32(b, uint32(len(s))), s...)
		}
	}
	return b
}

// schemaReader reads the structs of a schema from outside the engine, with limits on how many there
// may be. It copies all text.
type schemaReader struct {
	path    image.Path
	structs int64 // with those that are only announced, because room is made for all children at once
}

// record reads the schema of a record, which is a struct. The struct's metadata is the schema's.
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
	return arrow.NewSchema(t.Fields(), &f.Metadata), nil
}

// field reads the struct of a field, which may be nil, and what it points to. A field of a
// registered extension has the extension's type, and its metadata lacks the keys for it. One that
// is not registered has its storage type and all its metadata.
func (r *schemaReader) field(s *Schema) (f arrow.Field, err error) {
	switch {
	case r.structs > maxStructs || len(r.path) > maxDepth:
		return f, r.path.Invalid("a schema of more than %d fields, or nested deeper than %d", maxStructs, maxDepth)
	case s == nil:
		return f, r.path.Invalid("a field is missing")
	case s.Release == 0:
		return f, r.path.Invalid("a schema that is released")
	case s.NChildren < 0 || s.NChildren > maxStructs-r.structs || s.NChildren > 0 && s.Children == 0:
		return f, r.path.Invalid("%d children at %#x, with %d fields before them", s.NChildren, s.Children, r.structs)
	}
	f.Nullable = s.Flags&flagNullable != 0
	if s.Name != 0 {
		f.Name = textAt(s.Name)
	}
	// Names come from outside, so a long one is cut and control characters are quoted.
	r.path = append(r.path, fmt.Sprintf("%.100q", f.Name))
	if s.Format == 0 {
		return f, r.path.Invalid("a schema without a format")
	}
	if f.Metadata, err = r.metadata(s.Metadata); err != nil {
		return f, err
	}
	// All children count before they are read, because room is made for all at once.
	r.structs += s.NChildren
	children := make([]arrow.Field, s.NChildren)
	for i, c := range several[uintptr](s.Children, s.NChildren) {
		if children[i], err = r.field(at[Schema](c)); err != nil {
			return f, err
		}
	}
	if f.Type, err = typeOf(r.path, textAt(s.Format), s.Flags, children); err != nil {
		return f, err
	}
	if s.Dictionary != 0 {
		// The format of the struct is that of the indices.
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
	name, _ := f.Metadata.GetValue(extensionName)
	if known := arrow.GetExtensionType(name); known != nil {
		data, _ := f.Metadata.GetValue(extensionData)
		if f.Type, err = known.Deserialize(f.Type, data); err != nil {
			return f, r.path.Invalid("the extension %s: %v", name, err)
		}
		var keys, values []string
		for i, k := range f.Metadata.Keys() {
			if k != extensionName && k != extensionData {
				keys, values = append(keys, k), append(values, f.Metadata.Values()[i])
			}
		}
		f.Metadata = arrow.NewMetadata(keys, values)
	}
	r.path = r.path[:len(r.path)-1]
	return f, nil
}

// metadata reads what encoded writes, at p; no metadata if p is 0. Lengths are checked one by one,
// because the total is nowhere.
func (r *schemaReader) metadata(p uintptr) (m arrow.Metadata, err error) {
	if p == 0 {
		return m, nil
	}
	number := func(at int64) int64 { return int64(int32(binary.NativeEndian.Uint32(several[byte](p+uintptr(at), 4)))) }
	pairs, end := number(0), int64(4)
	if pairs < 0 {
		return m, r.path.Invalid("metadata of %d pairs", pairs)
	}
	texts := [2][]string{} // keys and values
	// Each text takes at least 4 bytes for its length, so the limit of bytes also ends a wrong
	// number of pairs.
	for i := range 2 * pairs {
		n := number(end)
		if end += 4; n < 0 || end+n > maxMetadata {
			return m, r.path.Invalid("metadata of %d bytes and more", end)
		}
		texts[i%2] = append(texts[i%2], string(several[byte](p+uintptr(end), n)))
		end += n
	}
	return arrow.NewMetadata(texts[0], texts[1]), nil
}

// unsupported returns an error for what the engine does not support in an array.
func unsupported(p image.Path, format string, args ...any) error {
	what := fmt.Sprintf(format, args...)
	if len(p) > 0 {
		what = strings.Join(p, ".") + ": " + what
	}
	return fmt.Errorf("cdevice: %w: %s", tier.ErrNotSupported, what)
}
