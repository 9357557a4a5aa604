//go:build gonvml && cgo && !windows

package main

import (
	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/spillway-db/spillway/topology/gonvml"
)

// goNVML lists GPUs through go-nvml.
var goNVML = gonvml.GPUs(nvml.New())
