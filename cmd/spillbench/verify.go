package main

import (
	"context"
	"errors"
	"io"
	"slices"

	"github.com/spf13/cobra"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/input"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/roundtrip"
)

// verifyMemory is larger than run's default: a space must hold a batch twice, and verify doesn't
// choose the size of the batches.
const verifyMemory = 256 << 20

// verifyFlags are the flags of verify.
type verifyFlags struct {
	output       outputFlags
	engine       engineFlags
	rowsPerBatch int64
}

func newVerify(stdout, stderr io.Writer) *cobra.Command {
	var f verifyFlags
	cmd := &cobra.Command{
		Use:   "verify FILE...",
		Short: "Move every batch of files along every edge and back, and compare",
		Long: `Move every batch of files along every edge and back, and compare.

verify moves each batch of each FILE (Parquet, Arrow, CSV) between every pair of
memories for which there is a converter, compares it value by value with the batch
that was read, and prints the first difference. A file without batches is fine if
it can be read; a note says that nothing was verified.

FILE may be a pipe, and - is standard input. An Arrow stream is read as it comes.
The other formats are first copied to a temporary file in TMPDIR.`,
		Example: `  spillbench verify data.parquet
  spillbench verify -                                  # standard input
  spillbench verify *.arrow --rows-per-batch 100000 --gpu-memory 1GiB`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 || slices.Contains(args, "") {
				return fail.Usagef("verify needs a file (spillbench verify FILE...)")
			}
			return stdinOnce(args)
		},
		RunE: func(cmd *cobra.Command, args []string) error { return verify(cmd.Context(), &f, args, stdout, stderr) },
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	fs.Int64Var(&f.rowsPerBatch, "rows-per-batch", 0, "cut the files into batches of `N` rows (default as they have them)")
	f.engine.register(fs, verifyMemory)
	f.output.register(fs)
	return cmd
}

func verify(ctx context.Context, f *verifyFlags, paths []string, stdout, stderr io.Writer) (err error) {
	if f.rowsPerBatch < 0 || f.rowsPerBatch > maxRows {
		return fail.Usagef("--rows-per-batch %d is out of range (want 0 to %d)", f.rowsPerBatch, int64(maxRows))
	}
	out, err := f.output.open(ctx, stdout, stderr, paths...)
	if err != nil {
		return err
	}
	m, err := f.engine.open(ctx, &notes{})
	if err != nil {
		return err
	}
	doc := &report.Verify{Config: m.config}
	doc.Config.RowsPerBatch = f.rowsPerBatch
	failed := f.verifyAll(ctx, m, doc, paths)
	closing := m.engine.Close()
	if err := context.Cause(ctx); err != nil {
		return errors.Join(err, closing)
	}
	m.settle() // whose faults are the document's, too
	doc.Header = report.NewHeader("verify", m.env, m.warnings())
	lines := m.notes.lines()
	// What is wrong with the data goes first: it decides the status.
	err = errors.Join(m.blame(ctx, errors.Join(failed, closing)), out.show(doc, lines))
	if err == nil {
		out.warn(lines)
	}
	return err
}

// verifyAll fills in the document, file by file, and returns what the command
// ends with: what is wrong with data before what is wrong otherwise.
func (f *verifyFlags) verifyAll(ctx context.Context, m *machine, doc *report.Verify, paths []string) error {
	edges, unknown := roundtrip.Edges(m.engine)
	for _, u := range unknown {
		m.notes.add(u, "not verified, as it is between types of its own: "+u)
	}
	var wrong, failed error
	for _, path := range paths {
		res, err := f.verifyFile(ctx, m, edges, path)
		path = input.Name(path)
		file := report.File{Path: path, Batches: res.Batches, Edges: res.Edges, Mismatches: res.Mismatches}
		switch {
		case res.First != nil:
			file.Error = fail.Line(res.First)
		case err != nil:
			file.Error = fail.Line(err)
		}
		doc.Files = append(doc.Files, file)
		if err == nil && res.Batches == 0 {
			m.notes.add("no batches in "+path, path+" holds no batches: it can be read, and nothing was verified")
		}
		if res.First != nil && wrong == nil {
			wrong = fail.Wrongf("%d differences in %s; the first: %w", res.Mismatches, path, res.First)
		}
		if failed == nil {
			failed = err
		}
		if ctx.Err() != nil {
			break
		}
	}
	if wrong != nil {
		return wrong
	}
	return failed
}

func (f *verifyFlags) verifyFile(ctx context.Context, m *machine, edges []roundtrip.Edge, path string) (res roundtrip.Result, err error) {
	src, err := input.Open(ctx, path, m.reading(f.rowsPerBatch))
	if err != nil {
		return res, err
	}
	defer func() { err = errors.Join(err, src.Close()) }()
	return roundtrip.Run(ctx, m.engine, edges, src.Path(), src)
}
