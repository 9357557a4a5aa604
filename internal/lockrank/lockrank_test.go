package lockrank_test

import (
	"sync"
	"testing"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/lockrank"
)

type locker interface {
	Lock()
	TryLock() bool
	Unlock()
}

// order is the lock order of the package comment, outermost first.
func order() (names []string, locks []locker) {
	return []string{
			"lockrank.Monitor",
			"lockrank.Manager",
			"lockrank.Repository",
			"lockrank.Batch",
			"lockrank.Registry",
			"lockrank.Reservation",
			"lockrank.Space",
			"lockrank.Backend",
			"lockrank.Device",
		},
		[]locker{
			new(
				lockrank.Mutex[lockrank.Monitor],
			),
			new(lockrank.Mutex[lockrank.Manager]),
			new(lockrank.Mutex[lockrank.Repository]),
			new(
				lockrank.Mutex[lockrank.Batch],
			),
			new(lockrank.Mutex[lockrank.Registry]),
			new(lockrank.Mutex[lockrank.Reservation]),
			new(lockrank.Mutex[lockrank.Space]),
			new(lockrank.Mutex[lockrank.Backend]),
			new(lockrank.Mutex[lockrank.Device]),
		}
}

// violation runs f and returns the Violation that it panicked with, "" for
// none.
func violation(t *testing.T, f func()) (v lockrank.Violation) {
	t.Helper()
	defer func() {
		if p := recover(); p != nil {
			var ok bool
			if v, ok = p.(lockrank.Violation); !ok {
				t.Errorf("it panicked with %v", p)
			}
		}
	}()
	f()
	return ""
}

func needInvariants(t *testing.T) {
	t.Helper()
	if !invariants.Enabled {
		t.Skip("needs -tags invariants, which checks ranks")
	}
}

func TestOrderIsAllowed(t *testing.T) {
	_, locks := order()
	for range 2 {
		for _, l := range locks {
			l.Lock()
		}
		for _, l := range locks { // not the reverse order: that is allowed too
			l.Unlock()
		}
		for i := 0; i < len(locks); i += 3 {
			locks[i].Lock()
		}
		for i := 0; i < len(locks); i += 3 {
			locks[i].Unlock()
		}
	}
	lockrank.AssertNone("the test ends")
}

// TestEveryPair locks each mutex while each other is held.
func TestEveryPair(t *testing.T) {
	needInvariants(t)
	names, locks := order()
	_, others := order()
	for i, outer := range locks {
		for j, inner := range others {
			outer.Lock()
			got := violation(t, func() { inner.Lock(); defer inner.Unlock() })
			outer.Unlock()
			var want lockrank.Violation
			if j <= i {
				want = lockrank.Violation(names[j] + " locked while " + names[i] + " is held")
			}
			if got != want {
				t.Errorf("%s, then %s: %q, want %q", names[i], names[j], got, want)
			}
			if !inner.TryLock() {
				t.Fatalf("%s is still locked after the panic", names[j])
			}
			inner.Unlock()
		}
	}
}

// TestTryLock: a try is allowed in any order, and counts for what follows.
func TestTryLock(t *testing.T) {
	_, locks := order()
	space, batch := locks[6], locks[3]
	space.Lock()
	if !batch.TryLock() {
		t.Fatal("a free mutex cannot be had")
	}
	if batch.TryLock() {
		t.Fatal("a mutex was had twice")
	}
	if invariants.Enabled {
		if v := violation(t, locks[5].Lock); v != "lockrank.Reservation locked while lockrank.Space is held" {
			t.Errorf("below the one that was tried and above the one before: %q", v)
		}
	}
	batch.Unlock()
	space.Unlock()
	lockrank.AssertNone("the test ends")
}

func TestAssertNone(t *testing.T) {
	needInvariants(t)
	_, locks := order()
	lockrank.AssertNone("nothing")
	locks[4].Lock()
	if v := violation(
		t,
		func() { lockrank.AssertNone("a file is read") },
	); v != "a file is read while lockrank.Registry is held" {
		t.Errorf("%q", v)
	}
	locks[4].Unlock()
	lockrank.AssertNone("nothing")
}

func TestUnlockByAnother(t *testing.T) {
	needInvariants(t)
	_, locks := order()
	locks[2].Lock()
	got := make(chan lockrank.Violation)
	go func() { got <- violation(t, locks[2].Unlock) }()
	if v := <-got; v != "lockrank.Repository unlocked by a goroutine that does not hold it" {
		t.Errorf("%q", v)
	}
	locks[2].Unlock()
}

// TestGoroutinesAreApart: what one goroutine holds does not bind another.
func TestGoroutinesAreApart(t *testing.T) {
	_, locks := order()
	locks[8].Lock()
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 500 {
				for _, l := range locks[:8] {
					l.Lock()
				}
				for _, l := range locks[:8] {
					l.Unlock()
				}
			}
			lockrank.AssertNone("the goroutine ends")
		})
	}
	wg.Wait()
	locks[8].Unlock()
}

func TestViolationIsAnError(t *testing.T) {
	var err error = lockrank.Violation("something is broken")
	if err.Error() != "lockrank: something is broken" {
		t.Errorf("it says %q", err)
	}
}
