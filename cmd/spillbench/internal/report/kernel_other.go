//go:build !linux

package report

import "runtime"

func kernel() string { return runtime.GOOS }
