package archtest

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/format"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// source is one Go file of the module.
type source struct {
	path    string // below the root of the module
	text    []byte
	test    bool // it is compiled into tests only
	pkg     string
	doc     string
	imports []string
}

func (s source) dir() string { return path.Dir(s.path) }

// inEngine reports whether the file is part of what a program embeds: no test, no rig of tests, no command.
func (s source) inEngine() bool {
	top, _, _ := strings.Cut(s.path, "/")
	return !s.test && top != "cmd" && top != "examples" && top != "scripts" &&
		!strings.HasSuffix(s.dir(), "test") && !slices.Contains(testOnly, s.dir())
}

// moduleRoot returns the directory of go.mod above the working directory.
func moduleRoot(t *testing.T) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
		if dir == filepath.Dir(dir) {
			t.Fatal("there is no go.mod above the working directory")
		}
		dir = filepath.Dir(dir)
	}
}

// load parses all Go files of the module, whatever they are built for. What the
// go command does not look into is left out: testdata, names that begin with a
// dot or an underscore, modules of their own.
func load(fsys fs.FS) ([]source, error) {
	var files []source
	err := fs.WalkDir(fsys, ".", func(p string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := e.Name()
		if e.IsDir() {
			if p == "." {
				return nil
			}
			if name[0] == '.' || name[0] == '_' || name == "testdata" || name == "vendor" {
				return fs.SkipDir
			}
			if _, err := fs.Stat(fsys, path.Join(p, "go.mod")); err == nil {
				return fs.SkipDir
			}
			return nil
		}
		if path.Ext(name) != ".go" || name[0] == '.' || name[0] == '_' {
			return nil
		}
		file, err := parse(fsys, p)
		if err != nil {
			return err
		}
		files = append(files, file)
		return nil
	})
	return files, err
}

func parse(fsys fs.FS, p string) (source, error) {
	text, err := fs.ReadFile(fsys, p)
	if err != nil {
		return source{}, err
	}
	f, err := parser.ParseFile(token.NewFileSet(), p, text, parser.ImportsOnly|parser.ParseComments)
	if err != nil {
		return source{}, err
	}
	s := source{path: p, text: text, test: strings.HasSuffix(p, "_test.go"), pkg: f.Name.Name, doc: f.Doc.Text()}
	for _, i := range f.Imports {
		imported, err := strconv.Unquote(i.Path.Value)
		if err != nil {
			return source{}, fmt.Errorf("%s: %w", p, err)
		}
		s.imports = append(s.imports, imported)
	}
	return s, nil
}

// importRule holds every import of the module's own packages against the
// layout.
func importRule(files []source) []string {
	var broken []string
	for _, f := range files {
		for _, i := range f.imports {
			to, own := strings.CutPrefix(i, module)
			if !own || to != "" && to[0] != '/' {
				continue
			}
			if to = strings.TrimPrefix(to, "/"); to == "" {
				to = "."
			}
			if why := checkImport(f.dir(), to, f.test); why != "" {
				broken = append(broken, f.path+": "+why)
			}
			if f.path == embedding && to != "." {
				broken = append(broken, fmt.Sprintf("%s: it imports %s, and the root package is to be enough", f.path, to))
			}
		}
	}
	return broken
}

// goNVML needs cgo, and a program that links it needs options of the linker.
const goNVML = "github.com/NVIDIA/go-nvml/"

// goNVMLRule keeps go-nvml out of all packages but its adapter and the command, so that no program
// links it unless its author wants to.
func goNVMLRule(files []source) []string {
	var broken []string
	for _, f := range files {
		may := f.test || f.dir() == "topology/gonvml" || f.dir() == "cmd/spillbench"
		for _, i := range f.imports {
			if strings.HasPrefix(i, goNVML) && !may {
				broken = append(broken, fmt.Sprintf("%s: it imports %s, which topology/gonvml does", f.path, i))
			}
		}
	}
	return broken
}

// embeddedRule keeps everything out of the root package's build that an embedding program does not
// need. It follows imports from the root package through the module, for all platforms and tags.
func embeddedRule(files []source) []string {
	of := make(map[string][]source) // by directory
	for _, f := range files {
		if !f.test {
			of[f.dir()] = append(of[f.dir()], f)
		}
	}
	var broken []string
	reached := []string{"."}
	for n := 0; n < len(reached); n++ {
		for _, f := range of[reached[n]] {
			for _, i := range f.imports {
				host, _, _ := strings.Cut(i, "/")
				to, own := strings.CutPrefix(i, module+"/")
				top, _, _ := strings.Cut(to, "/")
				allowed := slices.ContainsFunc(embedded, func(prefix string) bool { return strings.HasPrefix(i, prefix) })
				switch {
				case !own && strings.Contains(host, ".") && !allowed,
					own && slices.Contains([]string{"cmd", "observe", "scripts", "test"}, top):
					broken = append(broken, fmt.Sprintf("%s: %s reaches the build of every program that embeds the engine", f.path, i))
				case own && !slices.Contains(reached, to):
					reached = append(reached, to)
				}
			}
		}
	}
	return broken
}

// layoutRule wants a place in the layout for every public package. Programs have none: nothing
// imports them, and those of scripts import nothing of the module.
func layoutRule(files []source) []string {
	var broken []string
	for _, f := range files {
		dir := f.dir()
		top, _, _ := strings.Cut(dir, "/")
		if isInternal(dir) || top == "cmd" || top == "examples" || top == "scripts" || slices.Contains(layout, dir) {
			continue
		}
		line := dir + ": the package has no place in the layout"
		if !slices.Contains(broken, line) {
			broken = append(broken, line)
		}
	}
	return broken
}

// formatRule wants files as gofmt leaves them.
func formatRule(files []source) []string {
	var broken []string
	for _, f := range files {
		formatted, err := format.Source(f.text)
		switch {
		case err != nil:
			broken = append(broken, fmt.Sprintf("%s: %v", f.path, err))
		case !bytes.Equal(formatted, f.text):
			broken = append(broken, f.path+": gofmt would change it")
		}
	}
	return broken
}

// docRule wants a package doc in every package, in one of its own files, and
// in the words that go doc expects.
func docRule(files []source) []string {
	want := map[string]string{} // directory → package
	has := map[string]bool{}
	for _, f := range files {
		if f.test {
			if _, ok := want[f.dir()]; !ok {
				want[f.dir()] = strings.TrimSuffix(f.pkg, "_test")
			}
			continue
		}
		want[f.dir()] = f.pkg
		if f.pkg == "main" {
			has[f.dir()] = has[f.dir()] || strings.HasPrefix(f.doc, "Command "+path.Base(f.dir())+" ") || strings.HasPrefix(f.doc, "Package main ")
		} else {
			has[f.dir()] = has[f.dir()] || strings.HasPrefix(f.doc, "Package "+f.pkg+" ")
		}
	}
	var broken []string
	for dir, pkg := range want {
		if !has[dir] {
			broken = append(broken, fmt.Sprintf("%s: no file of it says what package %s is for", dir, pkg))
		}
	}
	slices.Sort(broken)
	return broken
}

// unsafeRule wants "unsafe" only in files that are named for it, and imported
// there.
func unsafeRule(files []source) []string {
	var broken []string
	for _, f := range files {
		named := strings.HasSuffix(f.path, "_unsafe.go") || strings.HasSuffix(f.path, "_unsafe_test.go")
		imports := slices.Contains(f.imports, "unsafe")
		switch {
		case imports && !named:
			broken = append(broken, f.path+`: imports "unsafe", which is for files named *_unsafe.go`)
		case named && !imports:
			broken = append(broken, f.path+`: named *_unsafe.go without importing "unsafe"`)
		}
	}
	return broken
}

// labelRule wants every goroutine of an engine to begin with its label: see internal/labels. Rigs of
// tests, whose packages are called so, need none.
func labelRule(files []source) []string {
	return inspectEngine(files, func(n ast.Node) string {
		var begins ast.Expr // what runs as a goroutine
		switch n := n.(type) {
		case *ast.GoStmt:
			begins = n.Call.Fun
		case *ast.CallExpr:
			called, ok := n.Fun.(*ast.SelectorExpr)
			if ok && (called.Sel.Name == "Go" && len(n.Args) == 1 ||
				called.Sel.Name == "AfterFunc" && len(n.Args) == 2) {
				begins = n.Args[len(n.Args)-1]
			}
		}
		if begins != nil && !setsLabel(begins) {
			return "the goroutine does not begin with labels.….Set()"
		}
		return ""
	})
}

// kindRule wants that only package tier compares a Kind with a constant, so that another tier is a row
// of its table.
func kindRule(files []source) []string {
	isConstant := func(e ast.Expr) bool {
		s, ok := e.(*ast.SelectorExpr)
		if !ok {
			return false
		}
		from, ok := s.X.(*ast.Ident)
		return ok && from.Name == "tier" && slices.Contains([]string{"GPU", "Host", "Disk"}, s.Sel.Name)
	}
	return inspectEngine(files, func(n ast.Node) string {
		compares := false
		switch n := n.(type) {
		case *ast.BinaryExpr:
			compares = isConstant(n.X) || isConstant(n.Y)
		case *ast.CaseClause:
			compares = slices.ContainsFunc(n.List, isConstant)
		}
		if compares {
			return "a Kind is compared with a constant: ask it, as by IsStorage"
		}
		return ""
	})
}

// inspectEngine calls rule for each node of the engine's files, and returns what it finds wrong, with its
// place.
func inspectEngine(files []source, rule func(n ast.Node) string) (broken []string) {
	for _, f := range files {
		if !f.inEngine() {
			continue
		}
		set := token.NewFileSet()
		tree, err := parser.ParseFile(set, f.path, f.text, parser.SkipObjectResolution)
		if err != nil {
			broken = append(broken, fmt.Sprintf("%s: %v", f.path, err))
			continue
		}
		ast.Inspect(tree, func(n ast.Node) bool {
			if text := rule(n); text != "" {
				broken = append(broken, fmt.Sprintf("%s: %s", set.Position(n.Pos()), text))
			}
			return true
		})
	}
	return broken
}

// setsLabel reports whether a function is written here, and begins with labels.….Set().
func setsLabel(f ast.Expr) bool {
	written, ok := f.(*ast.FuncLit)
	if !ok || len(written.Body.List) == 0 {
		return false
	}
	first, ok := written.Body.List[0].(*ast.ExprStmt)
	if !ok {
		return false
	}
	call, ok := first.X.(*ast.CallExpr)
	if !ok {
		return false
	}
	set, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || set.Sel.Name != "Set" {
		return false
	}
	label, ok := set.X.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	from, ok := label.X.(*ast.Ident)
	return ok && from.Name == "labels"
}
