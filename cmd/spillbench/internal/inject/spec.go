package inject

import (
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spillway-db/spillway/tier/disk/faultfs"
	"github.com/spillway-db/spillway/tier/faultdev"
)

// Example is a spec that Parse accepts, for messages.
const Example = "op=read,kind=eio,at=3"

const (
	defaultDelay = 10 * time.Millisecond // of kind=slow without a number: several seeks of a disk
	maxDelay     = time.Minute           // of one operation
)

// operation is an operation that faults can happen to.
type operation struct {
	what    string // for messages
	pattern string // of its names in the rules of faultfs or faultdev
	onDisk  bool   // faultfs injects its faults, and else faultdev
	kinds   []string
}

var operations = map[string]operation{
	"read":  {"a read", "read", true, []string{"eio", "short", "bitflip", "slow"}},
	"write": {"a write", "write", true, []string{"eio", "enospc", "short", "bitflip", "slow"}},
	"alloc": {"an allocation of device memory", "alloc", false, []string{"oom", "eio", "slow"}},
	"copy":  {"a copy from or to a device", "copy-*", false, []string{"eio", "bitflip", "slow"}},
}

// effect is what a kind of fault does to an operation on files, and on devices.
type effect struct {
	file   faultfs.Effect
	device faultdev.Effect
}

// effects has the effect of each kind. Spec.Delay determines that of slow.
var effects = map[string]effect{
	"eio":     {faultfs.Fail(syscall.EIO), faultdev.FailWork(syscall.EIO)}, // real devices fail late, too
	"enospc":  {file: faultfs.Fail(syscall.ENOSPC)},
	"short":   {file: faultfs.Short()},
	"bitflip": {faultfs.BitFlip(), faultdev.BitFlip()},
	"oom":     {device: faultdev.OutOfMemory()},
	"slow":    {},
}

// Spec is one fault, as the command line describes it.
type Spec struct {
	Text  string // the whole description
	Op    string // "read", "write", "alloc", "copy"
	Kind  string // "eio", "enospc", "short", "bitflip", "oom", "slow"
	Delay time.Duration
	Path  string // a pattern of the files that are read or written; empty: all

	Probability float64 // of each operation; 0: certainty
	At          int     // the number of the first operation with the fault, from 1; 0: the first
	Times       int     // how many operations have the fault; 0: all
}

// Parse parses op=…,kind=…, and any of p=, at=, times= and path=. Its errors quote what is wrong, and
// describe in brackets what to write instead.
func Parse(text string) (Spec, error) {
	s, seen := Spec{Text: text}, make(map[string]bool)
	for field := range strings.SplitSeq(text, ",") {
		key, value, ok := strings.Cut(field, "=")
		if !ok || value == "" {
			return s, fmt.Errorf("%q is not KEY=VALUE (want one such as %s)", field, Example)
		}
		var err error
		problem := ""
		switch key {
		case "op":
			if _, known := operations[value]; !known {
				problem = "there is no such operation (want read, write, alloc or copy)"
			}
			s.Op = value
		case "kind":
			name, number, numbered := strings.Cut(value, ":")
			ms := float64(defaultDelay / time.Millisecond)
			if numbered {
				ms, err = strconv.ParseFloat(number, 64)
			}
			_, known := effects[name]
			s.Kind = name
			switch {
			case !known:
				problem = "there is no such kind (want eio, enospc, short, bitflip, oom or slow)"
			case name != "slow" && numbered:
				problem = fmt.Sprintf("%s takes no number (write kind=%[1]s; only slow takes one, as slow:5)", name)
			case err != nil || !(ms > 0 && ms <= float64(maxDelay/time.Millisecond)):
				problem = fmt.Sprintf("want milliseconds above 0, and at most %d (such as slow:5)",
					maxDelay/time.Millisecond)
			case name == "slow":
				s.Delay = time.Duration(ms * float64(time.Millisecond))
			}
		case "p":
			s.Probability, err = strconv.ParseFloat(value, 64)
			if err != nil || !(s.Probability > 0 && s.Probability <= 1) {
				problem = "a probability is above 0 and at most 1 (want one such as p=0.01)"
			}
		case "at":
			if s.At = count(value); s.At < 1 {
				problem = "operations are numbered (want 1 for the first, or more)"
			}
		case "times":
			if s.Times = count(value); s.Times < 1 {
				problem = "that many operations cannot be hit (want 1 or more)"
			}
		case "path":
			s.Path = value
			if _, err := filepath.Match(value, ""); err != nil {
				problem = "the pattern is wrong (want a directory, or one such as /mnt/*)"
			}
		default:
			problem = fmt.Sprintf("there is no key %q (want op, kind, p, at, times or path)", key)
		}
		if seen[key] {
			problem = key + " is there twice (give each key once)"
		}
		if problem != "" {
			return s, fmt.Errorf("%q: %s", field, problem)
		}
		seen[key] = true
	}
	if s.At > 0 && s.Times == 0 {
		s.Times = 1
	}
	op, problem := operations[s.Op], ""
	switch {
	case s.Op == "":
		problem = "the operation is missing (add op=read, op=write, op=alloc or op=copy)"
	case s.Kind == "":
		problem = fmt.Sprintf("the kind is missing (add kind=%s)", strings.Join(op.kinds, ", kind="))
	case !slices.Contains(op.kinds, s.Kind):
		problem = fmt.Sprintf("%s cannot happen to %s (want kind=%s)",
			s.Kind, op.what, strings.Join(op.kinds, ", kind="))
	case s.Probability > 0 && s.At > 0:
		problem = "p and at exclude each other (give the chance of each, or the number of one)"
	case s.Path != "" && !op.onDisk:
		problem = op.what + " has no path (drop path=, or want op=read or op=write)"
	default:
		return s, nil
	}
	return s, fmt.Errorf("%q: %s", text, problem)
}

// count parses a number of operations. It returns 0 if there is no such number.
func count(text string) int {
	n, err := strconv.ParseInt(text, 10, 32)
	if err != nil {
		return 0
	}
	return int(n)
}
