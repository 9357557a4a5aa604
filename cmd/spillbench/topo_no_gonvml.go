//go:build !gonvml || !cgo || windows

package main

import (
	"context"

	"github.com/spillway-db/spillway/topology"
)

// goNVML is set in builds with the tag gonvml. A program that links go-nvml does not start where the
// dynamic linker binds all symbols at once, so other builds do without.
var goNVML func(context.Context) ([]topology.GPU, error)
