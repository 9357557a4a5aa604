package cuda_test

import (
	"go/build"
	"slices"
	"testing"
)

// In each build there are the driver's functions once, and the tests know whose they are: the tag
// gorgonia has an effect only where gorgonia.org/cu can be built, with cgo on Linux.
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
		p, err := ctx.ImportDir(".", 0)
		ok(t, err)
		built := slices.Concat(p.GoFiles, p.CgoFiles)
		gorgonia, purego := slices.Contains(built, "calls_gorgonia_unsafe.go"), slices.Contains(built, "calls_purego_unsafe.go")
		if gorgonia != c.cu || purego == c.cu {
			t.Errorf("%+v: the file for cu is built: %v, the one for purego: %v", c, gorgonia, purego)
		}
	}
}
