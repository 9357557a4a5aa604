package main

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/spf13/cobra"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/internal/persist"
)

func newInspect() *cobra.Command {
	flags := outputFlags{prints: true}
	var checksums bool
	cmd := &cobra.Command{
		Use:   "inspect DIR",
		Short: "Print what persists in a spill directory, and change nothing",
		Long: `Print what persists in a spill directory, and change nothing.

DIR is a directory of an engine's disk with DiskConfig.Persist, or one of the
directories spillway-kept-… in it. inspect lists the batches that the next engine
would find, where each stood, its rows, columns and codec, its room on the disk, and
what is damaged. It adopts nothing. It works while an engine uses the directory; then
the list is of a moment, and damage is not judged.

inspect ends with 1 if entries are damaged, with 2 if nothing persists in DIR, and with
3 if something cannot be read.`,
		Example: `  spillbench inspect /var/spill
  spillbench inspect /var/spill --checksums           # reads all bytes
  spillbench inspect /var/spill --format json`,
		Args: files(1, 1, "one directory"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return inspect(cmd, &flags, args[0], checksums)
		},
	}
	cmd.Flags().BoolVar(&checksums, "checksums", false,
		"compare all bytes with their checksums; those that an engine uses or that are encrypted are left out")
	flags.register(cmd.Flags())
	return cmd
}

func inspect(cmd *cobra.Command, flags *outputFlags, path string, checksums bool) error {
	out, err := flags.open(cmd)
	if err != nil {
		return err
	}
	const name = "name the directory of a disk with DiskConfig.Persist"
	found, err := persist.Inspect(path, checksums)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fail.Usagef("%s: no such directory (%s)", path, name)
	case err != nil:
		return fail.Environmentf("%s cannot be read: %w (name a directory that you may read)", path, pathless(err))
	case len(found) == 0:
		return fail.Usagef("nothing persists in %s (%s)", path, name)
	}
	header, err := out.header()
	if err != nil {
		return err
	}
	doc := &report.Inspect{Header: header, Path: path, Checksums: checksums}
	for i := range found {
		d := describePersisted(&found[i])
		doc.Directories = append(doc.Directories, d)
		if d.Error != "" && err == nil {
			err = fail.Environmentf("%s cannot be read: %s", d.Path, d.Error)
		}
	}
	if n := doc.Damage(); n > 0 {
		err = fail.Wrongf("%d entries in %s are damaged (an engine drops them with Engine.ForgetPersisted)", n, path)
	}
	return errors.Join(err, out.show(doc, nil))
}

// describePersisted returns the part of the document for one directory.
func describePersisted(d *persist.Directory) report.PersistedDirectory {
	k := report.PersistedDirectory{
		Path: d.Path, InUse: d.InUse, Encrypted: d.Sealed, Records: len(d.Records), FileBytes: d.FileBytes,
		Batches: []report.PersistedBatch{}, Dictionaries: len(d.Dictionaries),
		Unlisted: append([]string{}, d.Unlisted...), Damaged: []string{}, Error: line(d.Err),
	}
	for _, r := range d.Records {
		k.Bytes += r.Room
	}
	for _, l := range d.Dictionaries {
		k.DictionaryBytes += l.Room
		if l.Err != nil {
			what := fmt.Sprintf("the dictionary in %s: %s", l.File, line(l.Err))
			k.Damaged = append(k.Damaged, what)
		}
	}
	for _, l := range d.Batches {
		b := report.PersistedBatch{Bytes: l.Room, Columns: []string{}, Error: line(l.Err)}
		if e := l.Entry; e != nil {
			b.ID, b.Plan, b.Operator, b.Port, b.Partition = uint64(e.ID), e.Plan, e.Operator, e.Port, e.Partition
			b.Rows, b.ImageBytes, b.Dictionaries = e.Descriptor.Rows, e.Descriptor.Body, len(e.Dictionaries)
			for _, f := range e.Descriptor.Schema.Fields() {
				b.Columns = append(b.Columns, f.Name+": "+f.Type.String())
			}
			var codecs []string
			for _, c := range e.Codecs() {
				codecs = append(codecs, c.String())
			}
			b.Codec = cmp.Or(strings.Join(codecs, ", "), "none")
		}
		k.Batches = append(k.Batches, b)
	}
	return k
}

// line returns err as one line, or "" if it is nil.
func line(err error) string {
	if err == nil {
		return ""
	}
	return fail.Line(err)
}
