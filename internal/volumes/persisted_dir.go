package volumes

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/fsinfo"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// openPersistent takes over the first directory in which something persists and that is not in use,
// or makes one. If all that there are need another key, it fails.
func (v *Volume) openPersistent() error {
	entries, err := v.cfg.FS.ReadDir(v.dir)
	if err != nil {
		return bare(err)
	}
	var other error // another key is needed
	for i, e := range entries {
		if !e.IsDir() || !persists(e.Name()) {
			continue
		}
		err := v.takeOver(filepath.Join(v.dir, e.Name()))
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
	own, err := makeOwnDir(v.cfg.FS, v.dir, persistedPrefix)
	if errors.Is(err, errors.ErrUnsupported) {
		return fmt.Errorf("keeping spill files needs locked files, which this system does not have: %w",
			tier.ErrNotSupported)
	}
	if err != nil {
		return bare(err)
	}
	v.own = own
	v.numbers.Store(uint64(time.Now().UnixNano()))
	return nil
}

// takeOver makes an abandoned directory the volume's own, with an entry for each key. A directory in
// which nothing persists it removes.
func (v *Volume) takeOver(path string) error {
	if err := v.checkOwner(path); err != nil {
		return err
	}
	own, err := claim(v.cfg.FS, path)
	if own == nil {
		return err
	}
	files, err := own.list()
	if err == nil && len(files.keys) == 0 {
		_, err := own.remove()
		return err
	}
	var all []*foundFile
	if err == nil {
		all, err = own.readFiles(files, func(path string) (openedFile, error) {
			f, err := v.cfg.FS.Reopen(path, false)
			return wholeFile{f, 1}, err
		}, v.sealer)
	}
	if wrong, ok := errors.AsType[*disk.KeyError](err); ok {
		wrong.Dir, wrong.Name = v.cfg.Dir, filepath.Base(path)
		err = wrong
	}
	if err == nil && files.bytes > v.cfg.Capacity {
		err = fmt.Errorf("it has %d bytes, and the volume's capacity is %d: %w",
			files.bytes, v.cfg.Capacity, tier.ErrNoSpace)
	}
	for _, f := range all {
		if f.Err != nil && !isOf(errsForeign, f.Err) && !errors.Is(f.Err, errDamage) {
			// No dictionary may be removed: perhaps a file that cannot be read lists it.
			err = cmp.Or(err, f.Err)
		}
	}
	if err != nil {
		return join(err, own.lock.Close())
	}
	v.own = own
	last := uint64(time.Now().UnixNano())
	for _, f := range all {
		if f.Err != nil {
			v.warn(causes.KeptDamaged, "a batch cannot be adopted: %v", f.Err)
		}
		e := &extents{v: v, size: f.Size, uses: 1, pieces: []piece{{Len: f.Size}}}
		e.written.Store(f.Size) // nothing of it is in the backlog
		if f.key != nil {
			e.sealed = &sealedExtent{sealer: v.sealer, key: f.key} // not to be written: see checkWrite
			e.sealed.mu.blocks = f.blocks
		}
		e.persisted = &persistedFile{
			number: f.number, memory: e, turn: make(chan struct{}, 1), tail: f.tail,
			state: isFound, key: f.Key, persisted: f.Persisted,
		}
		name := persistedName(f.Key, "")
		e.persisted.name.Store(&name)
		v.mu.used += f.Room
		v.mu.stays += f.Room
		v.mu.entries[f.Key] = e.persisted
		last = max(last, f.order)
	}
	v.numbers.Store(last)
	for _, name := range files.ours {
		if err := own.removeFile(name); err != nil {
			v.warn(causes.NotRemoved, "removing %s: %v", name, err)
		}
	}
	return nil
}

// leaveDir removes the directory of named files, if the volume has one. If something in it stays,
// leaveDir leaves it to the next volume.
func (v *Volume) leaveDir() (err error) {
	switch {
	case v.own == nil:
	case len(v.mu.entries) > 0:
		err = v.own.lock.Close()
	default:
		_, err = v.own.remove()
	}
	return err
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
			if known[e.Name()] || !e.IsDir() || !persists(path) || v.checkOwner(path) != nil {
				continue
			}
			known[e.Name()] = true
			files, err := (&ownDir{fs: v.cfg.FS, path: path}).list()
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
