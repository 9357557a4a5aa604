package volumes

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/fsinfo"
	"github.com/spillway-db/spillway/internal/volumes/internal/seal"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// A volume with Config.Persist has its files in a directory of another kind,
//
//	<Dir>/spillway-kept-<random>/lock                      held by flock while the volume is open
//	                            /format                    keptFormat
//	                            /00 … ff/<number>.part     a memory that is not, or not only, a batch
//	                            /00 … ff/<key>             a batch or a dictionary: kept_file.go
//
// Number and key have 16 hexadecimal digits, of which the last two name the subdirectory. No volume
// removes such a directory while it contains a key: the next one with Config.Persist takes it over
// and removes the parts that no key lists. It is removed when nothing in it persists.

var (
	persistentName = regexp.MustCompile(`^spillway-kept-[0-9a-f]{16}$`)
	subdirectory   = regexp.MustCompile(`^[0-9a-f]{2}$`)
	keptFileName   = regexp.MustCompile(`^[0-9a-f]{16}(\.part)?$`)
)

const (
	persistentPrefix = "spillway-kept-"
	partSuffix       = ".part"
	formatName       = "format"
)

func keptName(n uint64, suffix string) string {
	return fmt.Sprintf("%02x/%016x%s", byte(n), n, suffix)
}

// keptFiles is what a directory contains: the lengths of files, by their names.
type keptFiles struct {
	keys    map[uint64]int64 // of batches and dictionaries
	parts   map[uint64]int64
	bytes   int64    // of both
	foreign []string // names of everything else
}

// listKept lists a directory.
func (d *ownDir) listKept() (*keptFiles, error) {
	all := &keptFiles{keys: make(map[uint64]int64), parts: make(map[uint64]int64)}
	entries, err := d.fs.ReadDir(d.path)
	if err != nil {
		return nil, err
	}
	for _, top := range entries {
		switch name := top.Name(); {
		case top.IsDir() && subdirectory.MatchString(name):
			if err := d.listSub(all, name); err != nil {
				return nil, err
			}
		case name == lockName, name == formatName, segmentName.MatchString(name), hiddenFile(name):
			if top.IsDir() {
				all.foreign = append(all.foreign, name)
			}
		default:
			all.foreign = append(all.foreign, name)
		}
	}
	return all, nil
}

func (d *ownDir) listSub(all *keptFiles, sub string) error {
	entries, err := d.fs.ReadDir(filepath.Join(d.path, sub))
	if err != nil {
		return err
	}
	for _, e := range entries {
		digits, part := strings.CutSuffix(e.Name(), partSuffix)
		switch {
		case hiddenFile(e.Name()) && !e.IsDir():
			continue
		case !e.Type().IsRegular() || !keptFileName.MatchString(e.Name()) || digits[14:] != sub:
			all.foreign = append(all.foreign, filepath.Join(sub, e.Name()))
			continue
		}
		info, err := d.fs.Stat(filepath.Join(d.path, sub, e.Name()))
		if err != nil {
			return err
		}
		n, _ := strconv.ParseUint(digits, 16, 64) // its pattern fits
		all.bytes = min(1<<60, all.bytes+round(min(1<<60, info.Size())))
		if part {
			all.parts[n] = info.Size()
		} else {
			all.keys[n] = info.Size()
		}
	}
	return nil
}

// removeKept removes what a volume has made in a directory without keys, and the directory if
// nothing else is there.
func (d *ownDir) removeKept() error {
	all, err := d.listKept()
	if err != nil {
		return join(ignoreMissing(err), d.lock.Close())
	}
	for n := range all.parts {
		err = join(err, d.removeFile(keptName(n, partSuffix)))
	}
	if err != nil || len(all.foreign) > 0 || len(all.keys) > 0 {
		return join(err, d.lock.Close())
	}
	for i := range 256 {
		err = join(err, ignoreMissing(removeDir(d.fs, filepath.Join(d.path, fmt.Sprintf("%02x", i)))))
	}
	if err = join(err, d.removeFile(formatName)); err != nil {
		return join(err, d.lock.Close())
	}
	_, err = d.removeSegments() // of a volume that was killed when it tried the file system
	return join(err, d.remove())
}

func (d *ownDir) rename(from, to string) error {
	if from == to {
		return nil
	}
	path := filepath.Join(d.path, to)
	err := d.fs.Rename(filepath.Join(d.path, from), path)
	if errors.Is(err, fs.ErrNotExist) {
		if err := d.fs.Mkdir(filepath.Dir(path)); err != nil && !errors.Is(err, fs.ErrExist) {
			return bare(err)
		}
		err = d.fs.Rename(filepath.Join(d.path, from), path)
	}
	return bare(err)
}

// openPersistent takes over the first directory in which something persists and that is not in use,
// or makes one. If all that there are need another key, it fails.
func (v *Volume) openPersistent() error {
	entries, err := v.cfg.FS.ReadDir(v.dir)
	if err != nil {
		return bare(err)
	}
	var other error // another key is needed
	for i, e := range entries {
		if !e.IsDir() || !persistentName.MatchString(e.Name()) {
			continue
		}
		path := filepath.Join(v.dir, e.Name())
		err := v.checkOwner(path)
		if err == nil {
			err = v.takeOver(path)
		}
		if errors.Is(err, disk.ErrKey) && other == nil {
			other = err
		}
		if err != nil {
			v.warn(causes.KeptLeft, "%s was kept and is left as it is: %v", e.Name(), bare(err))
		}
		if v.own != nil {
			v.passed = entries[i+1:]
			return nil
		}
	}
	if other != nil {
		return other
	}
	own, err := makeOwnDir(v.cfg.FS, v.dir, persistentPrefix)
	if errors.Is(err, errors.ErrUnsupported) {
		return fmt.Errorf("keeping spill files needs locked files, which this system does not have: %w",
			tier.ErrNotSupported)
	}
	if err != nil {
		return bare(err)
	}
	f, err := v.cfg.FS.Create(filepath.Join(own.path, formatName), false)
	if err == nil {
		_, err = wholeFile{f, 1}.WriteAt(formatBytes(v.sealer.Mark()), 0)
		err = join(bare(err), bare(f.Close()))
	}
	if err != nil {
		return join(bare(err), own.removeKept())
	}
	v.own = own
	v.numbers.Store(uint64(time.Now().UnixNano()))
	return nil
}

// WarnOfOthers has volumes warn of directories that persist and that none of them has taken over.
// It is called once, when all volumes of an engine are open. It takes no lock of a directory: a
// volume of another process that is being opened passes by what is locked.
func WarnOfOthers(all ...*Volume) {
	known := make(map[string]bool) // by names, which are random
	for _, v := range all {
		if v.cfg.Persist {
			known[filepath.Base(v.own.path)] = true
		}
	}
	for _, v := range all {
		for _, e := range v.passed {
			path := filepath.Join(v.dir, e.Name())
			if known[e.Name()] || !e.IsDir() || !persistentName.MatchString(e.Name()) || v.checkOwner(path) != nil {
				continue
			}
			known[e.Name()] = true
			files, err := (&ownDir{fs: v.cfg.FS, path: path}).listKept()
			if err == nil && len(files.keys) > 0 || err != nil && !errors.Is(err, fs.ErrNotExist) {
				v.warn(
					causes.KeptLeft,
					"%s was kept by another process: if that has ended, it is left for the next engine, "+
						"because one volume finds what one process kept",
					e.Name(),
				)
			}
		}
		v.passed = nil
	}
}

// errOwner: in a directory of temporary files other users could have their bytes adopted, and
// have ours in files of theirs.
var errOwner = errors.New("it belongs to another user")

// checkOwner refuses another user's directory, unless the volume's directory is that user's too.
func (v *Volume) checkOwner(path string) error {
	info, err := v.cfg.FS.Stat(path)
	if err != nil {
		return ignoreMissing(err)
	}
	uid, known := fsinfo.Owner(info)
	if !known || int(uid) == os.Geteuid() {
		return nil
	}
	info, err = v.cfg.FS.Stat(v.dir)
	if err != nil {
		return err
	}
	if above, _ := fsinfo.Owner(info); above != uid {
		return errOwner
	}
	return nil
}

// takeOver makes an abandoned directory the volume's own. One in which nothing persists it removes.
func (v *Volume) takeOver(path string) (err error) {
	fsys := v.cfg.FS
	lock, err := fsys.Lock(filepath.Join(path, lockName), false)
	switch {
	case errors.Is(err, fs.ErrNotExist): // see removeIfAbandoned
		if removeHidden(fsys, path) {
			_ = fsys.Remove(path)
		}
		return nil
	case errors.Is(err, disk.ErrLocked), errors.Is(err, fs.ErrPermission), errors.Is(err, errors.ErrUnsupported):
		return nil
	case err != nil:
		return err
	}
	own := &ownDir{fs: fsys, path: path, lock: lock}
	files, err := own.listKept()
	if err == nil && len(files.keys) == 0 {
		return own.removeKept()
	}
	if err == nil {
		err = v.checkFormat(own)
	}
	if err == nil && files.bytes > v.cfg.Capacity {
		err = fmt.Errorf("it has %d bytes, and the volume's capacity is %d: %w",
			files.bytes, v.cfg.Capacity, tier.ErrNoSpace)
	}
	if err != nil {
		return join(err, lock.Close())
	}
	v.own = own
	next := uint64(time.Now().UnixNano())
	for key, length := range files.keys {
		order, err := v.find(key, length, files)
		if err != nil { // no part or dictionary may be removed: perhaps this file lists it
			clear(v.mu.entries)
			v.own, v.mu.used, v.mu.stays = nil, 0, 0
			return join(err, lock.Close())
		}
		next = max(next, order)
	}
	v.numbers.Store(next)
	for n := range files.parts { // that no file lists
		if err := own.removeFile(keptName(n, partSuffix)); err != nil {
			v.warn(causes.NotRemoved, "removing %s: %v", keptName(n, partSuffix), err)
		}
	}
	return nil
}

// checkFormat returns an error if the volume cannot read what is in a directory.
func (v *Volume) checkFormat(own *ownDir) error {
	mark, err := own.readFormat()
	if err != nil {
		return err
	}
	if ok, err := v.sealer.Opens(mark); !ok && err == nil {
		return &disk.KeyError{
			Dir: v.cfg.Dir, Name: filepath.Base(own.path), Sealed: mark.Sealed, Encrypt: v.sealer != nil,
		}
	} else {
		return err
	}
}

func (d *ownDir) readFormat() (mark seal.Mark, err error) {
	f, err := d.fs.Reopen(filepath.Join(d.path, formatName), false)
	if err != nil {
		return mark, fmt.Errorf("its file %s: %w", formatName, bare(err))
	}
	p := make([]byte, len(formatBytes(mark)))
	_, err = wholeFile{f, 1}.ReadAt(p, 0)
	if err = join(bare(err), bare(f.Close())); err != nil {
		return mark, fmt.Errorf("its file %s: %w", formatName, err)
	}
	return parseFormat(p)
}

// read reads the header of a file, and takes its parts off the list. The error of a damaged file is
// also in the result, which has the file's room then.
func (d *ownDir) read(
	key uint64, length int64, s *seal.Sealer, parts map[uint64]int64,
) (p Persisted, h *keptHeader, err error) {
	p = Persisted{Key: key, File: filepath.Join(d.path, keptName(key, ""))}
	f, err := d.fs.Reopen(p.File, false)
	if err == nil {
		h, err = readHeader(wholeFile{f, 1}, key, length, s)
		err = join(err, bare(f.Close()))
	}
	if err == nil {
		err = h.takeParts(parts)
	}
	if err != nil {
		p.Err = fmt.Errorf("%s: %w", p.File, bare(err))
		h = &keptHeader{memories: []keptMemory{{Size: length}}}
	} else {
		p.Meta, p.Place, p.Room = h.meta, h.place, h.tail.Room
	}
	for _, m := range h.memories {
		p.Room += round(m.Size)
		if m.Size > 0 { // else the batch has no memory
			p.Sizes = append(p.Sizes, m.Size)
		}
	}
	return p, h, p.Err
}

// find adds the entry of a file. One that is damaged is an entry with an error. It returns the
// entry's order, which is above its files' numbers.
func (v *Volume) find(key uint64, length int64, files *keptFiles) (order uint64, err error) {
	found, h, err := v.own.read(key, length, v.sealer, files.parts)
	switch {
	case err != nil && !errors.Is(err, errDamage):
		return 0, err
	case err != nil:
		v.warn(causes.KeptDamaged, "a batch cannot be adopted: %v", err)
	}
	ent := &entry{Persisted: found, order: h.order, stays: true}
	for i, m := range h.memories {
		k := &keptFile{number: m.File}
		if i == 0 {
			k.tail = h.tail
			k.key.Store(key)
			k.named.Store(true)
		}
		e := v.keptMemory(k, m.Size)
		e.entry = ent
		if h.keys != nil {
			e.sealed = v.sealer.OldExtent(h.keys[i], m.Number, m.Blocks)
		}
		ent.memories = append(ent.memories, e)
	}
	v.mu.used += ent.Room
	v.mu.stays += ent.Room
	v.mu.entries[key] = ent
	return h.order, nil
}

// leavePersistent gives the directory up with what stays in it, or removes it if that is nothing.
func (v *Volume) leavePersistent() error {
	if len(v.mu.entries) > 0 {
		return v.own.lock.Close()
	}
	return v.own.removeKept()
}
