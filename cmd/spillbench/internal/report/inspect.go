package report

import (
	"fmt"
	"strings"
)

// Inspect is the document of inspect.
type Inspect struct {
	Header
	Path        string          `json:"path"`
	Checksums   bool            `json:"checksums"` // all bytes were compared with their checksums, but for those in use
	Directories []KeptDirectory `json:"directories"`
}

// KeptDirectory is what one process has left on a disk, or what the engine has there that uses it.
type KeptDirectory struct {
	Path            string      `json:"path"`
	InUse           bool        `json:"in_use"`    // an engine has it locked; the rest is of a moment
	Encrypted       bool        `json:"encrypted"` // with a key of the user's; then only records are counted
	Records         int         `json:"records"`   // of batches and of dictionaries that batches share
	Batches         []KeptBatch `json:"batches"`   // the oldest first
	Dictionaries    int         `json:"dictionaries"`
	DictionaryBytes int64       `json:"dictionary_bytes"` // of their room on the disk
	Bytes           int64       `json:"bytes"`            // of the room of all records
	FileBytes       int64       `json:"file_bytes"`       // the lengths of the files, which may have holes
	Unlisted        []string    `json:"unlisted"`         // names of files that hold nothing that persists
	Damaged         []string    `json:"damaged"`          // what is lost, and why, beside the batches with an error
	Error           string      `json:"error"`            // why it cannot be read; else empty
}

// KeptBatch is a batch that persists.
type KeptBatch struct {
	ID           uint64   `json:"id"` // in the engine that left it
	Plan         string   `json:"plan"`
	Operator     string   `json:"operator"`
	Port         int      `json:"port"`
	Partition    int      `json:"partition"`
	Rows         int64    `json:"rows"`
	Columns      []string `json:"columns"`      // name and type of each
	Bytes        int64    `json:"bytes"`        // of its room on the disk
	ImageBytes   int64    `json:"image_bytes"`  // uncompressed
	Codec        string   `json:"codec"`        // "none" for plain bytes
	Dictionaries int      `json:"dictionaries"` // that it shares with others
	Error        string   `json:"error"`        // why it cannot be adopted; else empty
}

// Damage returns how many batches and other records are damaged.
func (d *Inspect) Damage() (n int) {
	for _, dir := range d.Directories {
		n += len(dir.Damaged)
		for _, b := range dir.Batches {
			if b.Error != "" {
				n++
			}
		}
	}
	return n
}

// Page shows what persists. notes are lines of their own.
func (d *Inspect) Page(notes []string) *Page {
	p := new(Page)
	p.linef("spillbench inspect: %s", d.Path)
	batches := 0
	for _, dir := range d.Directories {
		p.linef("")
		state := "not in use"
		if dir.InUse {
			state = "in use by an engine: its batches may change"
		}
		p.linef("%s, %s", dir.Path, state)
		if dir.Error != "" {
			p.linef("cannot be read: %s", dir.Error)
			continue
		}
		if dir.Encrypted {
			p.linef("encrypted: %d records of %s; what they are can be read only with the key", dir.Records, approx(dir.Bytes))
		} else {
			batches += len(dir.Batches)
			p.linef("%d batches and %d shared dictionaries of %s, in %s of files", len(dir.Batches), dir.Dictionaries, approx(dir.Bytes), approx(dir.FileBytes))
		}
		if len(dir.Batches) > 0 {
			p.table(batchSheet(dir.Batches))
		}
		for _, what := range dir.Damaged {
			p.linef("damaged: %s", what)
		}
		if len(dir.Unlisted) > 0 {
			p.linef("files that hold nothing that persists: %s", strings.Join(dir.Unlisted, ", "))
		}
	}
	p.linef("")
	p.notes(notes)
	switch n := d.Damage(); {
	case n > 0:
		p.linef("FAILED: %d entries are damaged", n)
	case d.Checksums:
		p.linef("%d batches, none damaged: all bytes are those that were written", batches)
	default:
		p.linef("%d batches, no record damaged (--checksums compares the bytes, too)", batches)
	}
	return p
}

func batchSheet(batches []KeptBatch) *sheet {
	s := &sheet{columns: []column{
		{head: "batch", key: "id"}, {head: "plan", key: "plan"}, {head: "operator", key: "operator"}, {head: "partition", key: "partition"},
		{head: "rows", key: "rows"}, {head: "columns", key: "columns"}, {head: "on disk", key: "bytes"}, {head: "image", key: "image_bytes"},
		{head: "codec", key: "codec"}, {head: "dictionaries", key: "dictionaries"}, {head: "error", key: "error"},
	}}
	for _, b := range batches {
		operator := b.Operator
		if operator != "" {
			operator = fmt.Sprintf("%s:%d", b.Operator, b.Port)
		}
		s.add(int64(b.ID), b.Plan, operator, b.Partition, b.Rows, len(b.Columns), approx(b.Bytes), approx(b.ImageBytes), b.Codec, b.Dictionaries, b.Error)
	}
	return s
}
