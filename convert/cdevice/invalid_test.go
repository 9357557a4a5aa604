package cdevice

import (
	"errors"
	"runtime"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/tier"
)

// broken is what a test may break: the structs of a record of a string, a list and a
// dictionary.
type broken struct {
	a       *DeviceArray
	s       *Schema
	columns []*Array
	fields  []*Schema
	mem     *memory
	t       *testing.T
}

func (b *broken) text(s string) uintptr { return b.mem.text(s) }

func (b *broken) pointers(n int) (uintptr, []uintptr) { return place[uintptr](b.mem, n) }

// Whatever is wrong is a typed error, nothing crashes, and what was not imported stays the
// caller's.
func TestImportRefusesNonsense(t *testing.T) {
	r := newRig(t, nil)
	rec := arrowgen.New(4).Record(arrowgen.Schema(arrow.BinaryTypes.String, arrow.ListOf(arrow.PrimitiveTypes.Int32),
		&arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int8, ValueType: arrow.BinaryTypes.String}, arrow.BinaryTypes.StringView), 60)
	defer rec.Release()
	held := r.put(t, rec, batch.PlainImage)
	defer r.drop(t, held)
	for name, c := range map[string]struct {
		do   func(*broken)
		want error
	}{
		"a released array":       {func(b *broken) { b.a.Array.Release = 0 }, tier.ErrReleased},
		"a released schema":      {func(b *broken) { b.s.Release = 0 }, tier.ErrReleased},
		"a released column":      {func(b *broken) { b.columns[0].Release = 0 }, convert.ErrInvalid},
		"a released field":       {func(b *broken) { b.fields[0].Release = 0 }, convert.ErrInvalid},
		"another type of device": {func(b *broken) { b.a.DeviceType = CUDA }, convert.ErrInvalid},
		"an event":               {func(b *broken) { b.a.SyncEvent = 8 }, tier.ErrNotSupported},
		"a negative length":      {func(b *broken) { b.a.Array.Length = -1 }, convert.ErrInvalid},
		"more rows":              {func(b *broken) { b.a.Array.Length = 61 }, convert.ErrInvalid},
		"an offset":              {func(b *broken) { b.a.Array.Offset = 1 }, convert.ErrInvalid},
		"nulls":                  {func(b *broken) { b.a.Array.NullCount = 1 }, tier.ErrNotSupported},
		"a validity": {func(b *broken) {
			at, to := b.pointers(1)
			to[0] = several[uintptr](b.columns[0].Buffers, 3)[0]
			b.a.Array.Buffers, b.a.Array.NullCount = at, convert.Unknown
		}, tier.ErrNotSupported},
		"two buffers": {func(b *broken) {
			b.a.Array.Buffers, _ = b.pointers(2)
			b.a.Array.NBuffers = 2
		}, convert.ErrInvalid},
		"a negative offset":      {func(b *broken) { b.columns[1].Offset = -1 }, convert.ErrInvalid},
		"a huge length":          {func(b *broken) { b.columns[1].Length = 1 << 62 }, convert.ErrInvalid},
		"a huge offset":          {func(b *broken) { b.columns[1].Offset = 1 << 62 }, convert.ErrInvalid},
		"far away":               {func(b *broken) { b.columns[1].Offset = 1 << 40 }, errAny},
		"too many nulls":         {func(b *broken) { b.columns[0].NullCount = 61 }, convert.ErrInvalid},
		"fewer nulls than none":  {func(b *broken) { b.columns[0].NullCount = -2 }, convert.ErrInvalid},
		"nulls without validity": {func(b *broken) { several[uintptr](b.columns[0].Buffers, 3)[0] = 0 }, convert.ErrInvalid},
		"no offsets":             {func(b *broken) { several[uintptr](b.columns[0].Buffers, 3)[1] = 0 }, convert.ErrInvalid},
		"no characters":          {func(b *broken) { several[uintptr](b.columns[0].Buffers, 3)[2] = 0 }, convert.ErrInvalid},
		"no pointers to buffers": {func(b *broken) { b.columns[0].Buffers = 0 }, convert.ErrInvalid},
		"a buffer too few":       {func(b *broken) { b.columns[0].NBuffers = 2 }, convert.ErrInvalid},
		"negative buffers":       {func(b *broken) { b.columns[0].NBuffers = -1 }, convert.ErrInvalid},
		"memory of another":      {func(b *broken) { several[uintptr](b.columns[0].Buffers, 3)[1] = b.text("elsewhere") }, convert.ErrInvalid},
		"a column too few":       {func(b *broken) { b.a.Array.NChildren-- }, convert.ErrInvalid},
		"negative children":      {func(b *broken) { b.a.Array.NChildren = -1 }, convert.ErrInvalid},
		"no pointers to columns": {func(b *broken) { b.a.Array.Children = 0 }, convert.ErrInvalid},
		"a missing column":       {func(b *broken) { several[uintptr](b.a.Array.Children, 1)[0] = 0 }, convert.ErrInvalid},
		"no dictionary":          {func(b *broken) { b.columns[2].Dictionary = 0 }, convert.ErrInvalid},
		"a dictionary":           {func(b *broken) { b.columns[0].Dictionary = b.columns[2].Dictionary }, convert.ErrInvalid},
		"views without lengths":  {func(b *broken) { b.columns[3].NBuffers = 2 }, convert.ErrInvalid},
		"negative lengths": {func(b *broken) {
			bufs := several[uintptr](b.columns[3].Buffers, b.columns[3].NBuffers)
			*at[int64](bufs[len(bufs)-1]) = -5
		}, convert.ErrInvalid},

		"no format":                 {func(b *broken) { b.fields[0].Format = 0 }, convert.ErrInvalid},
		"an empty format":           {func(b *broken) { b.fields[0].Format = b.text("") }, tier.ErrNotSupported},
		"a format of the future":    {func(b *broken) { b.fields[0].Format = b.text("q") }, tier.ErrNotSupported},
		"a nested one":              {func(b *broken) { b.fields[1].Format = b.text("+q") }, tier.ErrNotSupported},
		"a wide decimal":            {func(b *broken) { b.fields[0].Format = b.text("d:3,1,512") }, tier.ErrNotSupported},
		"a decimal too long":        {func(b *broken) { b.fields[0].Format = b.text("d:39,1") }, convert.ErrInvalid},
		"a decimal without scale":   {func(b *broken) { b.fields[0].Format = b.text("d:3") }, convert.ErrInvalid},
		"a width that is no number": {func(b *broken) { b.fields[0].Format = b.text("w:x") }, convert.ErrInvalid},
		"a negative width":          {func(b *broken) { b.fields[0].Format = b.text("w:-4") }, convert.ErrInvalid},
		"a list of none":            {func(b *broken) { b.fields[1].Format = b.text("+w:0") }, convert.ErrInvalid},
		"a map of no pairs":         {func(b *broken) { b.fields[1].Format = b.text("+m") }, convert.ErrInvalid},
		"runs without values":       {func(b *broken) { b.fields[1].Format = b.text("+r") }, convert.ErrInvalid},
		"codes without children":    {func(b *broken) { b.fields[1].Format = b.text("+ud:1,2") }, convert.ErrInvalid},
		"a negative code":           {func(b *broken) { b.fields[1].Format = b.text("+us:-1") }, convert.ErrInvalid},
		"a list without child":      {func(b *broken) { b.fields[1].NChildren = 0 }, convert.ErrInvalid},
		"a child of a string":       {func(b *broken) { b.fields[1].Format = b.text("u") }, convert.ErrInvalid},
		"a missing field":           {func(b *broken) { several[uintptr](b.s.Children, 1)[0] = 0 }, convert.ErrInvalid},
		"a column for a record":     {func(b *broken) { b.s.Format = b.text("i"); b.s.NChildren = 0 }, tier.ErrNotSupported},
		"a dictionary under text":   {func(b *broken) { b.fields[0].Dictionary = b.fields[2].Dictionary }, convert.ErrInvalid},
		"negative metadata":         {func(b *broken) { b.fields[0].Metadata = b.text("\xff\xff\xff\xff") }, convert.ErrInvalid},
		"huge metadata":             {func(b *broken) { b.fields[0].Metadata = b.text("\x01\x00\x00\x00\xff\xff\xff\x7f") }, convert.ErrInvalid},
		"another type than it has":  {func(b *broken) { b.fields[0].Format = b.text("l") }, convert.ErrInvalid},
		"a bomb": {func(b *broken) {
			p, to := b.pointers(1)
			to[0] = several[uintptr](b.s.Children, 2)[1]
			b.fields[1].Children = p
		}, convert.ErrInvalid},
		"a wide bomb": {func(b *broken) {
			p, to := b.pointers(100)
			for i := range to {
				to[i] = several[uintptr](b.s.Children, 2)[1]
			}
			b.fields[1].Format, b.fields[1].Children, b.fields[1].NChildren = b.text("+s"), p, 100
		}, convert.ErrInvalid},
		"a bomb of dictionaries": {func(b *broken) { b.fields[2].Dictionary = several[uintptr](b.s.Children, 3)[2] }, convert.ErrInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			a, s := r.export(t, held, Config{})
			b := &broken{a: a, s: s, mem: new(memory), t: t}
			defer b.mem.free()
			for i := range rec.NumCols() {
				b.columns = append(b.columns, at[Array](several[uintptr](a.Array.Children, 4)[i]))
				b.fields = append(b.fields, at[Schema](several[uintptr](s.Children, 4)[i]))
			}
			wholeA, wholeS := *a, *s
			columns, fields, firstA, firstS := make([]Array, 4), make([]Schema, 4), several[uintptr](a.Array.Children, 1)[0], several[uintptr](s.Children, 1)[0]
			for i := range 4 {
				columns[i], fields[i] = *b.columns[i], *b.fields[i]
			}
			c.do(b)
			table, err := Import(t.Context(), r.mover, r.gpu, a, s, Config{})
			if err == nil {
				t.Errorf("imported %d bytes", table.Bytes())
				_ = table.Release()
				return
			}
			*a, *s = wholeA, wholeS
			for i := range 4 {
				*b.columns[i], *b.fields[i] = columns[i], fields[i]
			}
			several[uintptr](a.Array.Children, 1)[0], several[uintptr](s.Children, 1)[0] = firstA, firstS
			if c.want != errAny && !errors.Is(err, c.want) {
				t.Errorf("%v, want %v", err, c.want)
			}
			if held.Info().State != batch.Processing {
				t.Error("what was not imported was released")
			}
			a.Release()
			s.Close()
			if held.Info().State != batch.Idle {
				t.Errorf("the batch is %s", held.Info().State)
			}
		})
	}
}

// What a few structs announce, again and again, is not believed: no room is made for it.
func TestImportOfMuchFromLittle(t *testing.T) {
	r := newRig(t, nil)
	rec := arrowgen.New(4).Record(arrowgen.Schema(arrow.StructOf(), arrow.BinaryTypes.StringView), 20)
	defer rec.Release()
	held := r.put(t, rec, batch.PlainImage)
	defer r.drop(t, held)
	for name, do := range map[string]func(*broken){
		"fields in fields": func(b *broken) {
			p, to := b.pointers(maxStructs)
			for i := range to {
				to[i] = addressOf(b.fields[0])
			}
			b.fields[0].Children, b.fields[0].NChildren = p, maxStructs
		},
		"fields side by side": func(b *broken) {
			const columns, children = 1000, 4000
			leaf, one := place[Schema](b.mem, 1)
			one[0] = Schema{Format: b.text("n"), Release: 1}
			p, to := b.pointers(children)
			for i := range to {
				to[i] = leaf
			}
			b.fields[0].Children, b.fields[0].NChildren = p, children
			fields, of := b.pointers(columns)
			for i := range of {
				of[i] = addressOf(b.fields[0])
			}
			b.s.Children, b.s.NChildren = fields, columns
		},
		"buffers": func(b *broken) {
			p, _ := b.pointers(maxStructs)
			const columns = 1000
			arrays, to := b.pointers(columns)
			fields, of := b.pointers(columns)
			for i := range columns {
				to[i], of[i] = addressOf(b.columns[0]), addressOf(b.fields[0])
			}
			b.columns[0].Buffers, b.columns[0].NBuffers = p, maxStructs
			b.a.Array.Children, b.a.Array.NChildren, b.s.Children, b.s.NChildren = arrays, columns, fields, columns
		},
	} {
		a, s := r.export(t, held, Config{})
		column, field := at[Array](several[uintptr](a.Array.Children, 1)[0]), at[Schema](several[uintptr](s.Children, 1)[0])
		b := &broken{a: a, s: s, columns: []*Array{column}, fields: []*Schema{field}, mem: new(memory), t: t}
		wholeA, wholeS, wholeColumn, wholeField := *a, *s, *column, *field
		do(b)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := Import(t.Context(), r.mover, r.gpu, a, s, Config{})
		runtime.ReadMemStats(&after)
		if !errors.Is(err, convert.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
		if n := after.TotalAlloc - before.TotalAlloc; n > 512<<20 {
			t.Errorf("%s: %d bytes were allocated", name, n)
		}
		*a, *s, *column, *field = wholeA, wholeS, wholeColumn, wholeField
		a.Release()
		s.Close()
		b.mem.free()
	}
}

// errAny represents an error of the device's, whose type is the backend's.
var errAny = errors.New("any")
