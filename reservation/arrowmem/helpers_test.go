package arrowmem_test

import (
	"errors"
	"reflect"
	"testing"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/arrowmem"
	"github.com/spillway-db/spillway/tier"
)

func release(t testing.TB, r *reservation.Reservation) {
	t.Helper()
	if err := r.Release(); err != nil {
		t.Error(err)
	}
}

// addressOf is where b starts.
func addressOf(b []byte) uintptr { return reflect.ValueOf(b).Pointer() }

// noPool has no memory.
type noPool struct{ tier.Pool }

func (noPool) Charge(size int64) int64 { return size }

// isUnfreed says whether err is that memory was left when an allocator was closed.
func isUnfreed(err error) bool { return errors.As(err, new(*arrowmem.UnfreedError)) }
