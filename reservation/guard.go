package reservation

import "errors"

// refusal is what an Allocator panics with, so that Guard can tell its panics from
// all others.
type refusal struct{ error }

func (r *refusal) Unwrap() error { return r.error }

// Guard calls f and returns its error. If f panics because an Allocator could not
// give it memory, Guard returns that as an error: an *ExceededError, a
// *tier.NoSpaceError, or one that matches tier.ErrReleased or tier.ErrClosed. Every
// other panic goes on, and so does runtime.Goexit.
//
//	err := reservation.Guard(func() error {
//		rec = build(allocator) // arrow-go, which knows no errors here
//		return nil
//	})
//
// Where arrow-go itself makes a panic an error, as in array.Concatenate and in its
// readers and writers, that error wraps the same ones and is f's to return. A panic
// that is wrapped in an error on its way is found too, and returned as it is.
//
// Guards may be nested; the innermost has it. Only the goroutine that calls Guard is
// guarded: who starts others in f must guard those too, or the program ends.
//
// What f had built is not freed: builders keep the memory that they had before. See
// Allocator.
func Guard(f func() error) (err error) {
	defer func() {
		p := recover() // nil for Goexit, which goes on by itself
		if p == nil {
			return
		}
		e, ok := p.(error)
		var r *refusal
		if !ok || !errors.As(e, &r) {
			panic(p)
		}
		if err = e; e == error(r) {
			err = r.error
		}
	}()
	return f()
}
