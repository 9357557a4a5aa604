//go:build (darwin || freebsd) && !race

package host

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/spillway-db/spillway/internal/extent"
)

const noReserve = 0 // the default of these systems

func (m *mapped) huge() error    { return errors.ErrUnsupported }
func (m *mapped) bind(int) error { return nil } // none of these machines has two nodes

// lock: mlock would make all pages present at once.
func (m *mapped) lock([]byte) error { return errors.ErrUnsupported }

func (m *mapped) Touch(b []byte) error {
	if !poison { // a hidden page would fault
		extent.Touch(b)
	}
	return nil
}

func (m *mapped) discard(b []byte) error { return unix.Madvise(b, unix.MADV_FREE) }
