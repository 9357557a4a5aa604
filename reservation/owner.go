package reservation

import (
	"context"
	"sync/atomic"
	"time"
)

// Owner is a task that reserves. The manager finds the memory of an owner by its reservations, and by
// the handles and records that were opened with its Context. So it finds tasks that wait for each
// other, and one of them gets ErrDeadlock. Pass the owner to each reservation of the task in
// Options.Owner, and its Context to calls that reserve on the task's behalf.
//
// An owner runs until as many of its goroutines wait as it has: a running owner may release
// something. See SetWorkers. It is safe for concurrent use and needs no closing.
type Owner struct {
	name    string
	workers atomic.Int64
	waiting atomic.Int64 // goroutines that wait
	changed atomic.Int64 // when waiting last changed, in Unix nanoseconds
}

// NewOwner returns an owner of one goroutine. The name is for error messages.
func NewOwner(name string) *Owner { return &Owner{name: name} }

// Name returns the owner's name, and "" for a nil Owner.
func (o *Owner) Name() string {
	if o == nil {
		return ""
	}
	return o.name
}

// SetWorkers sets how many goroutines work for the owner. If so many wait, the owner cannot release
// anything. Below 1 is 1.
func (o *Owner) SetWorkers(n int) { o.workers.Store(int64(n)) }

// runs reports whether a goroutine of the owner may still release something.
func (o *Owner) runs() bool { return o.waiting.Load() < max(1, o.workers.Load()) }

// wait counts goroutines that begin or end to wait. o may be nil.
func (o *Owner) wait(n int64) {
	if o != nil {
		o.changed.Store(time.Now().UnixNano())
		o.waiting.Add(n)
	}
}

// Context returns a context whose waits are the owner's: those of requests made with it that name
// no owner themselves, such as those of a mover that fetches a batch. The bytes of such requests do
// not count as held by the owner, because they soon belong to the batch. Handles and records that
// are opened with the context are the owner's, and so is the memory that they keep.
func (o *Owner) Context(ctx context.Context) context.Context {
	return context.WithValue(ctx, ownerKey{}, o)
}

type ownerKey struct{}

// OwnerOf returns the owner that Context put into ctx, or nil.
func OwnerOf(ctx context.Context) *Owner {
	o, _ := ctx.Value(ownerKey{}).(*Owner)
	return o
}

// Waits notes that the goroutine of ctx's owner waits for something other than room, such as a
// handle that another task must close. While it does, nothing can be expected of it. The caller
// calls done when the wait is over.
func Waits(ctx context.Context) (done func()) {
	o := OwnerOf(ctx)
	o.wait(1)
	return func() { o.wait(-1) }
}

// label is the owner, in the books, of a reservation that has only a name.
type label string

// Name returns the name.
func (l label) Name() string { return string(l) }
