package cdevice

import (
	"sync"
	"sync/atomic"

	"github.com/ebitengine/purego"

	"github.com/spillway-db/spillway/internal/lockrank"
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

// releases lists what was exported and is not released.
type releases struct {
	array, schema uintptr

	mu struct {
		lockrank.Mutex[lockrank.Device]
		last uintptr
		out  map[uintptr]*exported
	}
}

// exported is one export: the structs of a tree, each of which is released by itself.
type exported struct {
	mem    *memory
	left   atomic.Int64 // structs that are not released
	done   func()       // may be nil
	space  *tier.Space  // of an array: in which these are charged until done
	ranges []payload.DeviceRange
}

func (r *releases) add(e *exported) uintptr {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.out == nil {
		r.mu.out = make(map[uintptr]*exported)
	}
	r.mu.last++
	r.mu.out[r.mu.last] = e
	return r.mu.last
}

func (r *releases) find(id uintptr) *exported {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.mu.out[id]
}

// charged returns what of an array's memory is charged in space until the array is released, as it
// is an export from there.
func (r *releases) charged(a *Array, space *tier.Space) []payload.DeviceRange {
	if a.Release != r.array {
		return nil
	}
	if e := r.find(a.PrivateData); e != nil && e.space == space {
		return e.ranges
	}
	return nil
}

// end counts a struct as released.
func (r *releases) end(id uintptr) {
	e := r.find(id)
	if e == nil || e.left.Add(-1) != 0 {
		return
	}
	r.mu.Lock()
	delete(r.mu.out, id)
	r.mu.Unlock()
	e.mem.free()
	if e.done != nil {
		e.done()
	}
}

// open returns how many exports are not released.
func (r *releases) open() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.mu.out)
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
	r.end(t.private)
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
func (a *DeviceArray) Release() { callbacks().call(addressOf(&a.Array), a.Array.Release) }

// Close calls the schema's release callback, if it is not released.
func (s *Schema) Close() { callbacks().call(addressOf(s), s.Release) }
