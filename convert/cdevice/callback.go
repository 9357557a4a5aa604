package cdevice

import (
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/ebitengine/purego"

	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/tier"
)

// callbacks are what C calls to release what was exported. A process has room for some thousand of
// such functions and never gives one back. So there are two, made at their first use, which find
// their export by the number in private_data.
var callbacks = sync.OnceValue(func() *releases {
	r := new(releases)
	r.array = purego.NewCallback(func(p uintptr) uintptr { r.release(p, arrayAt); return 0 })
	r.schema = purego.NewCallback(func(p uintptr) uintptr { r.release(p, schemaAt); return 0 })
	return r
})

// releases lists the exports that are not released, by their numbers. It is safe for concurrent
// use: C may release structs of one export on several threads.
type releases struct {
	array, schema uintptr
	last          atomic.Uintptr
	out           sync.Map // of *exported
}

// exported is one export: a tree of structs, each of which is released by itself. The last release
// frees the memory of the structs and calls done.
//
// Export alone uses it until the structs are the caller's. From then on only left changes.
type exported struct {
	memory
	id   uintptr
	left atomic.Int64 // structs that are not released
	done func()       // may be nil

	// Of an array: the memory that stays charged in space until done.
	space  *tier.Space
	ranges []payload.DeviceRange
}

func (r *releases) add(e *exported) {
	e.id = r.last.Add(1)
	r.out.Store(e.id, e)
}

// drop forgets an export and frees its structs.
func (r *releases) drop(e *exported) {
	r.out.Delete(e.id)
	e.free()
}

// charged returns the memory that stays charged in space until the array is released, if it is an
// export from there.
func (r *releases) charged(a *Array, space *tier.Space) []payload.DeviceRange {
	found, _ := r.out.Load(a.PrivateData)
	if e, ok := found.(*exported); ok && a.Release == r.array && e.space == space {
		return e.ranges
	}
	return nil
}

// tree is what the two structs have in common.
type tree struct {
	children, dictionary uintptr
	n                    int64
	private              uintptr
	release              *uintptr
}

func arrayAt(p uintptr) tree {
	a := at[Array](p)
	return tree{a.Children, a.Dictionary, a.NChildren, a.PrivateData, &a.Release}
}

func schemaAt(p uintptr) tree {
	s := at[Schema](p)
	return tree{s.Children, s.Dictionary, s.NChildren, s.PrivateData, &s.Release}
}

// release releases the struct at p, which read reads, unless it is 0 or released. Its children and its
// dictionary are released first, unless they were moved elsewhere.
func (r *releases) release(p uintptr, read func(p uintptr) tree) {
	if p == 0 || *read(p).release == 0 {
		return
	}
	t := read(p)
	if t.children != 0 {
		for _, c := range several[uintptr](t.children, t.n) {
			r.call(c, *read(c).release)
		}
	}
	if t.dictionary != 0 {
		r.call(t.dictionary, *read(t.dictionary).release)
	}
	*t.release = 0
	found, _ := r.out.Load(t.private)
	if e, ok := found.(*exported); ok && e.left.Add(-1) == 0 {
		r.drop(e)
		if e.done != nil {
			e.done()
		}
	}
}

// call calls a release callback, ours or another library's.
func (r *releases) call(p, callback uintptr) {
	switch callback {
	case 0:
	case r.array: // a way through C would only cost
		r.release(p, arrayAt)
	case r.schema:
		r.release(p, schemaAt)
	default:
		_, _, _ = purego.SyscallN(callback, p)
	}
}

// Release calls the array's release callback, if it is not released. The memory that the
// callback frees must not be used any more.
func (a *DeviceArray) Release() {
	callbacks().call(addressOf(&a.Array), a.Array.Release)
	runtime.KeepAlive(a)
}

// Close calls the schema's release callback, if it is not released.
func (s *Schema) Close() {
	callbacks().call(addressOf(s), s.Release)
	runtime.KeepAlive(s)
}
