package cudatest

import "testing"

// Tests on a real GPU run only where somebody wants them.
func TestReal(t *testing.T) {
	t.Setenv(RealVariable, "")
	ran := false
	t.Run("not set", func(t *testing.T) { // is skipped
		Real(t)
		ran = true
	})
	if ran {
		t.Error("a test runs on a real GPU unasked")
	}
	for value, want := range map[string]string{"real": "", "/usr/lib/libcuda.so.1": "/usr/lib/libcuda.so.1"} {
		t.Setenv(RealVariable, value)
		if got := Real(t); got != want {
			t.Errorf("%s=%s: the library is %q, want %q", RealVariable, value, got, want)
		}
	}
}
