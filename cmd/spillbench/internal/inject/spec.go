package inject

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Example is a spec that Parse takes, for messages.
const Example = "op=read,kind=eio,at=3"

// defaultDelay is what kind=slow without a number means: a disk's seek, many times over.
const defaultDelay = 10 * time.Millisecond

// maxDelay is the longest that one operation may be slowed down.
const maxDelay = time.Minute

// operation is one that faults can happen to.
type operation struct {
	name  string
	what  string // for messages
	kinds []string
}

// operations are all, in the order of messages.
var operations = []operation{
	{"read", "a read", []string{"eio", "short", "bitflip", "slow"}},
	{"write", "a write", []string{"eio", "enospc", "short", "bitflip", "slow"}},
	{"alloc", "an allocation of device memory", []string{"oom", "eio", "slow"}},
	{"copy", "a copy from or to a device", []string{"eio", "bitflip", "slow"}},
}

// Spec is one fault as the command line gives it.
type Spec struct {
	Text string // as it was given

	Op    string // "read", "write", "alloc", "copy"
	Kind  string // "eio", "enospc", "short", "bitflip", "oom", "slow"
	Delay time.Duration
	// Path says which files, of reads and writes; empty for all.
	Path string
	// Probability of each operation; 0 is certainty. At is the first operation that is
	// hit, from 1; Times is how many are, 0 for all.
	Probability float64
	At, Times   int
}

// Parse reads op=…,kind=…, and any of p=, at=, times= and path=. An error quotes what is
// wrong and says what would be right.
func Parse(text string) (Spec, error) {
	s := Spec{Text: text}
	seen := make(map[string]bool)
	for field := range strings.SplitSeq(text, ",") {
		key, value, ok := strings.Cut(field, "=")
		if !ok || value == "" {
			return s, fmt.Errorf("%q is not KEY=VALUE (want one such as %s)", field, Example)
		}
		if seen[key] {
			return s, fmt.Errorf("%q: %s is there twice (give each key once)", field, key)
		}
		seen[key] = true
		if err := s.set(key, value); err != nil {
			return s, fmt.Errorf("%q: %w", field, err)
		}
	}
	if err := s.complete(); err != nil {
		return s, fmt.Errorf("%q: %w", text, err)
	}
	if s.At > 0 && s.Times == 0 {
		s.Times = 1
	}
	return s, nil
}

// set takes one field.
func (s *Spec) set(key, value string) (err error) {
	switch key {
	case "op":
		if s.Op = value; find(value).name == "" {
			return fmt.Errorf("there is no such operation (want read, write, alloc or copy)")
		}
	case "kind":
		return s.setKind(value)
	case "p":
		s.Probability, err = strconv.ParseFloat(value, 64)
		if err != nil || !(s.Probability > 0 && s.Probability <= 1) {
			return errors.New("a probability is above 0 and at most 1 (want one such as p=0.01)")
		}
	case "at":
		if s.At, err = count(value); err != nil {
			return errors.New("operations are numbered (want 1 for the first, or more)")
		}
	case "times":
		if s.Times, err = count(value); err != nil {
			return errors.New("that many operations cannot be hit (want 1 or more)")
		}
	case "path":
		if s.Path = value; badPattern(value) {
			return errors.New("the pattern is wrong (want a directory, or one such as /mnt/*)")
		}
	default:
		return fmt.Errorf("there is no key %q (want op, kind, p, at, times or path)", key)
	}
	return nil
}

// count reads a number of operations.
func count(s string) (int, error) {
	n, err := strconv.ParseInt(s, 10, 32) // a run of more would not end
	if err == nil && n < 1 {
		err = errors.New("too small")
	}
	return int(n), err
}

func badPattern(s string) bool {
	_, err := filepath.Match(s, "")
	return err != nil
}

// setKind takes a kind, with the milliseconds of slow behind it.
func (s *Spec) setKind(value string) error {
	name, number, numbered := strings.Cut(value, ":")
	s.Kind = name
	known := slices.ContainsFunc(operations, func(op operation) bool { return slices.Contains(op.kinds, name) })
	switch {
	case !known:
		return fmt.Errorf("there is no such kind (want eio, enospc, short, bitflip, oom or slow)")
	case name != "slow" && numbered:
		return fmt.Errorf("%s takes no number (write kind=%s; only slow takes one, as slow:5)", name, name)
	case name != "slow":
		return nil
	case !numbered:
		s.Delay = defaultDelay
		return nil
	}
	ms, err := strconv.ParseFloat(number, 64)
	if err != nil || !(ms > 0 && ms <= float64(maxDelay/time.Millisecond)) {
		return fmt.Errorf("want milliseconds above 0, and at most %d (such as slow:5)", maxDelay/time.Millisecond)
	}
	s.Delay = time.Duration(ms * float64(time.Millisecond))
	return nil
}

// complete checks what fields say together.
func (s *Spec) complete() error {
	op := find(s.Op)
	switch {
	case s.Op == "":
		return fmt.Errorf("the operation is missing (add op=read, op=write, op=alloc or op=copy)")
	case s.Kind == "":
		return fmt.Errorf("the kind is missing (add kind=%s)", strings.Join(op.kinds, ", kind="))
	case !slices.Contains(op.kinds, s.Kind):
		return fmt.Errorf("%s cannot happen to %s (want kind=%s)", s.Kind, op.what, strings.Join(op.kinds, ", kind="))
	case s.Probability > 0 && s.At > 0:
		return fmt.Errorf("p and at exclude each other (give the chance of each, or the number of one)")
	case s.Path != "" && !s.onDisk():
		return fmt.Errorf("%s has no path (drop path=, or want op=read or op=write)", op.what)
	}
	return nil
}

// onDisk reports whether it is a fault of disks, and not of devices.
func (s *Spec) onDisk() bool { return s.Op == "read" || s.Op == "write" }

// find returns the operation of a name, an empty one if there is none.
func find(name string) operation {
	for _, op := range operations {
		if op.name == name {
			return op
		}
	}
	return operation{}
}

// Specs is a flag that may be given several times.
type Specs []Spec

// Set implements pflag.Value.
func (s *Specs) Set(text string) error {
	spec, err := Parse(text)
	if err != nil {
		return err
	}
	*s = append(*s, spec)
	return nil
}

// String implements pflag.Value.
func (s *Specs) String() string {
	var parts []string
	for _, spec := range *s {
		parts = append(parts, spec.Text)
	}
	return strings.Join(parts, " ")
}

// Type implements pflag.Value.
func (*Specs) Type() string { return "spec" }
