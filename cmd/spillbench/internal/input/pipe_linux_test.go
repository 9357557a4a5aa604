package input

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// pipeOf returns the path of a named pipe into which content is written once. The writer may find
// that nobody reads it all.
func pipeOf(t *testing.T, content []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	written := make(chan error, 1)
	go func() {
		err := os.WriteFile(path, content, 0)
		if errors.Is(err, syscall.EPIPE) {
			err = nil
		}
		written <- err
	}()
	t.Cleanup(func() {
		if err := <-written; err != nil {
			t.Error(err)
		}
	})
	return path
}

// TestPipes reads each format from a pipe. A temporary file, where there is one, is gone.
func TestPipes(t *testing.T) {
	stream := encode(t, asStream(), 40, 60, 5)
	for name, c := range map[string]struct {
		content []byte
		format  Format
		rows    int64
	}{
		"stream":      {stream, ArrowStream, 105},
		"two of them": {slices.Concat(stream, stream), ArrowStream, 210},
		"file":        {encode(t, asFile(), 40, 60, 5), ArrowFile, 105},
		"parquet":     {encode(t, asParquet, 40, 60, 5), Parquet, 105},
		"csv":         {[]byte("a,b\n1,2\n3,4\n"), CSV, 2},
		"short csv":   {[]byte("a\n1"), CSV, 1},
	} {
		t.Run(name, func(t *testing.T) {
			path, tmp := pipeOf(t, c.content), t.TempDir()
			t.Setenv("TMPDIR", tmp)
			recs, s, err := readAll(t, path, Options{})
			if err != nil || s.format != c.format {
				t.Fatal(s, err)
			}
			total := int64(0)
			for _, n := range lengths(recs) {
				total += n
			}
			if total != c.rows {
				t.Errorf("%d rows, want %d", total, c.rows)
			}
			release(recs)
			if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
				t.Errorf("left in the temporary directory: %v, %v", left, err)
			}
		})
	}
}

// TestPipeLeavesNoFile looks into the temporary directory while a pipe is copied into it. A program
// that is killed then must leave nothing there.
func TestPipeLeavesNoFile(t *testing.T) {
	path, tmp := filepath.Join(t.TempDir(), "pipe"), t.TempDir()
	t.Setenv("TMPDIR", tmp)
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	read := make(chan error, 1)
	go func() {
		_, _, err := readAll(t, path, Options{})
		read <- err
	}()
	pipe, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	// Once the reader has taken more than its buffer and the pipe hold, it has begun to copy.
	const held = bufferSize + 1<<20
	if _, err := pipe.WriteString("a\n" + strings.Repeat("1\n", held)); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
		t.Errorf("in the temporary directory: %v, %v", left, err)
	}
	if err := errors.Join(pipe.Close(), <-read); err != nil {
		t.Error(err)
	}
}

// TestWrongPipes: what a pipe brings is judged as a file is, and its errors name the pipe.
func TestWrongPipes(t *testing.T) {
	stream := encode(t, asStream(), 5)
	longMeta, longBody := bytes.Clone(stream), bytes.Clone(stream)
	binary.LittleEndian.PutUint32(longMeta[4:], 1<<30)
	second := longBody[messageEnds(t, stream)[0]:]
	length := bytes.Index(second, binary.LittleEndian.AppendUint64(nil, bodyLengths(t, stream)[1]))
	binary.LittleEndian.PutUint64(second[length:], 1<<40)
	for name, c := range map[string]struct {
		content []byte
		want    string
	}{
		"nothing":    {nil, "is empty"},
		"no table":   {[]byte("Spillway is an engine.\n"), "is text, and no CSV table"},
		"cut stream": {stream[:len(stream)-100], "at byte "},
		"garbage behind": {
			slices.Concat(stream, []byte("a,b\n")), fmt.Sprintf("from byte %d on, are no", len(stream)),
		},
		"a metadata of 1 GiB":   {longMeta, "unexpected EOF"},
		"a body of 1 TiB":       {longBody, "unexpected EOF"},
		"a file without an end": {encode(t, asFile(), 5)[:200], "its end is missing"},
	} {
		t.Run(name, func(t *testing.T) {
			path := pipeOf(t, c.content)
			recs, _, all, err := measured(t, path)
			checkError(t, err, path, c.want)
			if all > readersAlloc {
				t.Errorf("%d bytes were allocated", all)
			}
			release(recs)
		})
	}
}

// bodyLengths returns the lengths of the bodies of a stream's messages.
func bodyLengths(t *testing.T, stream []byte) (all []uint64) {
	t.Helper()
	at := 0
	for _, end := range messageEnds(t, stream) {
		head := at + 8 + int(binary.LittleEndian.Uint32(stream[at+4:]))
		all = append(all, uint64(end-head))
		at = end
	}
	return all
}

// TestCheckDoesNotReadPipes: a first look takes nothing from a pipe, and refuses one only if the
// input is read more than once.
func TestCheckDoesNotReadPipes(t *testing.T) {
	path := pipeOf(t, []byte("a,b\n1,2\n"))
	if err := Check(path, true); err != nil {
		t.Error(err)
	}
	checkError(t, Check(path, false), path, "is a pipe, and this command reads its input more than once")
	recs, _, err := readAll(t, path, Options{})
	if err != nil || fmt.Sprint(lengths(recs)) != "[1]" {
		t.Errorf("%v, %v", lengths(recs), err)
	}
	release(recs)
}
