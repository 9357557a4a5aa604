package permit

import (
	"errors"
	"fmt"
	"math"
	"slices"
)

// inline is how many budgets a request names without allocating: both default ones.
const inline = 2

// Request lists the bytes of budgets, and the slot, that a permit shall contain. The zero value
// asks for nothing, and each open pool grants it. It is a value: its methods return another one.
type Request struct {
	first  [inline]Budget
	named  int // of first
	more   []Budget
	slot   bool
	capped bool
}

// MiB returns a request for device and host MiB of the budgets Device and Host. Negative numbers
// and sums of bytes that overflow an int64 are errors.
func MiB(device, host int64) (Request, error) {
	var r Request
	for _, b := range [...]Budget{{Device, device}, {Host, host}} {
		switch {
		case b.Bytes < 0:
			return Request{}, fmt.Errorf("permit: cannot ask for %d MiB of %q", b.Bytes, b.Name)
		case b.Bytes > math.MaxInt64>>20:
			return Request{}, tooMuch(b.Name, b.Bytes, "MiB")
		}
		var err error
		if r, err = r.And(b.Name, b.Bytes<<20); err != nil {
			return Request{}, err
		}
	}
	return r, nil
}

// And returns r with more bytes of a budget. 0 bytes change nothing, whatever the name. A negative
// number, and a sum that overflows an int64, are errors.
func (r Request) And(name string, bytes int64) (Request, error) {
	switch {
	case bytes < 0:
		return Request{}, fmt.Errorf("permit: cannot ask for %d bytes of %q", bytes, name)
	case name == "":
		return Request{}, errors.New("permit: a budget needs a name")
	case bytes == 0:
		return r, nil
	}
	sum := int64(0)
	for i := range r.len() {
		sum += r.at(i).Bytes // was checked when it was added
	}
	if _, ok := add(sum, bytes); !ok {
		return Request{}, tooMuch(name, bytes, "bytes")
	}
	r.more = slices.Clone(r.more) // the caller's r stays as it is
	for i := range r.len() {
		if b := r.at(i); b.Name == name {
			b.Bytes += bytes
			return r, nil
		}
	}
	if r.named < inline {
		r.first[r.named] = Budget{name, bytes}
		r.named++
	} else {
		r.more = append(r.more, Budget{name, bytes})
	}
	return r, nil
}

// Spill returns r with a slot, which writing to disk requires.
func (r Request) Spill() Request {
	r.slot = true
	return r
}

// Capped returns r with each number of bytes limited to the budget's total. It is for transfers
// that can work with less, and must not be refused when a budget is small.
func (r Request) Capped() Request {
	r.capped = true
	return r
}

func (r *Request) len() int { return r.named + len(r.more) }

func (r *Request) at(i int) *Budget {
	if i < r.named {
		return &r.first[i]
	}
	return &r.more[i-r.named]
}

func tooMuch(name string, n int64, unit string) error {
	return fmt.Errorf("permit: a request with %d %s of %q is for more than %d bytes", n, unit, name, int64(math.MaxInt64))
}
