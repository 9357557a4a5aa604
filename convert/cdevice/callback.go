package cdevice

import (
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/ebitengine/purego"

	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/tier"
)

// callbacks are what C calls to release what was exported. purego has room for some thousand of
// such functions in a process, and never gives one back. So there are two, made at their first use,
// which find their export by the number in private_data.
var callbacks = sync.OnceValue(func() *releases {
	r := new(releases)
	r.array = purego.NewCallback(func(p uintptr) uintptr { r.release(p, arrayAt); return 0 })
	r.schema = purego.NewCallback(func(p uintptr) uintptr { r.release(p, schemaAt); return 0 })
	return r
})

// releases lists the exports that are not released, by their numbers. It is safe for concurrent
// use: C may release structs of one export on several threads.
//
// array and schema are the addresses of the callbacks. A number is not used again, so one in a
// stale struct finds nothing.
type releases struct {
	array, schema uintptr
	last          atomic.Uintptr
	out           sync.Map // of *exported
}

// exported is one export: the structs of a schema or of an array, each of which is released by
// itself, as consumers may move children out of their parent.
//
// Being made: only Export has it. left counts the structs that were written.
//
// Out: the outermost struct is the caller's, and the structs' memory is pinned. Callbacks lower
// left, on any thread; all else is only read.
//
// Ended: left is 0. The last callback frees the memory of the structs and calls done, with no lock
// held.
type exported struct {
	memory
	id   uintptr
	left atomic.Int64 // structs that are not released
	done func()       // may be nil

	// Of an array: the memory that stays charged in space until done; see releases.charged.
	space  *tier.Space
	ranges []payload.DeviceRange
}

func (r *releases) add(e *exported) {
	e.id = r.last.Add(1)
	r.out.Store(e.id, e)
}

// drop forgets an export and frees its structs, which C must not use any more.
func (r *releases) drop(e *exported) {
	r.out.Delete(e.id)
	e.free()
}

// charged returns the memory that an array's export keeps charged in space until its release, or
// nil if the array is not ours or comes from another space. A struct that a consumer has moved is
// still ours, because its callback and its number are.
func (r *releases) charged(a *Array, space *tier.Space) []payload.DeviceRange {
	found, _ := r.out.Load(a.PrivateData)
	if e, ok := found.(*exported); ok && a.Release == r.array && e.space == space {
		return e.ranges
	}
	return nil
}

// tree is what the two structs have in common: what a release has to look at.
type tree struct {
	children, dictionary uintptr
	n                    int64
	private              uintptr
	release              *uintptr
}

// arrayAt and schemaAt read the struct at p, which is C's memory or that of an export. The result
// has a pointer into it.
func arrayAt(p uintptr) tree {
	a := at[Array](p)
	return tree{a.Children, a.Dictionary, a.NChildren, a.PrivateData, &a.Release}
}

func schemaAt(p uintptr) tree {
	s := at[Schema](p)
	return tree{s.Children, s.Dictionary, s.NChildren, s.PrivateData, &s.Release}
}

// release is the release callback for the struct at p, which read reads. It does nothing if p is 0
// or the struct is released. As the interface demands, it releases the children and the dictionary
// first, unless they were moved out of the struct, and marks the struct as released. The last
// release of an export frees everything, on this thread.
func (r *releases) release(p uintptr, read func(p uintptr) tree) {
	if p == 0 || *read(p).release == 0 {
		return
	}
	// A child that a consumer has moved has a release of 0 here; one that a consumer has put in its
	// place has the consumer's callback.
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

// call calls a release callback for the struct at p, ours or another library's; 0 means that the
// struct is released already.
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

// Release calls the array's release callback, if it is not released. For an export that closes the
// batch's handle, if all children are released too. The memory must not be used any more.
func (a *DeviceArray) Release() {
	callbacks().call(addressOf(&a.Array), a.Array.Release)
	runtime.KeepAlive(a)
}

// Close calls the schema's release callback, if it is not released.
func (s *Schema) Close() {
	callbacks().call(addressOf(s), s.Release)
	runtime.KeepAlive(s)
}
