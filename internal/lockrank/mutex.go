//go:build !invariants

package lockrank

import "sync"

// Mutex is a sync.Mutex with a rank. The zero value is unlocked.
type Mutex[R Rank] struct{ mu sync.Mutex }

// Lock locks m.
func (m *Mutex[R]) Lock() { m.mu.Lock() }

// TryLock locks m if it is free and says whether it did.
func (m *Mutex[R]) TryLock() bool { return m.mu.TryLock() }

// Unlock unlocks m.
func (m *Mutex[R]) Unlock() { m.mu.Unlock() }

// AssertNone panics in an invariants build if the goroutine holds any ranked
// mutex. Call it where something slow begins: I/O, a wait, a callback.
func AssertNone(string) {}
