package tier

import (
	"fmt"
	"strconv"
	"strings"
)

// Kind is a kind of memory. The order is the order of speed; the zero value is
// invalid.
type Kind uint8

// The tiers, fastest first.
const (
	GPU  Kind = iota + 1 // device memory
	Host                 // pinned host memory
	Disk                 // spill files
)

// Page is the alignment, in bytes, of bodies, of the places where a body may be
// split, and of direct I/O: no disk of today asks for more.
const Page = 4096

// Kinds lists the tiers, fastest first.
func Kinds() [3]Kind { return [...]Kind{GPU, Host, Disk} }

// Valid reports whether k is one of the tiers.
func (k Kind) Valid() bool { return k >= GPU && k <= Disk }

// String returns "gpu", "host" or "disk".
func (k Kind) String() string {
	switch k {
	case GPU:
		return "gpu"
	case Host:
		return "host"
	case Disk:
		return "disk"
	}
	return "invalid"
}

// ParseKind parses what Kind.String prints.
func ParseKind(s string) (Kind, error) {
	for _, k := range Kinds() {
		if s == k.String() {
			return k, nil
		}
	}
	return 0, fmt.Errorf("tier: %q is not a tier: want gpu, host or disk", s)
}

// ID names a space: a kind and the number of the space within it. IDs are
// comparable; the zero value is invalid.
type ID struct {
	Kind    Kind
	Ordinal int
}

// Valid reports whether the id has a tier and a number that is not negative.
func (id ID) Valid() bool { return id.Kind.Valid() && id.Ordinal >= 0 }

// String returns the id as "gpu:0".
func (id ID) String() string { return id.Kind.String() + ":" + strconv.Itoa(id.Ordinal) }

// parseID parses what ID.String prints.
func parseID(s string) (ID, error) {
	kind, ordinal, ok := strings.Cut(s, ":")
	if !ok {
		return ID{}, fmt.Errorf("tier: %q is not a space: want tier:number, such as gpu:0", s)
	}
	k, err := ParseKind(kind)
	if err != nil {
		return ID{}, fmt.Errorf("tier: %q is not a space: want tier:number, such as gpu:0", s)
	}
	n, err := strconv.ParseUint(ordinal, 10, 31)
	if err != nil || ordinal != strconv.FormatUint(n, 10) {
		return ID{}, fmt.Errorf("tier: %q is not a space: %q is not a number from 0", s, ordinal)
	}
	return ID{Kind: k, Ordinal: int(n)}, nil
}

// MarshalText prints the id as String does.
func (id ID) MarshalText() ([]byte, error) {
	if !id.Valid() {
		return nil, fmt.Errorf("tier: the space id %s is invalid", id)
	}
	return []byte(id.String()), nil
}

// UnmarshalText parses what MarshalText prints.
func (id *ID) UnmarshalText(b []byte) error {
	v, err := parseID(string(b))
	if err == nil {
		*id = v
	}
	return err
}
