// Package lockrank holds the mutex that Spillway's packages lock. Its type
// carries a rank; a goroutine may only lock a mutex of a higher rank than all
// those that it holds. A normal build compiles it down to sync.Mutex; a build
// with -tags invariants checks the rank at every lock and panics with both
// names when the order is broken.
//
// The order, outermost first:
//
//	Monitor → Manager → Repository → Batch → Registry → Reservation → Space → Backend → Device
//
// The checks tell goroutines apart by living, a number that takes a nanosecond. GoroutineID is for
// other code that has to know its goroutine.
package lockrank

// Violation is what a broken order panics with in an invariants build. Code that
// turns the panics of others into errors lets it pass.
type Violation string

func (v Violation) Error() string { return "lockrank: " + string(v) }

// Rank names a place in the lock order. The types below are the only ones.
type Rank interface{ rank() int }

// The ranks, outermost first.
type (
	// Monitor guards the monitor's index of victims and its moves under way.
	Monitor struct{}
	// Manager guards a plan's table of repositories.
	Manager struct{}
	// Repository guards one repository's partitions.
	Repository struct{}
	// Batch guards one batch's state.
	Batch struct{}
	// Registry guards the table of converters, and that of dictionaries.
	Registry struct{}
	// Reservation guards the queue of waiters and one reservation's books.
	Reservation struct{}
	// Space guards one space's books, its listeners and its set of buffers.
	Space struct{}
	// Backend guards what a backend keeps for itself: free lists, queues.
	Backend struct{}
	// Device guards what a device keeps for itself, below the pool that uses it.
	Device struct{}
)

func (Monitor) rank() int     { return 1 }
func (Manager) rank() int     { return 2 }
func (Repository) rank() int  { return 3 }
func (Batch) rank() int       { return 4 }
func (Registry) rank() int    { return 5 }
func (Reservation) rank() int { return 6 }
func (Space) rank() int       { return 7 }
func (Backend) rank() int     { return 8 }
func (Device) rank() int      { return 9 }
