package convert

import (
	"fmt"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/lockrank"
)

// safely makes a panic of a device or a layout an error, so that what is under way
// is waited for and what was taken is given back.
func safely(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = panicked(p)
		}
	}()
	return f()
}

// panicked makes a panic an error, but for a broken lock order, which an
// invariants build must not hide.
func panicked(p any) error {
	if v, ok := p.(lockrank.Violation); ok {
		panic(v)
	}
	return &batch.UnmovableError{Err: fmt.Errorf("convert: a transfer panicked: %v", p)}
}

// noPanic is safely for the rest of the function that defers it: behind what gives back
// when *err is set.
func noPanic(err *error) {
	if p := recover(); p != nil {
		*err = panicked(p)
	}
}
