package archtest

import (
	"fmt"
	"slices"
	"strings"
)

const module = "github.com/spillway-db/spillway"

// layout lists the public packages, and those of internal that import any of them. A package
// may import those above it, and what else is in internal; a new one must be given its place
// here. The root package is ".".
var layout = []string{
	"diag",
	"internal/causes",
	"topology",
	"tier",
	"events",
	"internal/payload",
	"internal/devpool",
	"tier/tiertest",
	"internal/host",
	"internal/sim",
	"tier/sim",
	"tier/cuda",
	"tier/disk",
	"internal/volumes",
	"tier/disk/faultfs",
	"test/testfs",
	"test/nvmltest",
	"tier/faultdev",
	"reservation",
	"reservation/arrowmem",
	"reservation/permit",
	"reservation/admission",
	"reservation/quota",
	"internal/leases",
	"batch",
	"internal/codec",
	"internal/image",
	"internal/image/imagetest",
	"internal/transfer",
	"convert",
	"internal/persist",
	"convert/cdevice",
	"repository",
	"internal/decide",
	"monitor",
	".",
	"tier/cuda/gorgonia",
	"observe/timeline",
	"observe/page",
	"observe/internal/metrics",
	"observe/httpui",
	"test/browser",
	"test/busyengine",
	"test",
	"test/differential",
	"topology/gonvml",
}

// testRigs are what tests of any package may use besides: the suites that
// backends are held to, and the backends to test with.
var testRigs = []string{"topology/gonvml", "test/browser", "test/busyengine", "test/nvmltest", "tier/tiertest", "internal/image/imagetest", "internal/devpool", "internal/sim", "tier/sim", "tier/cuda", "internal/host", "tier/disk", "internal/volumes", "tier/disk/faultfs", "test/testfs", "tier/faultdev"}

// testOnly are the packages of the layout that only tests may import.
var testOnly = []string{"test/browser", "test/busyengine", "tier/tiertest", "test/testfs", "test/nvmltest", "internal/image/imagetest"}

// programsMay lists the public packages that commands may import. The backends
// that hold memory are not among them: the root package alone wires those.
var programsMay = []string{"diag", "topology", "topology/gonvml", "tier", "events", "tier/disk", "tier/disk/faultfs", "tier/faultdev", "reservation", "reservation/arrowmem", "reservation/admission", "reservation/permit", "reservation/quota", "batch", "convert", "repository", "monitor", ".", "observe/timeline", "observe/page"}

// rootMay lists the packages of internal that the root package alone wires, of all that programs
// could import.
var rootMay = []string{"internal/host", "internal/sim"}

// examplesMay lists the public packages that examples may import: those that
// an embedder does.
var examplesMay = []string{"diag", "topology", "topology/gonvml", "tier", "events", "reservation", "reservation/arrowmem", "reservation/admission", "reservation/permit", "reservation/quota", "batch", "convert", "convert/cdevice", "repository", "monitor", ".", "observe/httpui"}

// embedded lists what the build of a program that imports the root package may contain besides the
// module's own packages, as prefixes of import paths. The exporters, the pages, the command and the
// tests have dependencies of their own, which must not appear here.
var embedded = []string{
	"github.com/apache/arrow-go/v18/",
	"github.com/ebitengine/purego",
	"github.com/google/btree",
	"github.com/klauspost/compress/",
	"github.com/parquet-go/bitpack",
	"github.com/zeebo/xxh3",
	"golang.org/x/sys/",
}

// embedding is the file that shows what most programs need, with one import of the module's.
const embedding = "example_test.go"

// checkImport returns why the package from (its directory below the root of the
// module) may not import the package to; empty if it may.
func checkImport(from, to string, inTest bool) string {
	place := slices.Index(layout, to)
	if from == to || isInternal(to) && place < 0 || isInternal(from) && inTest {
		return "" // that internal packages do not import each other in a circle, the compiler sees to
	}
	if place < 0 {
		return fmt.Sprintf("%s is not a package of the layout that others may import", to)
	}
	if inTest && slices.Contains(testRigs, to) {
		return ""
	}
	if slices.Contains(testOnly, to) {
		return fmt.Sprintf("%s is for tests", to)
	}

	top, _, _ := strings.Cut(from, "/")
	outside, _, inside := strings.Cut(from, "/internal/")
	switch {
	case top == "internal" && !slices.Contains(layout, outside):
		return fmt.Sprintf("%s is internal, has no place in the layout and may not import %s", from, to)
	case isInternal(to) && (top == "cmd" || top == "examples") && !slices.Contains(rootMay, to):
		return "" // as with any other of internal
	case top == "cmd":
		if !slices.Contains(programsMay, to) {
			return fmt.Sprintf("a command may not import %s: the root package does", to)
		}
	case top == "examples":
		if !slices.Contains(examplesMay, to) {
			return fmt.Sprintf("an example may not import %s", to)
		}
	default:
		own := slices.Index(layout, from)
		if own < 0 && inside { // its package's place, below that package
			own = slices.Index(layout, outside) - 1
		}
		if own < 0 {
			return fmt.Sprintf("%s has no place in the layout", from)
		}
		if place > own {
			return fmt.Sprintf("the arrow from %s to %s points down the layout", from, to)
		}
	}
	return ""
}

// isInternal says whether the package is inside of a directory "internal".
func isInternal(dir string) bool { return slices.Contains(strings.Split(dir, "/"), "internal") }
