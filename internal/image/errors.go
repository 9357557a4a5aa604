package image

import (
	"errors"
	"fmt"

	"github.com/apache/arrow-go/v18/arrow/endian"

	"github.com/spillway-db/spillway/tier"
)

// ErrInvalid matches every *InvalidError.
var ErrInvalid = errors.New("invalid array")

// InvalidError says that the parts of an array do not fit together, in a record
// that is to be laid out or in a descriptor that is to be opened.
type InvalidError struct {
	Path    string // the column and what is in it, "a.[].b"; empty for the whole
	Problem string
}

func (e *InvalidError) Error() string {
	if e.Path == "" {
		return "convert: invalid record: " + e.Problem
	}
	return fmt.Sprintf("convert: invalid array %s: %s", e.Path, e.Problem)
}

// Is matches ErrInvalid.
func (e *InvalidError) Is(target error) bool { return target == ErrInvalid }

// EndianError says that a schema is not little-endian. Its bytes are not swapped:
// an image is copied as it is. It matches tier.ErrNotSupported.
type EndianError struct{ Endianness endian.Endianness }

func (e *EndianError) Error() string {
	return fmt.Sprintf("convert: a %s-endian schema: only little-endian data is kept", e.Endianness)
}

// Is matches tier.ErrNotSupported.
func (e *EndianError) Is(target error) bool { return target == tier.ErrNotSupported }
