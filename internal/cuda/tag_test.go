package cuda_test

import (
	"go/build"
	"slices"
	"testing"
)

// In each build there are the driver's functions once, and the tests know whose they are: the tag gorgonia has an effect only
// where gorgonia.org/cu can be built, with cgo on Linux.
func TestTagGorgonia(t *testing.T) {
	for _, c := range []struct {
		goos, goarch string
		cgo, tag, cu bool
	}{
		{"linux", "amd64", true, true, true},
		{"linux", "arm64", true, true, true},
		{"linux", "amd64", true, false, false},
		{"linux", "amd64", false, true, false},
		{"linux", "riscv64", true, true, false},
		{"darwin", "arm64", true, true, false},
		{"darwin", "arm64", false, true, false},
		{"windows", "amd64", true, true, false},
	} {
		ctx := build.Default
		ctx.GOOS, ctx.GOARCH, ctx.CgoEnabled, ctx.BuildTags = c.goos, c.goarch, c.cgo, nil
		if c.tag {
			ctx.BuildTags = []string{"gorgonia"}
		}
		for dir, files := range map[string][2]string{
			".":        {"calls_gorgonia_unsafe.go", "calls_purego_unsafe.go"},
			"cudatest": {"linked_gorgonia.go", "linked.go"},
		} {
			p, err := ctx.ImportDir(dir, 0)
			ok(t, err)
			built := slices.Concat(p.GoFiles, p.CgoFiles)
			if with, without := slices.Contains(built, files[0]), slices.Contains(built, files[1]); with != c.cu || without == c.cu {
				t.Errorf("%+v: %s is built: %v, %s: %v", c, files[0], with, files[1], without)
			}
		}
	}
}
