package transfer

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"testing"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/pump"
)

// TestWhosePanic: a panic of a transfer is the batch's failure. That of a program's file system,
// which comes as an error, is the volume's, and what it says is kept.
func TestWhosePanic(t *testing.T) {
	ofDisk := &guard.PanicError{What: "the file system's ReadAt", Value: syscall.EIO}
	for name, c := range map[string]struct {
		f    func() error
		mine bool
	}{
		"a panic":                  {func() error { panic("boom") }, true},
		"of the file system":       {func() error { return ofDisk }, false},
		"of the file system, told": {func() error { return fmt.Errorf("reading: %w", ofDisk) }, false},
	} {
		err := run(t.Context(), pump.Job[struct{}]{Pieces: 3, Lanes: 2, Do: func(context.Context, struct{}, int) error { return c.f() }})
		if errors.Is(err, batch.ErrUnmovable) != c.mine || errors.Is(err, syscall.EIO) == c.mine {
			t.Errorf("%s: %v", name, err)
		}
	}
}
