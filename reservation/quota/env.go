package quota

import (
	"errors"
	"fmt"
	"math/big"
	"strconv"
	"strings"

	"github.com/spillway-db/spillway/tier"
)

// Settings describe a quota, from the environment or from a program. The zero value is no quota.
type Settings struct {
	// Limit is how much GPU memory may be held, as a share of the memory of all GPUs. Zero is no
	// limit.
	Limit tier.Amount
	// Ratio is the oversubscription ratio: quotas may promise that much of the physical memory. Nil
	// means 1.
	Ratio *big.Rat
	// Physical is how many bytes each GPU counts as having, if it does not have less; 0 means all
	// that it has.
	Physical int64
	// Ledger is the directory of the node's ledger; empty means that other processes do not count.
	Ledger string
	// Group names the processes that share one quota in the ledger: that of the first of them. If it
	// is empty, the process has a quota of its own.
	Group string
	// Source says where Limit was set, for error messages.
	Source string
}

// FromEnv reads the settings from the variables that lookup, such as os.LookupEnv, finds:
//
//	SPILLWAY_GPU_MEMORY_LIMIT          a size, or a share of the memory of the GPUs: 4GiB, 4e9, 25%
//	SPILLWAY_GPU_MEMORY_OVERSUB_RATIO  how much of the memory quotas may promise: 1.5
//	SPILLWAY_GPU_PHYSICAL_MEMORY_MB    how many MiB each GPU counts as having
//	SPILLWAY_GPU_QUOTA_DIR             the directory of the node's ledger; see Settings.Ledger
//	SPILLWAY_GPU_QUOTA_GROUP           whose share of the ledger it is; see Settings.Group
//
// If one of the first three is not set, FromEnv looks for it under the name with NVSHARE_ in the
// place of SPILLWAY_. The ratio has a second name, SPILLWAY_GPU_OVERSUB_RATIO, which FromEnv reads
// if the first is not set. A variable that is set to nothing, or to a value that makes no sense, is
// an error that names the variable and quotes the value: never "no limit".
func FromEnv(lookup func(string) (string, bool)) (Settings, error) {
	var s Settings
	var errs []error
	read := func(parse func(string) error, names ...string) (source string) {
		for _, name := range names {
			text, ok := lookup(name)
			if !ok {
				continue
			}
			err := parse(text)
			if text == "" {
				err = errors.New("it is set to nothing: unset it, or give it a value")
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("quota: %s: %w", name, err))
			}
			return name
		}
		return ""
	}
	s.Source = read(func(text string) (err error) { s.Limit, err = tier.ParseAmount(text); return err },
		"SPILLWAY_GPU_MEMORY_LIMIT", "NVSHARE_GPU_MEMORY_LIMIT")
	read(func(text string) (err error) { s.Ratio, err = ParseRatio(text); return err },
		"SPILLWAY_GPU_MEMORY_OVERSUB_RATIO", "SPILLWAY_GPU_OVERSUB_RATIO",
		"NVSHARE_GPU_MEMORY_OVERSUB_RATIO", "NVSHARE_GPU_OVERSUB_RATIO")
	read(func(text string) error {
		mib, err := strconv.ParseUint(text, 10, 43)
		if err != nil || mib == 0 {
			return fmt.Errorf("%.60q is not a number of MiB: want 1 to 8796093022207", text)
		}
		s.Physical = int64(mib) << 20
		return nil
	}, "SPILLWAY_GPU_PHYSICAL_MEMORY_MB", "NVSHARE_GPU_PHYSICAL_MEMORY_MB")
	read(func(text string) error { s.Ledger = text; return nil }, "SPILLWAY_GPU_QUOTA_DIR")
	read(func(text string) error { s.Group = text; return nil }, "SPILLWAY_GPU_QUOTA_GROUP")
	if err := errors.Join(append(errs, s.Validate())...); err != nil {
		return Settings{}, err
	}
	return s, nil
}

// ParseRatio parses an oversubscription ratio: a decimal number above 0, exactly.
func ParseRatio(s string) (*big.Rat, error) {
	// ParseFloat bounds the exponent. SetString reads fractions and other bases, too.
	f, err := strconv.ParseFloat(s, 64)
	if err == nil && f > 0 && strings.Trim(s, "0123456789.eE+-") == "" {
		if r, ok := new(big.Rat).SetString(s); ok {
			return r, nil
		}
	}
	return nil, fmt.Errorf("%.60q is not a ratio: want a number above 0, such as 1.5", s)
}

// Validate checks s as far as that is possible without the machine.
func (s *Settings) Validate() error {
	const maxGroup = 128 // bytes
	switch err := s.Limit.Validate(); {
	case err != nil:
		return fmt.Errorf("quota: Limit: %w", err)
	case s.Physical < 0:
		return fmt.Errorf("quota: physical memory of %d bytes is negative", s.Physical)
	case s.Ratio != nil && s.Ratio.Sign() <= 0:
		return fmt.Errorf("quota: an oversubscription ratio of %s: it must be above 0", s.Ratio.RatString())
	case s.Group != "" && s.Ledger == "":
		return fmt.Errorf("quota: the group %q has no ledger: set Ledger or SPILLWAY_GPU_QUOTA_DIR too", s.Group)
	case len(s.Group) > maxGroup || strconv.Quote(s.Group) != `"`+s.Group+`"`:
		return fmt.Errorf("quota: the group %.60q: Group or SPILLWAY_GPU_QUOTA_GROUP may have at most %d bytes, "+
			"all printable, without quotes and backslashes", s.Group, maxGroup)
	}
	return nil
}
