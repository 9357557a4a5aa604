package tier

import (
	"cmp"
	"errors"
	"fmt"
	"math"

	"github.com/spillway-db/spillway/internal/books"
)

// Fractions are the marks of a space, as shares of its capacity:
// 0 < Stop < Trigger ≤ Limit ≤ 1.
type Fractions struct {
	Limit   float64 // largest share that reservations may take
	Trigger float64 // at this pressure the monitor starts to move batches down
	Stop    float64 // at this pressure it ends at the latest
}

// In returns f with its zero fields set to the defaults of a tier. The limit is above the trigger,
// so that the monitor acts before reservations are refused. A disk has nowhere to move to and is
// filled further.
func (f Fractions) In(k Kind) Fractions {
	other := Fractions{Limit: 0.90, Trigger: 0.85, Stop: 0.65}
	if k == Disk {
		other = Fractions{Limit: 1.00, Trigger: 0.95, Stop: 0.85}
	}
	return Fractions{cmp.Or(f.Limit, other.Limit), cmp.Or(f.Trigger, other.Trigger), cmp.Or(f.Stop, other.Stop)}
}

// Validate checks 0 < Stop < Trigger ≤ Limit ≤ 1.
func (f Fractions) Validate() error {
	switch {
	case math.IsNaN(f.Limit) || math.IsNaN(f.Trigger) || math.IsNaN(f.Stop):
		return errors.New("tier: limit, trigger and stop must be numbers")
	case f.Stop <= 0:
		return fmt.Errorf("tier: stop %v must be above 0", f.Stop)
	case f.Stop >= f.Trigger:
		return fmt.Errorf("tier: stop %v must be below trigger %v", f.Stop, f.Trigger)
	case f.Trigger > f.Limit:
		return fmt.Errorf("tier: trigger %v must not be above limit %v", f.Trigger, f.Limit)
	case f.Limit > 1:
		return fmt.Errorf("tier: limit %v must not be above 1", f.Limit)
	}
	return nil
}

// of returns the fractions, with the defaults of the space's tier, in bytes of its capacity. In
// bytes, too, 0 < Stop < Trigger is required: otherwise an empty space could be above its trigger.
func (f Fractions) of(id ID, capacity int64) (books.Marks, error) {
	f = f.In(id.Kind)
	err := f.Validate()
	m := books.Marks{
		Limit: share(capacity, f.Limit), Trigger: share(capacity, f.Trigger), Stop: share(capacity, f.Stop),
	}
	if err == nil && (m.Stop == 0 || m.Stop >= m.Trigger) {
		err = fmt.Errorf("tier: of %d bytes stop %v is %d and trigger %v is %d: want 0 < stop < trigger",
			capacity, f.Stop, m.Stop, f.Trigger, m.Trigger)
	}
	if err != nil {
		return m, fmt.Errorf("%w (space %s)", err, id)
	}
	return m, nil
}

// share is ⌊capacity × f⌋, exact where f is 1.
func share(capacity int64, f float64) int64 {
	if f >= 1 {
		return capacity
	}
	return int64(float64(capacity) * f)
}
