package main

import (
	"cmp"
	"errors"

	"github.com/spf13/cobra"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/input"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
)

// verifyMemory is larger than run's default: a space must hold a batch twice, and verify doesn't
// choose the size of the batches.
const verifyMemory = 256 << 20

// verifyFlags are the flags of verify.
type verifyFlags struct {
	output       outputFlags
	engine       engineFlags
	rowsPerBatch int
}

func newVerify() *cobra.Command {
	var f verifyFlags
	cmd := &cobra.Command{
		Use:   "verify FILE...",
		Short: "Move every batch of files along every edge and back, and compare",
		Long: `Move every batch of files along every edge and back, and compare.

verify moves each batch of each FILE (Parquet, Arrow, CSV) between every pair of
memories for which there is a converter, compares it value by value with the batch
that was read, and prints the first difference. A file without batches is fine if
it can be read; a note reports that nothing was verified.

FILE may be a pipe, and - is standard input. An Arrow stream is read as it comes.
The other formats are first copied to a temporary file in TMPDIR.`,
		Example: `  spillbench verify data.parquet
  spillbench verify -                                  # standard input
  spillbench verify *.arrow --rows-per-batch 100000 --gpu-memory 1GiB`,
		Args: files(1, 1<<20, "the name of a file"),
		RunE: f.run,
	}
	fs := cmd.Flags()
	intVar(fs, &f.rowsPerBatch, "rows-per-batch", 0, 0, maxRows,
		"cut the files into batches of `N` rows (default as in the files)")
	f.engine.register(fs, verifyMemory)
	f.output.register(fs)
	return cmd
}

func (f *verifyFlags) run(cmd *cobra.Command, paths []string) error {
	ctx := cmd.Context()
	out, err := f.output.open(cmd, paths...)
	if err != nil {
		return err
	}
	m, err := f.engine.open(ctx)
	if err != nil {
		return err
	}
	doc := &report.Verify{}
	edges, unknown := edgesOf(m.engine)
	for _, u := range unknown {
		m.notes.add("not verified, because no tier has these types: " + u)
	}
	var wrong, failed error // the first difference, and the first other error
	for _, path := range paths {
		var res roundTrips
		src, err := input.Open(ctx, path, m.reading(int64(f.rowsPerBatch)))
		if err == nil {
			res, err = verifyBatches(ctx, m.engine, edges, src.Path(), src)
			err = errors.Join(err, src.Close())
		}
		if ctx.Err() != nil {
			return errors.Join(err, m.engine.Close())
		}
		path = input.Name(path)
		file := report.File{Path: path, Batches: res.batches, Edges: res.edges, Mismatches: res.mismatches}
		if res.first != nil && wrong == nil {
			wrong = fail.Wrongf("%d differences in %s; the first: %w", res.mismatches, path, res.first)
		}
		if first := cmp.Or(res.first, err); first != nil {
			file.Error = fail.Line(first)
		} else if res.batches == 0 {
			m.notes.add(path + " holds no batches: it can be read, and nothing was verified")
		}
		failed = cmp.Or(failed, err)
		doc.Files = append(doc.Files, file)
	}
	err = m.settle(ctx, errors.Join(cmp.Or(wrong, failed), m.engine.Close()))
	doc.Header, doc.Config = m.header("verify"), m.config
	doc.Config.RowsPerBatch = int64(f.rowsPerBatch)
	return m.finish(out, doc, err)
}
