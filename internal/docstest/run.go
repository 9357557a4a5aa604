package docstest

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path"
	"slices"
	"strings"
)

// try calls a fragment with all that it may use, each as given says: an engine with little memory,
// repositories of which build and probe have batches, and more. closed says that no batch of build
// is to come. What the fragment has not given back at its end is an error.
const try = `
func try(ctx context.Context, name string, closed bool, f func(PARAMETERS) error) (err error) {
	var eng *spillway.Engine
	defer func() {
		if err = errors.Join(err, eng.Close()); err != nil {
			fmt.Printf("%s: %v\n", name, err)
			failed = true
		}
	}()
	cfg := spillway.Config{
		GPUs: []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(256 << 20)}}, HostMemory: spillway.Bytes(256 << 20),
		Disks: []spillway.DiskConfig{{Capacity: spillway.Bytes(256 << 20)}},
	}
	if eng, err = spillway.Open(ctx, cfg); err != nil {
		return err
	}
	plan, err := eng.Plan("given")
	if err != nil {
		return err
	}
	const partition, partitions = 0, 1
	var repos []*spillway.Repository
	for port := range 5 {
		r, err := plan.Repository("given", port)
		if err != nil {
			return err
		}
		repos = append(repos, r)
	}
	repo, build, probe, runs, groups := repos[0], repos[1], repos[2], repos[3], repos[4]
	scan := iter.Seq2[arrow.RecordBatch, error](func(yield func(arrow.RecordBatch, error) bool) {
		for range 4 {
			b := array.NewInt64Builder(memory.DefaultAllocator)
			b.AppendValues([]int64{1, 2, 3}, nil)
			column := b.NewArray()
			schema := arrow.NewSchema([]arrow.Field{{Name: "x", Type: column.DataType()}}, nil)
			if !yield(array.NewRecordBatch(schema, []arrow.Array{column}, 3), nil) {
				return
			}
		}
	})
	var rec arrow.RecordBatch
	for rec = range scan {
		for _, r := range repos[:3] {
			if err := r.Put(ctx, partition, rec); err != nil {
				return err
			}
		}
	}
	probe.CloseInput()
	if closed {
		build.CloseInput()
	}
	b := slices.Collect(repo.Batches(partition))[0]
	h, err := eng.Mover().Acquire(ctx, b, spillway.AnyInTier(spillway.Host))
	if err != nil {
		return err
	}
	defer h.Close()
	use := func(*spillway.Handle) {}
	shared, err := spillway.NewBudget(1<<30, "shared")
	if err != nil {
		return err
	}
	key := make([]byte, 32)
	log, logger := slog.Default(), slog.Default()
	VALUES
	return f(ARGUMENTS)
}

var failed bool
`

// Program calls fragments of Go code one after the other, in a temporary directory of its own. It
// prints what fails, and ends with 1 then.
type Program struct {
	Dir    string // of the module that it is to be run in, below the root
	Source string
	Calls  int
}

// Programs returns what runs the fragments of pages. Files are not among them, and neither are
// fragments of declarations.
func Programs(pages []Page) ([]Program, error) {
	functions, calls := make(map[string]string), make(map[string][]string) // by directory
	for _, p := range pages {
		for _, b := range p.Blocks {
			if b.Language != "go" {
				continue
			}
			body, err := checked(b.Text())
			if err != nil {
				continue // it is none; Check knows whether it is right
			}
			dir := "."
			for _, n := range nested {
				if strings.Contains(body, path.Base(n.dir)+".") {
					dir = n.dir
				}
			}
			at := fmt.Sprintf("%s:%d", p.Name, b.Lines[0].Number)
			name := fmt.Sprintf("fragment%d", len(calls[dir]))
			functions[dir] += fmt.Sprintf("func %s(PARAMETERS) error {\n{\n//line %s\n%s\n}\nreturn nil\n}\n", name, at, body)
			calls[dir] = append(calls[dir], fmt.Sprintf("try(ctx, %q, %t, %s)\n", at, !strings.Contains(body, "build.Put("), name))
		}
	}
	var programs []Program
	for dir, of := range calls {
		source := try + "func main() {\nctx, cancel := context.WithTimeout(context.Background(), time.Minute)\ndefer cancel()\n" +
			strings.Join(of, "") + "if failed {\nos.Exit(1)\n}\n}\n" + functions[dir]
		parameters, arguments, values := "", "", ""
		imports := make([]string, 0, len(imported))
		for _, name := range imported {
			imports = append(imports, fmt.Sprintf("%q", name))
		}
		for _, n := range nested {
			if n.dir == dir {
				parameters, arguments, values = n.given, n.names, n.values
				imports = append(append(imports, n.imports...), n.forValues...)
			}
		}
		for _, g := range given {
			parameters += g.name + " " + g.of + ", "
			arguments += g.name + ", "
		}
		source = strings.NewReplacer("PARAMETERS", parameters, "ARGUMENTS", arguments, "VALUES", values).Replace(source)
		source, err := withImports(source, imports)
		if err != nil {
			return nil, err
		}
		programs = append(programs, Program{dir, source, len(of)})
	}
	slices.SortFunc(programs, func(a, b Program) int { return cmp.Compare(a.Dir, b.Dir) })
	return programs, nil
}

// checked is the code of a fragment with what pages leave out: each assignment to err is followed by
// its check, unless the next statement is one, and each variable is used. It adds no lines.
func checked(text string) (string, error) {
	const before = "package p\nfunc _() error {\n"
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, "", before+text+"\n}", 0)
	if err != nil {
		return "", err
	}
	type insertion struct {
		at   int
		text string
	}
	var insertions []insertion
	// after is what stands after names were assigned, before the next statement.
	after := func(names []ast.Expr, next ast.Stmt) (text string) {
		for _, e := range names {
			name, ok := e.(*ast.Ident)
			if !ok || name.Name == "_" {
				continue
			}
			text += "; _ = " + name.Name
			if name.Name == "err" && !looksAtErr(next) {
				text += "; if err != nil { return err }"
			} else if name.Name == "cfg" {
				text += "; if err := cfg.Validate(); err != nil { return err }"
			}
		}
		return text
	}
	insert := func(at token.Pos, text string) {
		insertions = append(insertions, insertion{fset.Position(at).Offset - len(before), text})
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.BlockStmt:
			for i, stmt := range n.List {
				if assigned, ok := stmt.(*ast.AssignStmt); ok {
					insert(stmt.End(), after(assigned.Lhs, append(n.List, nil)[i+1]))
				}
			}
		case *ast.RangeStmt:
			if n.Tok == token.DEFINE && len(n.Body.List) > 0 {
				insert(n.Body.Lbrace+1, strings.TrimPrefix(after([]ast.Expr{n.Key, n.Value}, n.Body.List[0])+";", ";"))
			}
		}
		return true
	})
	slices.SortFunc(insertions, func(a, b insertion) int { return cmp.Compare(b.at, a.at) })
	for _, in := range insertions {
		text = text[:in.at] + in.text + text[in.at:]
	}
	return text, nil
}

// looksAtErr reports whether a statement begins with a look at err.
func looksAtErr(stmt ast.Stmt) (looks bool) {
	if test, ok := stmt.(*ast.IfStmt); ok && test.Init == nil {
		ast.Inspect(test.Cond, func(n ast.Node) bool {
			name, ok := n.(*ast.Ident)
			looks = looks || ok && name.Name == "err"
			return true
		})
	}
	return looks
}

// withImports makes a file of package main of source, which imports those packages that it uses.
func withImports(source string, imports []string) (string, error) {
	file, err := parser.ParseFile(token.NewFileSet(), "", "package main\n"+source, 0)
	if err != nil {
		return "", err
	}
	used := make(map[string]bool)
	ast.Inspect(file, func(n ast.Node) bool {
		if selector, ok := n.(*ast.SelectorExpr); ok {
			if name, ok := selector.X.(*ast.Ident); ok {
				used[name.Name] = true
			}
		}
		return true
	})
	head := "package main\n"
	for _, line := range imports {
		name, quoted, renamed := strings.Cut(line, " ")
		if !renamed {
			quoted, name = line, path.Base(strings.Trim(line, `"`))
		}
		if used[name] {
			head += "import " + name + " " + quoted + "\n"
		}
	}
	return head + source, nil
}
