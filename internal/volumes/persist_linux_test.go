package volumes_test

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"syscall"
	"testing"

	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier/disk"
)

// owners is a file system on which directories of kept files are somebody's, and what they
// are in somebody else's.
type owners struct {
	disk.FS
	kept, above uint32
}

var keptDirectory = regexp.MustCompile(`/spillway-kept-[0-9a-f]+$`)

func (o owners) Stat(path string) (fs.FileInfo, error) {
	info, err := o.FS.Stat(path)
	if err != nil {
		return nil, err
	}
	st := *info.Sys().(*syscall.Stat_t)
	if st.Uid = o.above; keptDirectory.MatchString(path) {
		st.Uid = o.kept
	}
	return owned{info, &st}, nil
}

type owned struct {
	fs.FileInfo
	stat *syscall.Stat_t
}

func (o owned) Sys() any { return o.stat }

// TestPersistentDirectoriesOfOthersAreLeftAlone: what another user has put beside is neither
// adopted nor written to.
func TestPersistentDirectoriesOfOthersAreLeftAlone(t *testing.T) {
	me := uint32(os.Geteuid())
	for name, c := range map[string]struct {
		kept, above uint32
		took        bool
	}{
		"ours":                    {me, me + 2, true},
		"another's":               {me + 1, me + 2, false},
		"another's in ours":       {me + 1, me, false},
		"the directory's owner's": {me + 2, me + 2, true},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			v := openPersistent(t, dir)
			_, es := persist(t, v, 1, page)
			leave(t, v, es)
			v = openPersistent(t, dir, func(cfg *volumes.Config) { cfg.FS = owners{disk.OS(), c.kept, c.above} })
			if took := len(v.Persisted()) == 1; took != c.took {
				t.Errorf("%d are kept; %q", len(v.Persisted()), v.Stats().Warnings)
			}
			if !c.took {
				oneLine(t, v.Stats().Warnings[0].What, "it belongs to another user")
			}
			closeVolume(t, v)

			v = openPersistent(t, dir) // it is as it was
			for _, k := range v.Persisted() {
				free(v, wantPersisted(t, v, k, 1, page))
			}
			closeVolume(t, v)
			wantEmpty(t, dir)
		})
	}
}

// TestRestOfTheLastPageIsZero: the file of a memory that ends inside of a page contains zeros behind it,
// and no bytes of another request.
func TestRestOfTheLastPageIsZero(t *testing.T) {
	v := openPersistent(t, t.TempDir())
	other, e := alloc(t, v, 2*page), alloc(t, v, page+100)
	write(t, other, random(2*page+1, 1)[1:], 0) // not aligned, so that it goes through a buffer
	write(t, e, random(page+100, 2), 0)
	_, file, _ := e.Locate(0)
	files, err := filepath.Glob(filepath.Join(v.Dir(), "*", file))
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	p, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	if n := bytes.Count(p[page+100:], []byte{0}); n != page-100 || !bytes.Equal(p[:page+100], random(page+100, 2)) {
		t.Errorf("%d of the %d bytes behind the memory are 0, or it has other bytes", n, page-100)
	}
	free(v, other, e)
	closeVolume(t, v)
}
