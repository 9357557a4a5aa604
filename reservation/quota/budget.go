package quota

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// Budget is one limit for everything that is allocated through the devices that Wrap has returned.
// It is safe for concurrent use and need not be closed.
type Budget struct {
	quota *Quota // has the limit, the sum that is charged, its peak, and the subscribers

	mu struct {
		lockrank.Mutex[lockrank.Space]
		devices map[*budgetedDevice]bool // those that are charged anything
		refused int64
	}
}

// NewBudget returns a budget of limit > 0 bytes. Its errors contain name, which should name the place
// where the limit was set; "" stands for a general name.
func NewBudget(limit int64, name string) (*Budget, error) {
	q, err := New(Config{Limit: limit, Name: cmp.Or(name, "the device budget")})
	if err != nil {
		return nil, fmt.Errorf("budget: %w", err)
	}
	b := &Budget{quota: q}
	b.mu.devices = make(map[*budgetedDevice]bool)
	return b, nil
}

// SetLimit changes the limit to n > 0 bytes. It revokes nothing: while more than n bytes are
// charged, new requests are refused.
func (b *Budget) SetLimit(n int64) error { return b.quota.SetLimit(n) }

// BudgetStats is a snapshot of a budget. Sizes are in bytes, as the devices charge them. While no call is
// in progress and no space has promised anything, Reserved = Live + Retired. At all times,
// Reserved >= Live + Retired + Pending.
type BudgetStats struct {
	Limit    int64
	Reserved int64 // charged: what remains is Limit - Reserved, or nothing
	Live     int64 // in allocations that are in use
	Retired  int64 // freed, and not known to be finished
	Pending  int64 // in calls of Alloc that have not returned
	Promised int64 // by spaces
	Peak     int64 // largest Reserved so far
	Refused  int64 // requests that found no room
}

// Stats returns a snapshot of the budget.
func (b *Budget) Stats() BudgetStats {
	b.mu.Lock()
	defer b.mu.Unlock()
	q := b.quota.Stats()
	s := BudgetStats{Limit: q.Limit, Reserved: q.Used, Peak: q.Peak, Refused: b.mu.refused}
	for d := range b.mu.devices {
		s.Live += d.live
		s.Retired += d.retired
		s.Pending += d.allocated - d.live - d.retired
		s.Promised += d.promised
	}
	return s
}

// Reap reaps the devices of which anything is charged and returns how many bytes were credited.
func (b *Budget) Reap() (n int64) {
	b.mu.Lock()
	devices := slices.Collect(maps.Keys(b.mu.devices))
	b.mu.Unlock()
	for _, d := range devices {
		n += d.Reap()
	}
	return n
}

// Wrap returns dev under the budget, or dev itself if the budget limits it already. Only
// allocations through the returned device count. It has a method Unwrap, implements
// tier.Limited, and is safe for concurrent use. The error is for a nil dev.
//
// A caller that owns dev closes the returned device instead. Other callers leave it: what was
// allocated through it stays charged until it is freed.
func (b *Budget) Wrap(dev tier.Device) (tier.Device, error) {
	if dev == nil {
		return nil, errors.New("budget: there is no device to wrap")
	}
	for d, ok := tier.As[*budgetedDevice](dev); ok; d, ok = tier.As[*budgetedDevice](d.inner) {
		if d.budget == b {
			return dev, nil
		}
	}
	return &budgetedDevice{
		decorator: decorator{dev}, budget: b, member: b.quota.Member(), allocs: make(map[tier.Addr]int64),
	}, nil
}
