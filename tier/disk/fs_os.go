package disk

import (
	"io/fs"
	"os"

	"github.com/spillway-db/spillway/tier"
)

// OS returns the real file system.
func OS() FS { return osFS{} }

type osFS struct{}

func (osFS) Stat(path string) (fs.FileInfo, error)      { return os.Stat(path) }
func (osFS) Mkdir(path string) error                    { return os.Mkdir(path, 0o700) }
func (osFS) ReadDir(path string) ([]fs.DirEntry, error) { return os.ReadDir(path) }
func (osFS) Remove(path string) error                   { return os.Remove(path) }

func (osFS) Create(path string, direct bool) (File, error) {
	return openFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, direct)
}

func (osFS) Reopen(path string, direct bool) (File, error) {
	return openFile(path, os.O_RDWR, direct)
}

// osFile is an open file. It is an os.File, and not a bare descriptor, so that a use
// after Close is an error and never reaches a file that took the number.
type osFile struct {
	f               *os.File
	direct          bool
	address, offset int
}

func newFile(f *os.File, direct bool) *osFile {
	file := &osFile{f: f, direct: direct, address: 1, offset: 1}
	if direct {
		file.address, file.offset = directAlignment(f)
	}
	return file
}

// fallbackAlignment is what direct I/O is given where the system does not say what
// it needs: enough for every disk of today.
const fallbackAlignment = tier.Page

func (f *osFile) ReadAt(p []byte, off int64) (int, error)  { return f.f.ReadAt(p, off) }
func (f *osFile) WriteAt(p []byte, off int64) (int, error) { return f.f.WriteAt(p, off) }
func (f *osFile) Direct() bool                             { return f.direct }
func (f *osFile) Alignment() (address, offset int)         { return f.address, f.offset }
func (f *osFile) Close() error                             { return f.f.Close() }
