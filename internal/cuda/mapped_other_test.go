//go:build !linux

package cuda_test

import "testing"

// mapped is for tests of the emulator, which are skipped here.
func mapped(_ testing.TB, n int) []byte { return make([]byte, n) }

func (r *rig) program() {}
