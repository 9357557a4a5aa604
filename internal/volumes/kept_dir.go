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
//	<Dir>/spillway-kept-<random>/lock            held by flock while the volume is open
//	                            /format          keptFormat
//	                            /<number>.part   a memory that is no batch
//	                            /<key>           a batch or a dictionary: kept_file.go
//
// Number and key have 16 hexadecimal digits. No volume removes such a directory while it contains a
// key: the next one with Config.Persist takes it over and removes the parts. It is removed when nothing
// in it persists.
//
// 100,000 files in one directory were made, opened and removed twice as fast as in 256
// subdirectories (ext4, 2026-11-27).

var (
	persistentName = regexp.MustCompile(`^spillway-kept-[0-9a-f]{16}$`)
	keptFileName   = regexp.MustCompile(`^[0-9a-f]{16}(\.part)?$`)
)

const (
	persistentPrefix = "spillway-kept-"
	partSuffix       = ".part"
	formatName       = "format"
)

func keptName(n uint64, suffix string) string { return fmt.Sprintf("%016x%s", n, suffix) }

// keptFiles is the content of a directory: the lengths of files by their names.
type keptFiles struct {
	keys    map[uint64]int64 // of batches and dictionaries
	parts   map[uint64]int64
	bytes   int64    // of both, in whole pages
	foreign []string // names of everything else
}

// listKept lists a directory.
func (d *ownDir) listKept() (*keptFiles, error) {
	all := &keptFiles{keys: make(map[uint64]int64), parts: make(map[uint64]int64)}
	entries, err := d.fs.ReadDir(d.path)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		name := e.Name()
		switch {
		case e.Type().IsRegular() && keptFileName.MatchString(name):
		case !e.IsDir() && (name == lockName || name == formatName || segmentName.MatchString(name) || hiddenFile(name)):
			continue
		default:
			all.foreign = append(all.foreign, name)
			continue
		}
		info, err := d.fs.Stat(filepath.Join(d.path, name))
		if err != nil {
			return nil, err
		}
		digits, part := strings.CutSuffix(name, partSuffix)
		n, _ := strconv.ParseUint(digits, 16, 64) // its pattern fits
		all.bytes = min(1<<60, all.bytes+round(min(1<<60, info.Size())))
		if part {
			all.parts[n] = info.Size()
		} else {
			all.keys[n] = info.Size()
		}
	}
	return all, nil
}

// removeKept removes what a volume has made in a directory without keys, and the directory if nothing
// else is there.
func (d *ownDir) removeKept() error {
	all, err := d.listKept()
	if err != nil {
		return join(ignoreMissing(err), d.lock.Close())
	}
	for n := range all.parts {
		err = join(err, d.removeFile(keptName(n, partSuffix)))
	}
	if err == nil && len(all.foreign) == 0 && len(all.keys) == 0 {
		err = d.removeFile(formatName)
	}
	if err != nil || len(all.foreign) > 0 || len(all.keys) > 0 {
		return join(err, d.lock.Close())
	}
	_, err = d.removeSegments() // of a volume that was killed when it tried the file system
	return join(err, d.remove())
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
		err = join(err, f.Close())
	}
	if err != nil {
		return join(err, own.removeKept())
	}
	v.own = own
	v.numbers.Store(uint64(time.Now().UnixNano()))
	return nil
}

// WarnOfOthers makes volumes warn of directories that persist and that none of them has taken over.
// It is called once, when all volumes of an engine are open. It takes no lock of a directory: a volume
// of another process that is being opened passes by a directory that is locked.
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
				v.warn(causes.KeptLeft, "%s was kept by another process: if that has ended, it is left for the next "+
					"engine, because one volume finds what one process kept", e.Name())
			}
		}
		v.passed = nil
	}
}

// checkOwner refuses another user's directory, unless the volume's directory is that user's too. In a
// directory of temporary files other users could have their bytes adopted, and have ours in files of
// theirs.
func (v *Volume) checkOwner(path string) error {
	info, err := v.cfg.FS.Stat(path)
	if err != nil {
		return ignoreMissing(err)
	}
	uid, known := fsinfo.Owner(info)
	if !known || int(uid) == os.Geteuid() {
		return nil
	}
	if info, err = v.cfg.FS.Stat(v.dir); err != nil {
		return err
	}
	if above, _ := fsinfo.Owner(info); above != uid {
		return errors.New("it belongs to another user")
	}
	return nil
}

// takeOver makes an abandoned directory the volume's own, with an entry for each key. A directory in
// which nothing persists it removes.
func (v *Volume) takeOver(path string) error {
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
	if err != nil {
		return join(err, lock.Close())
	}
	if len(files.keys) == 0 {
		return own.removeKept()
	}
	mark, err := own.readFormat()
	if err == nil {
		var ok bool
		if ok, err = v.sealer.Opens(mark); err == nil && !ok {
			err = &disk.KeyError{
				Dir: v.cfg.Dir, Name: filepath.Base(path), Sealed: mark.Sealed, Encrypt: v.sealer != nil,
			}
		}
	}
	if err == nil && files.bytes > v.cfg.Capacity {
		err = fmt.Errorf("it has %d bytes, and the volume's capacity is %d: %w",
			files.bytes, v.cfg.Capacity, tier.ErrNoSpace)
	}
	last := uint64(time.Now().UnixNano())
	for key, length := range files.keys {
		if err != nil { // no dictionary may be removed: perhaps a file that cannot be read lists it
			break
		}
		found, h, damage := own.read(key, length, v.sealer)
		if damage != nil {
			if !errors.Is(damage, errDamage) {
				err = damage
				break
			}
			v.warn(causes.KeptDamaged, "a batch cannot be adopted: %v", damage)
		}
		v.addEntry(found, h)
		last = max(last, h.Order)
	}
	if err != nil {
		clear(v.mu.entries)
		v.mu.used, v.mu.stays = 0, 0
		return join(err, lock.Close())
	}
	v.own = own
	v.numbers.Store(last)
	for n := range files.parts {
		if err := own.removeFile(keptName(n, partSuffix)); err != nil {
			v.warn(causes.NotRemoved, "removing %s: %v", keptName(n, partSuffix), err)
		}
	}
	return nil
}

func (d *ownDir) readFormat() (mark seal.Mark, err error) {
	f, err := d.fs.Reopen(filepath.Join(d.path, formatName), false)
	if err == nil {
		p := make([]byte, len(formatBytes(mark)))
		_, err = wholeFile{f, 1}.ReadAt(p, 0)
		if err = join(err, f.Close()); err == nil {
			return parseFormat(p)
		}
	}
	return mark, fmt.Errorf("its file %s: %w", formatName, bare(err))
}

// read reads the header of a file. The error of a damaged file is also in the result, which has the
// file's room then.
func (d *ownDir) read(key uint64, length int64, s *seal.Sealer) (p Persisted, h *keptHeader, err error) {
	p = Persisted{Key: key, File: filepath.Join(d.path, keptName(key, ""))}
	f, err := d.fs.Reopen(p.File, false)
	if err == nil {
		h, err = readHeader(wholeFile{f, 1}, key, length, s)
		err = join(err, f.Close())
	}
	if err != nil {
		p.Err = fmt.Errorf("%s: %w", p.File, bare(err))
		h = &keptHeader{fixedHeader: fixedHeader{Size: length}}
	} else {
		p.Meta, p.Place, p.Room = h.meta, h.place, h.tail.Room
	}
	p.Size = h.Size
	p.Room += round(p.Size)
	return p, h, p.Err
}

// addEntry adds an entry that was found. It stays until it is taken.
func (v *Volume) addEntry(found Persisted, h *keptHeader) {
	k := &keptFile{number: h.File, tail: h.tail}
	k.key.Store(found.Key)
	k.named.Store(true)
	e := v.keptMemory(k, h.Size)
	if h.key != nil {
		e.sealed = v.sealer.OldExtent(h.key, h.blocks)
	}
	ent := &entry{Persisted: found, order: h.Order, stays: true, memory: e}
	e.entry = ent
	v.mu.used += ent.Room
	v.mu.stays += ent.Room
	v.mu.entries[found.Key] = ent
}

// leavePersistent gives the directory up with what stays in it, or removes it if that is nothing.
func (v *Volume) leavePersistent() error {
	if len(v.mu.entries) > 0 {
		return v.own.lock.Close()
	}
	return v.own.removeKept()
}
