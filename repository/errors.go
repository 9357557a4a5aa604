package repository

import (
	"errors"
	"fmt"

	"github.com/apache/arrow-go/v18/arrow"
)

// Sentinels, to be matched with errors.Is.
var (
	// ErrUnknown: the plan has no repository for that operator and port, or the repository holds no
	// batch of that id.
	ErrUnknown = errors.New("unknown")
	// ErrDuplicate: the plan has a repository for that operator and port already, or the repository
	// a batch of that id.
	ErrDuplicate = errors.New("exists already")
	// ErrPartition: the partition's number is negative or out of range.
	ErrPartition = errors.New("no such partition")
	// ErrClaimed is matched by every ClaimedError.
	ErrClaimed = errors.New("in open claims")
	// ErrSchema is matched by every SchemaError.
	ErrSchema = errors.New("another schema")
	// ErrNoSchema: nothing was put before the input was closed, and no schema was
	// configured, so that there is none to read by.
	ErrNoSchema = errors.New("schema unknown")
	// ErrRowsInUse: a Cursor cannot read on, because the rows that it returned last are retained.
	ErrRowsInUse = errors.New("the rows of the last Next are in use: release them, or call Writer.Copy")
)

// SchemaError reports that something of another schema was put into a repository.
// It matches ErrSchema.
type SchemaError struct {
	Key  Key
	Want *arrow.Schema // the repository's
	Got  *arrow.Schema
}

func (e *SchemaError) Error() string {
	return fmt.Sprintf("repository %s has another schema: %s", e.Key, e.difference())
}

// difference names the first thing in which the schemas differ.
func (e *SchemaError) difference() string {
	if e.Got == nil {
		return "there is none"
	}
	if e.Want.NumFields() != e.Got.NumFields() {
		return fmt.Sprintf("%d columns, want %d", e.Got.NumFields(), e.Want.NumFields())
	}
	for i, want := range e.Want.Fields() {
		if got := e.Got.Field(i); !want.Equal(got) {
			return fmt.Sprintf("column %d is %q, want %q", i, got, want)
		}
	}
	return fmt.Sprintf("%s, want %s", e.Got.Endianness(), e.Want.Endianness())
}

// Is matches ErrSchema.
func (e *SchemaError) Is(target error) bool { return target == ErrSchema }

// ClaimedError reports that batches which a call needs are in open claims of others, or of
// the caller's own. It matches ErrClaimed.
type ClaimedError struct {
	Key       Key
	Partition int
	Claimed   int // batches in open claims
	Batches   int // batches in the partition, those included
}

func (e *ClaimedError) Error() string {
	const text = "repository %s, partition %d: %d of its %d batches are in open claims: " +
		"consume or restore those first"
	return fmt.Sprintf(text, e.Key, e.Partition, e.Claimed, e.Batches)
}

// Is matches ErrClaimed.
func (e *ClaimedError) Is(target error) bool { return target == ErrClaimed }
