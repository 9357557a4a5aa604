package permit

import (
	"errors"
	"fmt"
	"math"
	"slices"
)

// The budgets that a pool has by default. The converters of disks charge Host for the pinned memory
// that a transfer uses.
const (
	Device = "device" // the budget of device memory
	Host   = "host"   // the budget of pinned host memory

	defaultDeviceBytes = 256 << 20
	defaultHostBytes   = 512 << 20
	defaultSlots       = 16
	// defaultBypass is how many requests may pass the oldest waiter of a line.
	defaultBypass = 16
	// maxBudgets is how many budgets a pool can have.
	maxBudgets = 14
)

const maxBypass = 1 << 20

// Budget is a named number of bytes.
type Budget struct {
	Name  string
	Bytes int64
}

// Unlimited as a number of slots means that every request for a slot is granted one.
const Unlimited = -1

func validSlots(n int) error {
	if n < 1 && n != Unlimited {
		return fmt.Errorf("permit: a pool of %d slots: want at least 1, or Unlimited", n)
	}
	return nil
}

// Config describes a Pool. The zero value has 256 MiB of Device, 512 MiB of Host, and 16 slots. A
// budget of 0 bytes, an empty list of budgets and 0 slots are errors.
type Config struct {
	// Budgets are the pool's budgets in their order. Nil means Device and
	// Host; an empty list that is not nil is an error.
	Budgets []Budget
	// Slots is the number of spill slots, as new(8), or Unlimited. Nil means 16.
	Slots *int
	// Bypass is how many requests may be served before the oldest one of a line while that does not
	// fit. 0 means 16. Below 0, no request may pass the oldest.
	Bypass int
}

func (c Config) withDefaults() Config {
	if c.Budgets == nil {
		c.Budgets = []Budget{{Device, defaultDeviceBytes}, {Host, defaultHostBytes}}
	}
	if c.Slots == nil {
		c.Slots = new(defaultSlots)
	}
	if c.Bypass == 0 {
		c.Bypass = defaultBypass
	}
	return c
}

// Validate returns the error that New would return.
func (c Config) Validate() error {
	c = c.withDefaults()
	var errs []error
	switch n := len(c.Budgets); {
	case n == 0:
		errs = append(errs, errors.New("permit: a pool needs a budget (nil means the defaults)"))
	case n > maxBudgets:
		errs = append(errs, fmt.Errorf("permit: %d budgets are more than %d", n, maxBudgets))
	}
	sum := int64(0)
	for i, b := range c.Budgets {
		switch {
		case b.Name == "":
			errs = append(errs, fmt.Errorf("permit: budget %d has no name", i))
		case slices.ContainsFunc(c.Budgets[:i], func(o Budget) bool { return o.Name == b.Name }):
			errs = append(errs, fmt.Errorf("permit: there are two budgets %q", b.Name))
		}
		if b.Bytes <= 0 {
			errs = append(errs, fmt.Errorf("permit: budget %q of %d bytes: want more than 0", b.Name, b.Bytes))
			continue
		}
		var ok bool
		if sum, ok = add(sum, b.Bytes); !ok {
			errs = append(errs, fmt.Errorf("permit: the budgets up to %q are more than %d bytes together",
				b.Name, int64(math.MaxInt64)))
			break
		}
	}
	if c.Bypass > maxBypass {
		errs = append(errs, fmt.Errorf("permit: a bypass of %d requests is above %d", c.Bypass, maxBypass))
	}
	return errors.Join(append(errs, validSlots(*c.Slots))...)
}

// add returns a + b, both at least 0, and false if the sum overflows an int64.
func add(a, b int64) (int64, bool) {
	if b > math.MaxInt64-a {
		return 0, false
	}
	return a + b, true
}
