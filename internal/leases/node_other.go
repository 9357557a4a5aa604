//go:build !linux && !darwin

package leases

import (
	"fmt"
	"os"
	"sync/atomic"

	"github.com/spillway-db/spillway/tier"
)

// node is a GPU's directory in a ledger, which there cannot be here.
type node struct {
	generation *atomic.Int64
	genFile    *os.File
	genID      fileID
}

type fileID struct{}

type ownLease struct {
	words
	name string
	head head
	id   fileID
	file *os.File
}

type peer struct {
	name, group string
	head        head
	words       words
}

func openNode(string, string, bool) (*node, error) {
	return nil, fmt.Errorf("this system has no such file locks: %w", tier.ErrNotSupported)
}

func (n *node) close() error                                  { return nil }
func (n *node) lock() (func(), error)                         { return nil, tier.ErrNotSupported }
func (n *node) leases() ([]string, error)                     { return nil, tier.ErrNotSupported }
func (n *node) create(string, head, int64) (*ownLease, error) { return nil, tier.ErrNotSupported }
func (n *node) has(string, fileID) bool                       { return true }
func isUnlinked(*os.File) bool                                { return false }
func (n *node) checkGeneration() error                        { return nil }
func (n *node) remove(string) error                           { return tier.ErrNotSupported }
func (n *node) open(string) (*peer, error)                    { return nil, tier.ErrNotSupported }
func (n *node) alive(*peer) bool                              { return false }
func (n *node) reap(string)                                   {}
func (n *node) sweep()                                        {}

func (l *ownLease) close() {}
func (p *peer) close()     {}

// Strangers are not there without a shared ledger.
func Strangers(string) ([]string, error) { return nil, nil }

// Share is not there without the locks.
func Share(string, ...string) error {
	return fmt.Errorf("this system has no such file locks: %w", tier.ErrNotSupported)
}
