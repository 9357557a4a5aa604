package fail

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"syscall"
	"testing"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/headroom"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// wrongFile is what *input.Error is.
type wrongFile struct{ error }

func (e wrongFile) Unwrap() error { return e.error }

func (wrongFile) Misuse() {}

// TestStatus: each kind of error has its status and its advice, on one line,
// wherever in a chain it stands.
func TestStatus(t *testing.T) {
	gpu, disk := tier.ID{Kind: tier.GPU}, tier.ID{Kind: tier.Disk}
	for _, c := range []struct {
		err    error
		status int
		want   string
	}{
		{nil, 0, ""},
		{Usagef("no such thing"), 2, "no such thing"},
		{Wrongf("rows differ"), 1, "rows differ"},
		{Environmentf("no device"), 3, "no device"},
		{&Error{Status: 3, Err: io.EOF, Fix: "try again"}, 3, "EOF (try again)"},
		{wrongFile{errors.New("is empty")}, 2, "is empty"},
		{&convert.CorruptError{Batch: 3}, 1, ""},
		{errors.Join(&tier.NoSpaceError{Space: gpu}, &convert.CorruptError{}), 1, ""},
		{&tier.NoSpaceError{Space: disk, Requested: 10}, 3, "give --disk DIR=SIZE more room"},
		{&tier.NoSpaceError{Space: gpu, Requested: 10}, 3, "--disk DIR=SIZE more room, or raise --gpu-memory"},
		{&reservation.ExceededError{Space: tier.ID{Kind: tier.Host}}, 3, "--rows-per-batch, or raise --host-memory"},
		{fmt.Errorf("opening: %w", tier.ErrNoSpace), 3, "--disk"},
		{errors.Join(&tier.NoSpaceError{Space: gpu}, &tier.LostError{Space: gpu, Cause: io.EOF}), 3, "gpu:0 is lost"},
		{&tier.OutOfBudgetError{Budget: "the quota"}, 3, "raise SPILLWAY_GPU_MEMORY_LIMIT"},
		{&tier.NoSpaceError{Space: gpu, Cause: &tier.OutOfBudgetError{}}, 3, "raise SPILLWAY_GPU_MEMORY_LIMIT"},
		{&tier.NoSpaceError{Space: disk, Cause: syscall.EDQUOT}, 3, "have your disk quota raised"},
		{&tier.NoSpaceError{Space: disk, Cause: syscall.EFBIG}, 3, "raise the limit of file sizes (ulimit -f)"},
		{&tier.NoSpaceError{Space: gpu, Hint: fmt.Sprint("batches cannot be moved down: ", syscall.EFBIG)}, 3,
			"raise the limit of file sizes (ulimit -f)"},
		{&tier.NoSpaceError{Space: disk, Cause: syscall.ENOSPC}, 3, "give --disk DIR=SIZE more room"},
		{&headroom.TooSmallError{Spaces: 1 << 30, Limit: 1 << 30, Source: "memory.max", Fit: 900 << 20}, 3,
			"--host-memory 900.0 MiB together at most"},
		{&headroom.TooSmallError{Limit: 1 << 20, Source: "memory.max"}, 3, "give the process more memory"},
		{wrongFile{&headroom.FullError{Requested: 1 << 20}}, 3, "--rows-per-batch"},
		{errors.New("anything\nelse"), 3, "anything else"},
		{errors.New("no\x1b[31m \u202efile"), 3, `no\x1b[31m \u202efile`},
	} {
		for _, err := range []error{c.err, wrap(c.err)} {
			if got := Status(err); got != c.status {
				t.Errorf("%v has status %d, want %d", err, got, c.status)
			}
			if err == nil {
				continue
			}
			if got := Line(err); !strings.Contains(got, c.want) || strings.Contains(got, "\n") {
				t.Errorf("%v is told as %q, want %q", err, got, c.want)
			}
			if got := Line(err); c.status == 3 &&
				(strings.Contains(c.want, "quota") || strings.Contains(c.want, "ulimit")) &&
				strings.Contains(got, "more room") {
				t.Errorf("%v is told as %q, and more room does not help", err, got)
			}
			if got := Line(err); errors.Is(err, tier.ErrLost) && strings.Contains(got, "--") {
				t.Errorf("%v is told as %q, and no flag helps", err, got)
			}
		}
	}
}

func wrap(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("running: %w", err)
}
