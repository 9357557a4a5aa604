package convert

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime/debug"
	"slices"
	"syscall"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/transfer"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// Func makes a payload of one type out of another. It draws the target's memory
// from r, and takes nothing else; src stays as it is, whatever happens, and the
// new payload belongs to the caller. It acts on ctx within one chunk. On an error it
// has released all that it drew, and no device or disk works on it any more.
type Func func(ctx context.Context, src batch.Payload, r reservation.Reservation) (batch.Payload, error)

// Edge is a pair of payload types for which a converter is registered.
type Edge struct{ From, To batch.PayloadType }

// ErrNoConverter matches every *NoConverterError.
var ErrNoConverter = errors.New("no converter")

// NoConverterError reports that no converter is registered for a pair of types.
type NoConverterError struct{ From, To batch.PayloadType }

func (e *NoConverterError) Error() string {
	return fmt.Sprintf("convert: no converter from %s to %s is registered: add one with Registry.Register", e.From, e.To)
}

// Is matches ErrNoConverter.
func (e *NoConverterError) Is(target error) bool { return target == ErrNoConverter }

// Registry holds the converters, keyed by source and target type. The zero
// value is empty and ready. It is safe for concurrent use; its lock is not held
// while a converter runs.
type Registry struct {
	mu struct {
		lockrank.Mutex[lockrank.Registry]
		table   map[Edge]*entry
		changes uint64
	}
}

// entry is a converter. It does not change.
type entry struct {
	convert Func
	builtin bool // it is Spillway's own, or wraps one
	wrapped bool // it wraps one
}

// Register adds a converter. A pair that has one already is an error.
func (g *Registry) Register(from, to batch.PayloadType, f Func) error {
	if f == nil || from == "" || to == "" {
		return fmt.Errorf("convert: registering %q to %q needs both types and a function", from, to)
	}
	return g.add(Edge{from, to}, &entry{convert: f})
}

// registerBuiltin adds Spillway's own converters.
func (g *Registry) registerBuiltin(b *transfer.Builtin) error {
	add := func(
		from, to batch.PayloadType,
		f func(context.Context, batch.Payload, reservation.Reservation) (batch.Payload, error),
	) error {
		return g.add(Edge{from, to}, &entry{convert: f, builtin: true})
	}
	return b.Register(add)
}

// has reports whether there is a converter for a pair.
func (g *Registry) has(from, to batch.PayloadType) bool {
	_, err := g.lookup(from, to)
	return err == nil
}

// plain reports whether Spillway's own converter, without a wrapper, is used for a pair.
func (g *Registry) plain(from, to batch.PayloadType) bool {
	e, err := g.lookup(from, to)
	return err == nil && e.builtin && !e.wrapped
}

func (g *Registry) add(p Edge, e *entry) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if _, ok := g.mu.table[p]; ok {
		return fmt.Errorf("convert: a converter from %s to %s is registered already", p.From, p.To)
	}
	if g.mu.table == nil {
		g.mu.table = make(map[Edge]*entry)
	}
	g.mu.table[p] = e
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
func (g *Registry) Unregister(from, to batch.PayloadType) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if _, ok := g.mu.table[Edge{from, to}]; !ok {
		return &NoConverterError{from, to}
	}
	delete(g.mu.table, Edge{from, to})
	g.mu.changes++
	return nil
}

// Lookup returns the converter that is registered for a pair, so that another one may call it. It
// stays valid when the pair is registered again. Without one the error is a *NoConverterError.
func (g *Registry) Lookup(from, to batch.PayloadType) (Func, error) {
	e, err := g.lookup(from, to)
	if err != nil {
		return nil, err
	}
	return e.call, nil
}

// Wrap puts the converter that wrapper returns in the place of the pair's own, which wrapper is
// given to call. Conversions that are running go on with the old one, and there is no moment
// without either. An error of the new one counts as the batch's own only if the old one's would, or
// if it is a *batch.UnmovableError. wrapper is called once, with no lock held, and must not return
// nil. Without a converter to wrap the error is a *NoConverterError; if the pair is registered again
// meanwhile, Wrap changes nothing and returns an error.
func (g *Registry) Wrap(from, to batch.PayloadType, wrapper func(inner Func) Func) error {
	old, err := g.lookup(from, to)
	if err != nil {
		return err
	}
	f := wrapper(old.call)
	if f == nil {
		return fmt.Errorf("convert: wrapping %q to %q gave no function", from, to)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.mu.table[Edge{from, to}] != old {
		return fmt.Errorf("convert: the converter from %s to %s was replaced while it was being wrapped", from, to)
	}
	g.mu.table[Edge{from, to}] = &entry{convert: f, builtin: old.builtin, wrapped: true}
	g.mu.changes++
	return nil
}

// Edges lists what is registered, ordered by name.
func (g *Registry) Edges() []Edge {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.SortedFunc(maps.Keys(g.mu.table), func(a, b Edge) int {
		return cmp.Or(cmp.Compare(a.From, b.From), cmp.Compare(a.To, b.To))
	})
}

func (g *Registry) lookup(from, to batch.PayloadType) (*entry, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	e, ok := g.mu.table[Edge{from, to}]
	if !ok {
		return nil, &batch.UnmovableError{Err: &NoConverterError{from, to}}
	}
	return e, nil
}

// convert makes a payload of type to out of src, drawn from r. A panic of a converter is an error.
// An error whose cause is the batch, and not memory, a volume or a device, is a
// *batch.UnmovableError.
func (g *Registry) convert(
	ctx context.Context, src batch.Payload, to batch.PayloadType, r reservation.Reservation,
) (batch.Payload, error) {
	e, err := g.lookup(src.Type(), to)
	if err != nil {
		return nil, err
	}
	return e.call(ctx, src, r)
}

// call runs a converter and makes its panic, or one of src's, an error. The converter may be one that
// is not registered any more.
func (e *entry) call(ctx context.Context, src batch.Payload, r reservation.Reservation) (out batch.Payload, err error) {
	lockrank.AssertNone("a converter runs")
	var from batch.PayloadType
	defer func() {
		if p := recover(); p != nil {
			if v, ok := p.(lockrank.Violation); ok {
				panic(v)
			}
			err = fmt.Errorf("convert: %s to %s panicked: %v\n%s", from, r.Space().ID(), p, debug.Stack())
			out, err = nil, &batch.UnmovableError{Err: err}
		}
	}()
	from = src.Type()
	out, err = e.convert(ctx, src, r)
	switch {
	case err != nil:
		return out, ofConverter(ctx, err, e.builtin, src.Space(), r.Space())
	case out == nil:
		err = fmt.Errorf("convert: the converter from %s to %s returned nothing", from, r.Space().ID())
		return nil, &batch.UnmovableError{Err: err}
	}
	return out, nil
}

// descriptorOf returns a payload's description of its image; nil for a form without one.
func descriptorOf(p batch.Payload) *batch.Descriptor {
	if d, ok := p.(interface{ Descriptor() *batch.Descriptor }); ok {
		return d.Descriptor()
	}
	return nil
}

// ofMachine reports whether an error of a built-in converter is about memory, a volume or a device:
// other batches meet it as well.
func ofMachine(err error) bool {
	var system syscall.Errno
	return errors.Is(err, tier.ErrNoSpace) || errors.Is(err, tier.ErrLost) || errors.Is(err, tier.ErrClosed) ||
		errors.As(err, &system)
}

// meets reports whether an error of a program's own converter, from one space to another, is what
// other batches meet as well: the target has no room, a space is lost, or the conversion was
// broken off. Other errors may come from files and memory of the program's.
func meets(ctx context.Context, err error, from, to *tier.Space) bool {
	var full *tier.NoSpaceError
	return ctx.Err() != nil || errors.As(err, &full) && to != nil && full.Space == to.ID() ||
		errors.Is(err, tier.ErrLost) && (isLost(from) || isLost(to))
}

func isLost(s *tier.Space) bool { return s != nil && s.Lost() != nil }

// ofConverter makes an error of a conversion an UnmovableError if the batch is the cause.
// What a program's own converter returns is about the batch that it was given, unless others
// meet it as well. The built-in converters also return the errors of devices, which may be
// any; so there only errors that are known to be about the batch count.
func ofConverter(ctx context.Context, err error, builtin bool, from, to *tier.Space) error {
	if err == nil || errors.Is(err, batch.ErrUnmovable) {
		return err
	}
	own := !builtin && !meets(ctx, err, from, to)
	for _, known := range [...]error{ErrNoConverter, image.ErrCorrupt, image.ErrInvalid, tier.ErrNotSupported} {
		own = own || builtin && !ofMachine(err) && errors.Is(err, known)
	}
	if own {
		return &batch.UnmovableError{Err: err}
	}
	return err
}
