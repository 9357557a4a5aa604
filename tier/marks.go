package tier

import (
	"cmp"
	"fmt"

	"github.com/spillway-db/spillway/internal/books"
)

// Marks are the marks of a space, as shares of its capacity:
// 0 < Stop < Trigger ≤ Limit ≤ 1.
type Marks struct {
	Limit   float64 // largest share that reservations may take
	Trigger float64 // at this pressure the monitor starts to move batches down
	Stop    float64 // at this pressure it ends at the latest
}

// In returns f with its zero fields set to the defaults of a tier. The limit is above the trigger,
// so that the monitor acts before reservations are refused.
func (f Marks) In(k Kind) Marks {
	if !k.Valid() {
		k = GPU
	}
	other := kinds[k].marks
	return Marks{cmp.Or(f.Limit, other.Limit), cmp.Or(f.Trigger, other.Trigger), cmp.Or(f.Stop, other.Stop)}
}

// Validate checks 0 < Stop < Trigger ≤ Limit ≤ 1.
func (f Marks) Validate() error {
	if 0 < f.Stop && f.Stop < f.Trigger && f.Trigger <= f.Limit && f.Limit <= 1 { // none is NaN
		return nil
	}
	return fmt.Errorf("tier: stop %v, trigger %v and limit %v: want 0 < stop < trigger <= limit <= 1",
		f.Stop, f.Trigger, f.Limit)
}

// of returns the fractions, with the defaults of the space's tier, in bytes of its capacity. In
// bytes, too, 0 < Stop < Trigger is required: otherwise an empty space could be above its trigger.
func (f Marks) of(id ID, capacity int64) (books.Marks, error) {
	f = f.In(id.Kind)
	if err := f.Validate(); err != nil {
		return books.Marks{}, fmt.Errorf("%w (space %s)", err, id)
	}
	share := func(f float64) int64 {
		if f == 1 {
			return capacity // which a float64 may not hold
		}
		return int64(float64(capacity) * f)
	}
	m := books.Marks{Limit: share(f.Limit), Trigger: share(f.Trigger), Stop: share(f.Stop)}
	if m.Stop == 0 || m.Stop >= m.Trigger {
		return m, fmt.Errorf("tier: %s: of %d bytes stop %v is %d and trigger %v is %d: want 0 < stop < trigger",
			id, capacity, f.Stop, m.Stop, f.Trigger, m.Trigger)
	}
	return m, nil
}
