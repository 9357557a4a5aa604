//go:build !invariants

package batch

import (
	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/tier"
)

// holding is a handle's entry in its space's account. It is a part of the handle.
type holding struct{ own books.Hold }

func (h *holding) begin(s *tier.Space, v books.HoldView) { h.own.Begin(s.Books(), v) }

func (h *holding) hold() *books.Hold { return &h.own }

// trace finds handles and transits that were forgotten; only an invariants build
// does.
type trace struct{}

func track[T any](*T, *trace, string, ID) {}

func (trace) end() {}

func (trace) String() string { return "" }
