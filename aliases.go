package spillway

import (
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/reservation/arrowmem"
	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
)

// The names below are those of other packages that a program needs to embed an engine: what it puts
// into a Config, and what the calls of Engine, Plan and RunTask take and return. Engine builders
// make payloads, devices or policies of their own, and import those packages.

// The tiers, from the fastest.
const (
	GPU  = tier.GPU
	Host = tier.Host
	Disk = tier.Disk
)

type (
	// Kind is a tier: GPU, Host or Disk.
	Kind = tier.Kind
	// SpaceID names a space, as gpu:0.
	SpaceID = tier.ID
	// Marks are the marks of a tier: how much is given out, and when batches move down.
	Marks = tier.Marks
	// Amount says how large something is: a number of bytes, or a share of what there is.
	Amount = tier.Amount
)

// Bytes is an Amount of n bytes.
func Bytes(n int64) Amount { return Amount{Bytes: n} }

// Share is an Amount of a share above 0, up to 1, of what there is.
func Share(of float64) Amount { return Amount{Share: of} }

type (
	// Warning is something that the machine refuses or hides, with a remedy.
	Warning = diag.Warning
	// QuotaSettings are what Limits.Quota asks for.
	QuotaSettings = quota.Settings
	// Budget limits what is taken on all GPUs of the engines that have it in Limits.Budgets.
	Budget = quota.Budget
)

// NewBudget returns a budget of so many bytes, above 0. Errors call it by its name.
func NewBudget(limit int64, name string) (*Budget, error) {
	return quota.NewBudget(limit, name)
}

type (
	// Batch is a record batch in one of the spaces.
	Batch = batch.Batch
	// Handle holds a batch in place while it is worked on.
	Handle = batch.Handle
	// Repository keeps the batches of an operator's port, in partitions.
	Repository = repository.Repository
	// Claim is a set of batches that are set apart for one task.
	Claim = repository.Claim
)

// WithPlacement makes Repository.Put put a record into a space of the strategy, and wait for room
// there.
func WithPlacement(s Strategy) repository.PutOption { return repository.WithPlacement(s) }

type (
	// Reservation is a promise of bytes in a space, which must be released.
	Reservation = reservation.Reservation
	// Strategy says in which spaces a reservation may be.
	Strategy = reservation.Strategy
	// Work is an operator's own memory in a space, which grows and shrinks.
	Work = arrowmem.Work
	// WorkOptions describe a Work.
	WorkOptions = arrowmem.WorkOptions
	// Estimate says what a task will need.
	Estimate = admission.Estimate
	// Grant is the right to run a task.
	Grant = admission.Grant
)

// None is an Output or Overhead of a Task that needs nothing: 0 leaves them to the estimator.
const None = admission.None

// AnyInTier is any space of a tier.
func AnyInTier(k Kind) Strategy { return reservation.AnyInTier(k) }

// AnyInTiers is any space of those tiers, the first tier preferred.
func AnyInTiers(kinds ...Kind) Strategy { return reservation.AnyInTiers(kinds...) }

// Specific is that space alone.
func Specific(id SpaceID) Strategy { return reservation.Specific(id) }

// The errors that a program distinguishes, by errors.Is.
var (
	ErrNoSpace  = tier.ErrNoSpace         // there is no room, and none will come
	ErrExceeded = reservation.ErrExceeded // more was asked for than a space has
	ErrDeadlock = reservation.ErrDeadlock // a wait could not have ended
	ErrLost     = tier.ErrLost            // a GPU is lost, with what was only there
	ErrCorrupt  = convert.ErrCorrupt      // bytes are not those that were put
)
