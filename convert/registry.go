package convert

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"syscall"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// Func makes a payload of one form out of another. It draws the target's memory
// from r, and takes nothing else; src stays as it is, whatever happens, and the
// new payload belongs to the caller. It acts on ctx within one chunk. On an error it
// has released all that it drew, and no device or disk works on it any more.
type Func func(ctx context.Context, src batch.Payload, r *reservation.Reservation) (batch.Payload, error)

// Form is what converters are registered for: a type of payload in a tier.
type Form struct {
	Type batch.PayloadType
	Kind tier.Kind
}

// ImageIn returns the form of a plain image in a tier.
func ImageIn(k tier.Kind) Form { return Form{batch.PlainImage, k} }

// String returns the form as "image in gpu".
func (f Form) String() string { return fmt.Sprintf("%s in %s", f.Type, f.Kind) }

// Edge is a pair of forms for which a converter is registered.
type Edge struct{ From, To Form }

// ErrNoConverter matches every *NoConverterError.
var ErrNoConverter = errors.New("no converter")

// NoConverterError reports that no converter is registered for a pair of forms.
type NoConverterError struct{ From, To Form }

func (e *NoConverterError) Error() string {
	const text = "convert: no converter from %s to %s is registered: add one with Registry.Register"
	return fmt.Sprintf(text, e.From, e.To)
}

// Is matches ErrNoConverter.
func (e *NoConverterError) Is(target error) bool { return target == ErrNoConverter }

// Registry holds the converters, keyed by the forms of source and target. The zero value is empty
// and ready. It is safe for concurrent use; its lock is not held while a converter runs.
type Registry struct {
	mu struct {
		lockrank.Mutex[lockrank.Registry]
		table   map[Edge]*entry
		changes uint64
	}
}

// entry is a converter. It does not change.
type entry struct {
	convert Func // guarded
	builtin bool // it is Spillway's own, or wraps one
	wrapped bool // it wraps one
}

// Register adds a converter. A pair that has one already is an error.
func (g *Registry) Register(from, to Form, f Func) error {
	if f == nil || from.Type == "" || to.Type == "" || !from.Kind.Valid() || !to.Kind.Valid() {
		return fmt.Errorf("convert: registering %q to %q needs two types, two tiers and a function", from, to)
	}
	e := Edge{from, to}
	return g.replace(e, nil, &entry{convert: e.guarded(f, false)})
}

// replace puts e in the place of old, which must be the pair's present converter. Either may be nil.
func (g *Registry) replace(at Edge, old, e *entry) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.mu.table[at] == old:
	case old == nil:
		return fmt.Errorf("convert: a converter from %s to %s is registered already", at.From, at.To)
	default:
		return fmt.Errorf("convert: the converter from %s to %s was replaced meanwhile", at.From, at.To)
	}
	if g.mu.table == nil {
		g.mu.table = make(map[Edge]*entry)
	}
	g.mu.table[at] = e
	if e == nil {
		delete(g.mu.table, at)
	}
	g.mu.changes++
	return nil
}

// Changes returns how often a converter was added or removed: what could not be converted
// before a change may be convertible after it.
func (g *Registry) Changes() uint64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.mu.changes
}

// Unregister removes a converter, so that another may be registered. Moves that
// are running with it go on.
func (g *Registry) Unregister(from, to Form) error {
	old := g.lookup(from, to)
	if old == nil {
		return missing(from, to)
	}
	return g.replace(Edge{from, to}, old, nil)
}

// Lookup returns the converter that is registered for a pair, so that another one may call it. It
// stays valid when the pair is registered again. Without one the error is a *NoConverterError.
func (g *Registry) Lookup(from, to Form) (Func, error) {
	e := g.lookup(from, to)
	if e == nil {
		return nil, missing(from, to)
	}
	return e.convert, nil
}

// Wrap puts the converter that wrapper returns in the place of the pair's own, which wrapper is
// given to call. Conversions that are running go on with the old one, and there is no moment
// without either. An error of the new one counts as the batch's own only if the old one's would, or
// if it is a *batch.UnmovableError. wrapper is called once, with no lock held, and must not return
// nil. Without a converter to wrap the error is a *NoConverterError; if the pair is registered again
// meanwhile, Wrap changes nothing and returns an error.
func (g *Registry) Wrap(from, to Form, wrapper func(inner Func) Func) error {
	old := g.lookup(from, to)
	if old == nil {
		return missing(from, to)
	}
	f := wrapper(old.convert)
	if f == nil {
		return fmt.Errorf("convert: wrapping %s to %s gave no function", from, to)
	}
	e := Edge{from, to}
	return g.replace(e, old, &entry{convert: e.guarded(f, old.builtin), builtin: old.builtin, wrapped: true})
}

// Edges lists the registered pairs, ordered by name.
func (g *Registry) Edges() []Edge {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.SortedFunc(maps.Keys(g.mu.table), func(a, b Edge) int {
		return cmp.Compare(fmt.Sprint(a), fmt.Sprint(b))
	})
}

// lookup returns the converter of a pair; nil if there is none.
func (g *Registry) lookup(from, to Form) *entry {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.mu.table[Edge{from, to}]
}

// missing returns the error of a batch for which there is no converter.
func missing(from, to Form) error { return &batch.UnmovableError{Err: &NoConverterError{from, to}} }

// guarded returns f with what all converters have in common. An image remembers the type of the
// program's payload that it was made of. A panic of f, or of a payload, is an error, and so is a payload
// that is none, is src itself, or is in another space than r; it is released. An error whose cause is
// the batch, and not memory, a volume or a device, is a *batch.UnmovableError.
func (e Edge) guarded(f Func, builtin bool) Func {
	what := fmt.Sprintf("convert: the converter from %s to %s", e.From, e.To)
	return func(ctx context.Context, src batch.Payload, r *reservation.Reservation) (out batch.Payload, err error) {
		lockrank.AssertNone("a converter runs")
		var from *tier.Space
		defer func() {
			if err == nil {
				return
			}
			if p, ok := err.(*guard.PanicError); ok && p.What == what || out != nil {
				err = &batch.UnmovableError{Err: err}
			} else {
				err = ofConverter(ctx, err, builtin, from, r.Space())
			}
			if out != nil && out != src {
				err = errors.Join(err, release(out))
			}
			out = nil
		}()
		defer guard.Error(&err, what)
		from = src.Space()
		switch out, err = f(ctx, src, r); {
		case err != nil:
		case out == nil:
			err = &batch.UnmovableError{Err: errors.New(what + " returned nothing")}
		case out == src:
			err = errors.New(what + " has made no copy")
		case out.Space() != r.Space():
			err = fmt.Errorf("%s made a payload that is not in %s", what, r.Space().ID())
		}
		if made, ok := out.(*batch.Image); ok && err == nil {
			if img, ok := src.(*batch.Image); ok {
				made.Parts.Program = img.Parts.Program
			} else {
				made.Parts.Program = src.Type()
			}
		}
		return out, err
	}
}

// ofConverter makes an error of a conversion an UnmovableError if the batch is the cause.
//
// A program's own converter fails because of the batch that it was given, unless other batches meet
// the error as well: the target has no room, a space is lost, or the conversion was cancelled. Its
// other errors may come from files and memory of the program's. The built-in converters also return
// any errors of devices, so only those that are known to be about the batch count.
func ofConverter(ctx context.Context, err error, builtin bool, from, to *tier.Space) error {
	is := func(targets ...error) bool {
		return slices.ContainsFunc(targets, func(target error) bool { return errors.Is(err, target) })
	}
	lost := func(s *tier.Space) bool { return s != nil && s.Lost() != nil }
	var own bool
	if builtin {
		own = is(image.ErrCorrupt, image.ErrInvalid, tier.ErrNotSupported) &&
			!is(tier.ErrNoSpace, tier.ErrLost, tier.ErrClosed) && !errors.As(err, new(syscall.Errno))
	} else {
		full, ok := errors.AsType[*tier.NoSpaceError](err)
		own = ctx.Err() == nil && !(ok && to != nil && full.Space == to.ID()) &&
			!(is(tier.ErrLost) && (lost(from) || lost(to)))
	}
	if own && !is(batch.ErrUnmovable) {
		return &batch.UnmovableError{Err: err}
	}
	return err
}

// descriptorOf returns a payload's description of its image; nil for a form without one.
func descriptorOf(p batch.Payload) *batch.Descriptor {
	if d, ok := p.(interface{ Descriptor() *batch.Descriptor }); ok {
		return d.Descriptor()
	}
	return nil
}

// release releases p. A panic of a program's payload is an error.
func release(p batch.Payload) (err error) {
	defer guard.Error(&err, "Payload.Release")
	return p.Release()
}
