package permit

import (
	"errors"
	"fmt"
	"math"
	"slices"
)

// What a pool has by default. The converters take what passes through pinned
// memory from Host.
const (
	Device = "device" // the budget of device memory
	Host   = "host"   // the budget of pinned host memory

	defaultDeviceBytes = 256 << 20
	defaultHostBytes   = 512 << 20
	defaultSlots       = 16
	// defaultBypass is how many requests may pass the oldest waiter of a line.
	defaultBypass = 16
	// maxBudgets is the most that a pool can have.
	maxBudgets = 14
)

const maxBypass = 1 << 20

// Budget is a named number of bytes.
type Budget struct {
	Name  string
	Bytes int64
}

// SlotLimit says how many spill slots a pool has. The zero value is 16
// of them; no slots at all cannot be written with it by mistake.
type SlotLimit struct {
	kind  slotKind
	count int
}

type slotKind uint8

const (
	slotsDefault slotKind = iota
	slotsLimited
	slotsUnlimited
)

// Slots is a limit of n slots. One of them is the monitor's, so that users have
// one less. Fewer than 1 is an error where it is used.
func Slots(n int) SlotLimit { return SlotLimit{kind: slotsLimited, count: n} }

// Unlimited is no limit: every request for a slot is granted one.
func Unlimited() SlotLimit { return SlotLimit{kind: slotsUnlimited} }

// Limit returns how many slots there are, and false if they are unlimited.
func (s SlotLimit) Limit() (slots int, limited bool) {
	switch s.kind {
	case slotsDefault:
		return defaultSlots, true
	case slotsUnlimited:
		return 0, false
	}
	return s.count, true
}

func (s SlotLimit) validate() error {
	if n, limited := s.Limit(); limited && n < 1 {
		return fmt.Errorf("permit: a pool of %d slots: want 1 at least, or Unlimited", n)
	}
	return nil
}

// Config describes a Pool. The zero value
// has 256 MiB of Device, 512 MiB of Host, and 16 slots. What is set must be
// above zero: a budget of 0 bytes, a list without budgets and Slots(0) are errors.
type Config struct {
	// Budgets are the pool's budgets in their order. Nil means Device and
	// Host; an empty list that is not nil is an error.
	Budgets []Budget
	// Slots is how many spill slots there are: Slots(n), Unlimited(), or, if it is not
	// set, 16.
	Slots SlotLimit
	// Bypass is how many requests may be served before the oldest of a line, for which there is not
	// enough yet. 0 means 16. Below 0, no request may pass the oldest.
	Bypass int
}

// IsZero reports whether nothing is set.
func (c Config) IsZero() bool { return c.Budgets == nil && c.Slots == SlotLimit{} && c.Bypass == 0 }

func (c Config) withDefaults() Config {
	if c.Budgets == nil {
		c.Budgets = []Budget{{Device, defaultDeviceBytes}, {Host, defaultHostBytes}}
	}
	if c.Bypass == 0 {
		c.Bypass = defaultBypass
	}
	return c
}

// Validate checks what New would refuse.
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
			errs = append(errs, fmt.Errorf("permit: the budgets up to %q are more than %d bytes together", b.Name, int64(math.MaxInt64)))
			break
		}
	}
	if c.Bypass > maxBypass {
		errs = append(errs, fmt.Errorf("permit: a bypass of %d requests is above %d", c.Bypass, maxBypass))
	}
	return errors.Join(append(errs, c.Slots.validate())...)
}

// add returns a + b, both at least 0, and false if that is more than an int64
// can say.
func add(a, b int64) (int64, bool) {
	if b > math.MaxInt64-a {
		return 0, false
	}
	return a + b, true
}
