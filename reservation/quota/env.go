package quota

import (
	"errors"
	"fmt"
	"math/big"
	"slices"
	"strconv"
	"strings"

	"github.com/spillway-db/spillway/tier"
)

// The variables that FromEnv reads.
const (
	limitVar      = "SPILLWAY_GPU_MEMORY_LIMIT"
	ratioVar      = "SPILLWAY_GPU_MEMORY_OVERSUB_RATIO"
	physicalVar   = "SPILLWAY_GPU_PHYSICAL_MEMORY_MB"
	ledgerVar     = "SPILLWAY_GPU_QUOTA_DIR"
	groupVar      = "SPILLWAY_GPU_QUOTA_GROUP"
	shortRatioVar = "SPILLWAY_GPU_OVERSUB_RATIO" // the ratio's second name

	ours, nvshare = "SPILLWAY_", "NVSHARE_"
)

// Settings describe the wanted quota, from the environment or from a program. The zero value wants
// none.
type Settings struct {
	// Limit is how much GPU memory may be held, as a share of the memory of all GPUs. Zero is no
	// limit.
	Limit tier.Amount
	// Ratio is the oversubscription ratio: quotas may promise that much of the physical
	// memory. Nil means 1.
	Ratio *big.Rat
	// Physical is how many bytes each GPU counts as having, if it does not have less;
	// 0 means all that it has.
	Physical int64
	// Ledger is the directory of the node's ledger; empty means that other processes
	// are not asked.
	Ledger string
	// Group is whose share of the ledger it is; empty means the process's own.
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
// Each of the first three is also looked for under the name with NVSHARE_ in the place of
// SPILLWAY_, if that is not set. The ratio has a second name, SPILLWAY_GPU_OVERSUB_RATIO, which is
// read if the first is not set. A variable that is set and says nothing sensible, or nothing at
// all, is an error that names it and quotes what it says: never "no limit".
func FromEnv(lookup func(string) (string, bool)) (Settings, error) {
	var s Settings
	var errs []error
	read := func(parse func(string) error, names ...string) (source string) {
		for _, name := range namesOf(names) {
			text, ok := lookup(name)
			if !ok {
				continue
			}
			if err := parse(text); err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", name, err))
			}
			return name
		}
		return ""
	}
	s.Source = read(func(text string) (err error) { s.Limit, err = tier.ParseAmount(text); return err }, limitVar)
	read(func(text string) (err error) { s.Ratio, err = ParseRatio(text); return err }, ratioVar, shortRatioVar)
	read(func(text string) (err error) { s.Physical, err = parseMiB(text); return err }, physicalVar)
	for _, v := range []struct {
		name string
		to   *string
	}{{ledgerVar, &s.Ledger}, {groupVar, &s.Group}} {
		text, ok := lookup(v.name)
		if ok && text == "" {
			errs = append(errs, fmt.Errorf("%s: it is set to nothing: unset it, or give it a value", v.name))
		}
		*v.to = text
	}
	if err := checkGroup(s.Group); err != nil {
		errs = append(errs, fmt.Errorf("%s: %w", groupVar, err))
	}
	if s.Group != "" && s.Ledger == "" {
		errs = append(errs, fmt.Errorf("%s: there is no ledger to share in: set %s too", groupVar, ledgerVar))
	}
	if err := errors.Join(errs...); err != nil {
		return Settings{}, fmt.Errorf("quota: %w", err)
	}
	return s, nil
}

// namesOf returns the names under which a variable is looked for, in this order: all of
// ours, then the same with nvshare's prefix.
func namesOf(names []string) []string {
	all := slices.Clone(names)
	for _, name := range names {
		all = append(all, strings.Replace(name, ours, nvshare, 1))
	}
	return all
}

// ParseRatio parses an oversubscription ratio: a decimal number above 0, exactly.
func ParseRatio(s string) (*big.Rat, error) {
	plain := strings.Trim(s, "0123456789.eE+-") == "" // big.Rat reads fractions and other bases too
	f, err := strconv.ParseFloat(s, 64)               // which also bounds the exponent
	if !plain || err != nil || f <= 0 {
		return nil, fmt.Errorf("%.60q is not a ratio: want a number above 0, such as 1.5", s)
	}
	r, ok := new(big.Rat).SetString(s)
	if !ok || len(s) > 100 {
		return nil, fmt.Errorf("%.60q is not a ratio: want a number above 0, such as 1.5", s)
	}
	return r, nil
}

// parseMiB reads a whole number of MiB, which tools for GPUs call MB.
func parseMiB(s string) (int64, error) {
	n, err := strconv.ParseUint(s, 10, 64)
	switch {
	case err != nil && !errors.Is(err, strconv.ErrRange):
		return 0, fmt.Errorf("%.60q is not a number of MiB: want digits", s)
	case err != nil || n >= 1<<43:
		return 0, fmt.Errorf("%.60q MiB are above the largest size", s)
	case n == 0:
		return 0, fmt.Errorf("%q MiB: it must be above 0", s)
	}
	return int64(n) << 20, nil
}

// Validate returns what is wrong with s, as far as that is known without the machine.
func (s *Settings) Validate() error {
	switch {
	case s.Limit.Validate() != nil:
		return fmt.Errorf("quota: Limit: %w", s.Limit.Validate())
	case s.Physical < 0:
		return fmt.Errorf("quota: physical memory of %d bytes is negative", s.Physical)
	case s.Ratio != nil && s.Ratio.Sign() <= 0:
		return fmt.Errorf("quota: an oversubscription ratio of %s: it must be above 0", s.Ratio.RatString())
	case s.Group != "" && s.Ledger == "":
		return fmt.Errorf("quota: the group %q has no ledger to share in", s.Group)
	}
	if err := checkGroup(s.Group); err != nil {
		return fmt.Errorf("quota: %w", err)
	}
	return nil
}

// maxGroup is how many bytes a group's name may have.
const maxGroup = 128

// checkGroup refuses a Group that is too long, or could not be printed.
func checkGroup(name string) error {
	if len(name) > maxGroup {
		return fmt.Errorf("the group %.60q has more than %d bytes", name, maxGroup)
	}
	for _, r := range name {
		if r < ' ' || r == '\x7f' || r == '\uFFFD' {
			return fmt.Errorf("the group %q has a character that cannot be printed", name)
		}
	}
	return nil
}
