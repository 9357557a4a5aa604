package arrowmem_test

import (
	"errors"
	"fmt"
	"runtime"
	"testing"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/arrowmem"
	"github.com/spillway-db/spillway/tier"
)

func TestGuardLetsOthersPass(t *testing.T) {
	boom := errors.New("boom")
	if err := arrowmem.Guard(func() error { return boom }); err != boom {
		t.Errorf("an error of the function: %v", err)
	}
	for _, value := range []any{boom, "boom", &reservation.ExceededError{}, error(&tier.NoSpaceError{}), 7} {
		func() {
			defer func() {
				if p := recover(); p != value {
					t.Errorf("panic(%v) came as %v", value, p)
				}
			}()
			_ = arrowmem.Guard(func() error { panic(value) })
			t.Errorf("panic(%v) was swallowed", value)
		}()
	}
	func() {
		defer func() {
			if _, ok := recover().(*runtime.PanicNilError); !ok {
				t.Error("panic(nil) was swallowed")
			}
		}()
		_ = arrowmem.Guard(func() error { panic(nil) })
	}()
	ended := make(chan bool)
	go func() {
		after := false
		defer func() { ended <- after }()
		_ = arrowmem.Guard(func() error { runtime.Goexit(); return nil })
		after = true
	}()
	if <-ended {
		t.Error("Goexit was swallowed")
	}
}

func TestGuardNestedAndWrapped(t *testing.T) {
	a := allocatorOf(t, 1<<20, 0, nil)
	outer := arrowmem.Guard(func() error {
		inner := guarded(func() { a.Allocate(1) })
		if !errors.Is(inner, reservation.ErrExceeded) {
			t.Errorf("the inner one: %v", inner)
		}
		return nil
	})
	if outer != nil {
		t.Errorf("the outer one: %v", outer)
	}
	err := guarded(func() {
		defer func() { panic(fmt.Errorf("on the way: %w", recover().(error))) }()
		a.Allocate(1)
	})
	if !errors.Is(err, reservation.ErrExceeded) || err.Error()[:10] != "on the way" {
		t.Errorf("a wrapped panic: %v", err)
	}
}
