package volumes

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// helpersPerDepth bounds the helpers of a volume: so many transfers have their full depth at the
// same time, and further ones share.
const helpersPerDepth = 4

// Volume holds memory in files in one directory. It implements tier.Pool and is safe for concurrent
// use.
//
// A volume is open, closed or ended. Close makes it closed: nothing is allocated any more, and its
// goroutines have ended. It is ended when all allocated memory is free, too: at the end of Close, or
// with the last Free. Then its files are closed and removed, and its keys overwritten. Persisted
// files that nobody took stay for the next volume.
type Volume struct {
	speed // Pace and Promised are for its space

	cfg     Config
	dir     string // absolute
	system  string // the kind of file system
	direct  bool
	own     *ownDir   // of named files; nil for anonymous ones
	file    disk.File // all memory is in it; nil with Config.Persist
	address uintptr   // what transfers must be aligned to; 1 for any
	offset  int64

	sealer  *sealer // nil if nothing is encrypted
	buffers buffers
	notices notices

	passed  []fs.DirEntry // with Config.Persist, what openPersistent did not look at; until WarnOfOthers
	numbers atomic.Uint64 // of files with Config.Persist: the last one

	written, read, fresh, given atomic.Int64
	noAllocate, noPunch         atomic.Bool // the file system cannot

	life    context.Context // until Close
	endLife context.CancelFunc
	ending  sync.WaitGroup // what Close waits for: the trimmer, and the last transfers of memory that was freed
	helpers atomic.Int64   // goroutines that work on transfers besides their callers

	// change is a token of the goroutine that adds room or gives it back. If its owner finds no
	// room, none is being added or given back. System calls are made with it, so it is not a mutex;
	// mu is locked inside it.
	change chan struct{}

	mu struct {
		lockrank.Mutex[lockrank.Backend]
		backed   *extent.Allocator         // room that the file system has given, and that is free
		holes    *extent.Allocator         // room that the file system has
		used     int64                     // bytes allocated
		idle     int64                     // the minimum of free backed bytes since trimIdle looked
		entries  map[uint64]*persistedFile // what persists, by key
		stays    int64                     // of used, the bytes of found files
		closed   bool
		ended    bool // or about to end
		warnings []diag.Warning
	}
}

var _ tier.Pool = (*Volume)(nil)

// Open opens a volume. First it removes what killed processes left in the directory, and writes and
// reads a page there. If the file system lacks something, the volume does without it, and warns. The
// caller must Close the volume.
func Open(cfg Config) (*Volume, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	v := &Volume{
		cfg:    cfg.withDefaults(),
		change: make(chan struct{}, 1),
	}
	v.cfg.Key = nil // the caller's, and not to be kept
	v.speed.request, v.speed.depth, v.speed.stripe = v.cfg.Request, int64(v.cfg.Depth), v.cfg.Stripe
	v.buffers.length, v.buffers.kept = v.cfg.Request+beyondRequest, helpersPerDepth*v.cfg.Depth
	v.life, v.endLife = context.WithCancel(context.Background())
	v.mu.entries = make(map[uint64]*persistedFile)
	v.mu.backed, v.mu.holes = extent.New(0), extent.New(0)
	if !cfg.Persist {
		v.mu.holes = extent.New(v.cfg.Capacity)
		v.mu.backed = extent.New(v.cfg.Capacity)
		v.mu.backed.Alloc(v.cfg.Capacity)
	}
	var err error
	if cfg.Encrypt {
		v.sealer, err = newSealer(cfg.Key)
	}
	if err == nil {
		err = v.open()
	}
	if err != nil {
		v.endLife()
		v.forgetKeys()
		return nil, fmt.Errorf("disk: volume %s: %w", cfg.Dir, advise(err))
	}
	if v.sealer != nil {
		v.sealer.users = nil // the volume has found all that earlier ones have left
	}
	if v.cfg.Idle > 0 && !v.cfg.Persist {
		v.ending.Go(func() {
			labels.Trim.Set()
			v.trimIdle()
		})
	}
	return v, nil
}

// open looks at the directory and tries the file system.
func (v *Volume) open() (err error) {
	if v.dir, err = filepath.Abs(v.cfg.Dir); err != nil {
		return err
	}
	info, err := v.cfg.FS.Stat(v.dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return errNoDir
	case err != nil:
		return bare(err)
	case !info.IsDir():
		return syscall.ENOTDIR
	}
	removed, err := removeAbandoned(v.cfg.FS, v.dir)
	if err != nil {
		v.warn(causes.NotRemoved, "removing what killed processes left: %v", bare(err))
	}
	if len(removed) > 0 {
		v.warn(causes.Abandoned, "removed what killed processes left: %v", removed)
	}
	if v.cfg.Persist {
		if err := v.openPersistent(); err != nil {
			return err
		}
	}
	err = v.checkRoom()
	if err == nil {
		err = v.probe()
	}
	if err != nil {
		err = join(err, v.leaveDir())
	}
	return err
}

// checkRoom compares the capacity with the free space of the file system.
func (v *Volume) checkRoom() error {
	u, err := v.cfg.FS.Usage(v.dir)
	if errors.Is(err, errors.ErrUnsupported) {
		v.warn(
			causes.System,
			"the free space of the file system is not known here: a full disk is noticed when it is written",
		)
		return nil
	}
	if err != nil {
		return bare(err)
	}
	v.system = u.FileSystem
	v.warnOfFileSystem(u)
	if v.cfg.Capacity-v.mu.stays > u.Free-v.cfg.Reserve {
		return fmt.Errorf("%w: capacity %d bytes; the file system has %d free, of which %d are to stay free",
			tier.ErrNoSpace, v.cfg.Capacity, u.Free, v.cfg.Reserve)
	}
	return nil
}

// probe finds the best kind of file that the file system has: anonymous before named, and direct
// before buffered.
func (v *Volume) probe() (err error) {
	for _, kind := range []struct{ anonymous, direct bool }{
		{true, true}, {true, false}, {false, true}, {false, false},
	} {
		if kind.anonymous && v.cfg.Persist {
			continue
		}
		if !kind.anonymous && v.own == nil {
			if v.own, err = makeOwnDir(v.cfg.FS, v.dir, fmt.Sprintf("spillway-%d-", os.Getpid())); err != nil {
				return bare(err)
			}
			v.warn(causes.NamedFiles, "no anonymous files on %s: spill files have names, in %s; "+
				"a killed process leaves them to the next", v.system, v.own.path)
		}
		err = v.probeFile(kind.direct)
		if err != nil || v.cfg.Persist { // each memory has a file of its own
			if v.file != nil {
				err = cmp.Or(err, bare(v.file.Close()))
				v.file = nil
			}
			if v.own != nil {
				err = cmp.Or(err, v.own.removeFile(spillName))
			}
		}
		if err == nil && !kind.direct {
			v.warn(causes.DirectIO, "no direct I/O on %s: transfers go through the page cache, "+
				"which is slower and takes memory", v.system)
		}
		if !isOf(errsUnable, err) {
			break
		}
	}
	return err
}

// probeFile opens the volume's file, and writes and reads a page, because some file systems refuse
// direct I/O only then.
func (v *Volume) probeFile(direct bool) (err error) {
	defer guard.Error(&err, filesOf)
	if v.own == nil {
		v.file, err = v.cfg.FS.OpenAnonymous(v.dir, direct)
	} else {
		v.file, err = v.cfg.FS.Create(filepath.Join(v.own.path, spillName), direct)
	}
	if err != nil {
		return fmt.Errorf("opening a spill file: %w", bare(err))
	}
	at, offset := v.file.Alignment()
	if at <= 0 || offset <= 0 || at > tier.Page || offset > tier.Page {
		return fmt.Errorf("direct I/O aligned to %d and %d bytes: %w", at, offset, syscall.EINVAL)
	}
	v.direct, v.address, v.offset = v.file.Direct(), uintptr(at), int64(offset)
	page, back := extent.Aligned(tier.Page), extent.Aligned(tier.Page)
	for i := range page {
		page[i] = byte(i) ^ 0xa5
	}
	whole := wholeFile{v.file, v.offset}
	if _, err := whole.WriteAt(page, 0); err != nil {
		return fmt.Errorf("writing a page: %w", err)
	}
	if _, err := whole.ReadAt(back, 0); err != nil {
		return fmt.Errorf("reading a page: %w", err)
	}
	if !bytes.Equal(page, back) {
		return errors.New("a page that was written reads differently")
	}
	return nil
}

// forgetKeys ends all use of keys, and of the memory that sealed requests pass through.
func (v *Volume) forgetKeys() {
	v.sealer.forget()
	v.buffers.unmap()
}

// Dir returns the directory as it was configured.
func (v *Volume) Dir() string { return v.cfg.Dir }

// Stats returns the volume's figures. The sizes are a consistent cut except for the counters of
// transfers.
func (v *Volume) Stats() disk.Stats {
	s := v.speed.stats()
	s.Dir, s.FileSystem, s.Direct, s.Anonymous, s.Encrypted = v.cfg.Dir, v.system, v.direct, v.own == nil, v.cfg.Encrypt
	s.Request, s.Depth, s.Capacity = v.cfg.Request, v.cfg.Depth, v.cfg.Capacity
	s.Written, s.Read, s.Fresh, s.Given = v.written.Load(), v.read.Load(), v.fresh.Load(), v.given.Load()
	v.mu.Lock()
	defer v.mu.Unlock()
	s.Used, s.Backed = v.mu.used, v.mu.used+v.mu.backed.FreeBytes()
	if v.file != nil && !v.mu.ended {
		s.Segments = 1
	}
	s.Warnings = slices.Clone(v.mu.warnings)
	return s
}

// Close ends the volume's goroutines, waits until what was freed is reclaimed, and closes and
// removes its files if no memory is allocated. Memory that is allocated stays usable, by its
// callers without helpers; the Free of the last of it ends the rest. A second Close returns
// tier.ErrClosed.
func (v *Volume) Close() error {
	v.mu.Lock()
	if v.mu.closed {
		v.mu.Unlock()
		return tier.ErrClosed
	}
	v.mu.closed = true
	var over []uint64 // batches without memory, which no Free ends
	for key, k := range v.mu.entries {
		if k.state == isOwned && k.memory.size == 0 {
			over = append(over, key)
		}
	}
	v.mu.Unlock()
	v.endLife()
	v.ending.Wait()
	for _, key := range over {
		v.Forget(key)
	}
	return v.end()
}

// end ends a closed volume if nothing is allocated of it. Close and the last Frees may meet here: with
// the token, one finishes before the next begins, and no Alloc or Trim works on files.
func (v *Volume) end() error {
	v.change <- struct{}{}
	defer func() { <-v.change }()
	v.mu.Lock()
	last := v.mu.used == v.mu.stays && !v.mu.ended
	if last {
		v.mu.ended = true
		v.mu.backed = extent.New(0)
	}
	v.mu.Unlock()
	var err error
	if last && v.file != nil {
		err = bare(v.file.Close())
	}
	if last { // and no header is sealed any more
		err = join(err, v.leaveDir())
		v.forgetKeys()
	}
	if err != nil {
		return fmt.Errorf("disk: volume %s: closing: %w", v.cfg.Dir, advise(err))
	}
	return nil
}
