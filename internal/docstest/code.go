package docstest

import (
	"bytes"
	"cmp"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// given are the names that fragments of Go code may use without declaring them. A page that uses one
// says what it is, or the name does.
var given = []struct{ name, of string }{
	{"ctx", "context.Context"},
	{"eng", "*spillway.Engine"},
	{"plan", "*spillway.Plan"},
	{"repo, build, probe, runs, groups", "*spillway.Repository"},
	{"rec", "arrow.RecordBatch"},
	{"scan", "iter.Seq2[arrow.RecordBatch, error]"},
	{"b", "*spillway.Batch"},
	{"h", "*spillway.Handle"},
	{"partition, partitions", "int"},
	{"use", "func(*spillway.Handle)"},
	{"shared", "*spillway.Budget"},
	{"key", "[]byte"},
	{"log, logger", "*slog.Logger"},
	{"cfg", "spillway.Config"},
}

// nested are modules of this repository that programs import, with what fragments may use where a
// page uses them.
var nested = []struct {
	dir           string
	imports       []string
	given         string
	names, values string   // those of given, and code that makes them
	forValues     []string // imports of that
}{
	{
		"observe/spillwayprom",
		[]string{`"` + module + `/observe/spillwayprom"`, `"github.com/prometheus/client_golang/prometheus"`},
		"registry *prometheus.Registry, ", "registry, ", "registry := prometheus.NewRegistry()", nil,
	},
	{
		"observe/spillwayotel",
		[]string{`"` + module + `/observe/spillwayotel"`, `"go.opentelemetry.io/otel/metric"`, `"go.opentelemetry.io/otel/trace"`},
		"meterProvider metric.MeterProvider, tracerProvider trace.TracerProvider, ", "meterProvider, tracerProvider, ",
		"meterProvider, tracerProvider := nometrics.NewMeterProvider(), notraces.NewTracerProvider()",
		[]string{`nometrics "go.opentelemetry.io/otel/metric/noop"`, `notraces "go.opentelemetry.io/otel/trace/noop"`},
	},
}

// imported are the packages that fragments may use without importing them, by their names.
var imported = []string{
	"context", "errors", "fmt", "io", "iter", "log/slog", "net/http", "os", "slices", "syscall", "time",
	"github.com/apache/arrow-go/v18/arrow", "github.com/apache/arrow-go/v18/arrow/array", "github.com/apache/arrow-go/v18/arrow/memory",
	module, module + "/batch", module + "/convert", module + "/convert/cdevice", module + "/events", module + "/observe/httpui", module + "/monitor", module + "/repository",
	module + "/reservation", module + "/reservation/admission", module + "/reservation/arrowmem",
	module + "/reservation/budget", module + "/reservation/permit", module + "/reservation/quota", module + "/tier",
	module + "/tier/cuda", module + "/tier/disk", module + "/tier/disk/faultfs", module + "/tier/faultdev", module + "/topology",
}

const module = "github.com/spillway-db/spillway"

// Checker checks Go code of pages against the module's packages.
type Checker struct {
	fset    *token.FileSet
	imports types.Importer
	nested  map[string]bool // those that there are
}

// NewChecker asks the go tool for the packages of the module whose root is a directory.
func NewChecker(root string) (*Checker, error) {
	files := make(map[string]string)
	add := func(dir string, packages ...string) error {
		list := exec.Command("go", append([]string{"list", "-export", "-deps", "-f", "{{.ImportPath}} {{.Export}}"}, packages...)...)
		list.Dir = dir
		var failed bytes.Buffer
		list.Stderr = &failed
		out, err := list.Output()
		if err != nil {
			return fmt.Errorf("%w: %s", err, failed.String())
		}
		for line := range strings.Lines(string(out)) {
			if name, file, _ := strings.Cut(strings.TrimSpace(line), " "); files[name] == "" {
				files[name] = file
			}
		}
		return nil
	}
	if err := add(root, append([]string{"log"}, imported...)...); err != nil {
		return nil, err
	}
	c := &Checker{fset: token.NewFileSet(), nested: make(map[string]bool)}
	for _, n := range nested {
		if _, err := os.Stat(filepath.Join(root, n.dir, "go.mod")); err != nil {
			continue
		}
		if err := add(filepath.Join(root, n.dir), "."); err != nil {
			return nil, err
		}
		c.nested[n.dir] = true
	}
	c.imports = importer.ForCompiler(c.fset, "gc", func(name string) (io.ReadCloser, error) {
		if files[name] == "" {
			return nil, fmt.Errorf("no page may import %s: add it to the list in code.go", name)
		}
		return os.Open(files[name])
	})
	return c, nil
}

// Check returns what the compiler would say of a block of Go code: of a file as it is, and of a
// fragment as if it were the body of a function whose parameters are the given names. What a
// fragment does not use is no mistake.
func (c *Checker) Check(name string, b Block) []string {
	text := b.Text()
	first := 0
	if len(b.Lines) > 0 {
		first = b.Lines[0].Number
	}
	// A line directive makes the compiler speak of lines of the page.
	at := fmt.Sprintf("//line %s:%d\n", name, first)
	whole := slices.ContainsFunc(b.Lines, func(l Line) bool { return strings.HasPrefix(l.Text, "package ") })
	source := at + text
	if !whole {
		var head strings.Builder
		head.WriteString("package fragment\n")
		for _, p := range imported {
			fmt.Fprintf(&head, "import %q\n", p)
		}
		params := ""
		for _, n := range nested {
			if c.nested[n.dir] && strings.Contains(text, path.Base(n.dir)+".") {
				head.WriteString("import (\n" + strings.Join(n.imports, "\n") + "\n)\n")
				params += n.given
			}
		}
		head.WriteString("func _(" + params)
		for _, g := range given {
			if strings.HasPrefix(g.name, "log") && strings.Contains(text, "log.Fatal") {
				continue
			}
			head.WriteString(g.name + " " + g.of + ", ")
		}
		source = head.String() + ") error {\n{\n" + at + text + "\n}\nreturn nil\n}\n"
		if _, err := parser.ParseFile(c.fset, name, source, 0); err != nil { // declarations, perhaps
			declared := head.String()
			declared = declared[:strings.Index(declared, "func _(")] + at + text
			if _, err := parser.ParseFile(c.fset, name, declared, 0); err == nil {
				source = declared
			}
		}
	}
	file, err := parser.ParseFile(c.fset, name, source, parser.ParseComments)
	if err != nil {
		return []string{err.Error()}
	}
	var wrong []string
	conf := types.Config{
		Importer: c.imports, GoVersion: "go1.26",
		Error: func(err error) {
			if e, ok := err.(types.Error); !ok || whole || !e.Soft {
				wrong = append(wrong, err.Error())
			}
		},
	}
	if whole {
		name = path.Join(name, file.Name.Name)
	}
	_, _ = conf.Check(name, c.fset, []*ast.File{file}, nil) // Error has got what is wrong
	return wrong
}

// goName is a name of a package and perhaps a field or method of it, as tier.Space.SetMarks, or a
// field or method of a type of the root package, as Engine.Reserve. Other text may follow, such as
// arguments.
var goName = regexp.MustCompile(`^(?:([a-z]\w*)\.)?([A-Z]\w*)(?:\.([A-Z]\w*))?\b`)

// Identifiers returns the names of this module's packages that a page has between backquotes, and
// that do not exist. It checks the packages that code of pages may import.
func (c *Checker) Identifiers(p Page) []string {
	packages := make(map[string]*types.Package)
	for _, name := range imported {
		if pkg, err := c.imports.Import(name); err == nil && strings.HasPrefix(name, module) {
			packages[pkg.Name()] = pkg
		}
	}
	var wrong []string
	for _, l := range p.Prose {
		for _, code := range inlineCode.FindAllStringSubmatch(l.Text, -1) {
			m := goName.FindStringSubmatch(code[1])
			if m == nil || m[1] == "" && m[3] == "" {
				continue
			}
			pkg := packages[cmp.Or(m[1], "spillway")]
			if pkg == nil {
				continue
			}
			object := pkg.Scope().Lookup(m[2])
			if object == nil && m[1] == "" {
				continue // a type of another package
			}
			if object != nil && m[3] != "" {
				object, _, _ = types.LookupFieldOrMethod(object.Type(), true, pkg, m[3])
			}
			if object == nil {
				wrong = append(wrong, fmt.Sprintf("%s:%d: %s: no such name", p.Name, l.Number, m[0]))
			}
		}
	}
	return wrong
}
