package volumes

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/address"
	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/oneline"
	"github.com/spillway-db/spillway/internal/stripe"
	"github.com/spillway-db/spillway/internal/volumes/internal/pace"
	"github.com/spillway-db/spillway/internal/volumes/internal/seal"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// helpersPerDepth bounds the helpers of a volume: so many transfers have their full depth at the
// same time, and further ones share.
const helpersPerDepth = 4

// Volume holds memory in files in one directory. It implements tier.Pool and is safe
// for concurrent use.
type Volume struct {
	cfg       Config
	dir       string // absolute
	system    string // the kind of file system
	direct    bool
	anonymous bool
	own       *ownDir // of named files; nil for anonymous ones
	address   uintptr // what transfers must be aligned to; 1 for any
	offset    int64

	sealer *seal.Sealer // nil if nothing is encrypted
	sealed seal.Buffers

	passed  []fs.DirEntry // with Config.Persist, what openPersistent did not look at; until WarnOfOthers
	numbers atomic.Uint64 // of its files: the last one

	pacer  *pace.Pacer
	window pace.Window
	told   told

	written, read, fresh, given atomic.Int64
	noAllocate, noPunch         atomic.Bool // the file system cannot

	life    context.Context // until Close
	endLife context.CancelFunc
	freed   chan struct{} // wakes trimIdle; one at most
	trimmer sync.WaitGroup
	helpers helpers
	bounces sync.Pool     // *[]byte of bounceSize
	patch   chan struct{} // a token: one write of parts of pages at a time

	// change is a token, held while room is added or given back, that is while bytes are neither
	// free nor handed out. Its holder, if it finds no room, knows that there is none. System calls
	// are made while it is held, so it is not a mutex; mu is taken inside it.
	change chan struct{}

	mu struct {
		lockrank.Mutex[lockrank.Backend]
		segments []*segment
		used     int64             // handed out
		free     int64             // backed, and not handed out
		idle     int64             // the least that free was since trimIdle looked
		entries  map[uint64]*entry // what persists, by key
		stays    int64             // of used, what was found and not taken
		retiring int               // freed, and transfers have not ended
		settled  chan struct{}     // closed when retiring is 0 after Close
		closed   bool
		quiet    bool // after closed: no goroutine and no Alloc of ours works on files
		ended    bool // all files are closed, or someone is about to close them
		warnings []diag.Warning
	}
}

// segment is one file and what is free in it. Every byte of it is handed out, in
// backed, in holes, or in the hands of the holder of the change token.
type segment struct {
	name   string
	index  int
	size   int64
	file   disk.File // nil: not open, and all of it is a hole; set under change and mu
	backed *extent.Allocator
	holes  *extent.Allocator
	used   int64
}

var _ tier.Pool = (*Volume)(nil)

// Stripe is what volumes have in common that are used side by side; see Config.Stripe. The zero
// value is ready, and not to be copied. It is safe for concurrent use.
type Stripe = pace.Stripe

// Pace says how far ahead of the others the volume is. The space of the volume asks.
func (v *Volume) Pace() stripe.Pace { return v.pacer.Pace() }

// Promised takes how many bytes of the space are promised and not drawn, before each Alloc.
func (v *Volume) Promised(n int64) { v.pacer.Promised(n) }

// Open opens a volume, after it has removed what killed processes left in the
// directory and has written and read a page there. What the file system cannot do,
// the volume does without, and warns. The caller must Close it.
func Open(cfg Config) (*Volume, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	v := &Volume{
		cfg:    cfg.withDefaults(),
		freed:  make(chan struct{}, 1),
		patch:  make(chan struct{}, 1),
		change: make(chan struct{}, 1),
	}
	v.helpers.most.Store(helpersPerDepth * int64(v.cfg.Depth))
	v.window.Request, v.window.Depth = v.cfg.Request, int64(v.cfg.Depth)
	v.pacer = pace.NewPacer(cfg.Stripe)
	v.life, v.endLife = context.WithCancel(context.Background())
	v.bounces.New = func() any {
		b := address.Aligned(int(v.bounceSize()))
		return &b
	}
	v.sealed.Request, v.sealed.Slab, v.sealed.Slabs, v.sealed.Heap = v.cfg.Request, v.cfg.Depth, helpersPerDepth, &v.bounces
	v.mu.entries = make(map[uint64]*entry)
	v.cfg.Key = nil // the caller's, and not to be kept
	var err error
	if cfg.Encrypt {
		v.sealer, err = seal.NewSealer(cfg.Key)
	}
	if err == nil {
		err = v.open()
	}
	if err != nil {
		v.endLife()
		return nil, fmt.Errorf("disk: volume %s: %w", cfg.Dir, oneline.Join(advised(err), v.forgetKeys()))
	}
	v.sealer.Opened()
	off := int64(0)
	for index := 0; off < v.cfg.Capacity && !v.cfg.Persist; index++ {
		size := min(v.cfg.SegmentSize, v.cfg.Capacity-off)
		off += size
		s := &segment{name: segmentFile(index), index: index, size: size}
		s.reset()
		v.mu.segments = append(v.mu.segments, s)
	}
	if v.cfg.Idle > 0 {
		v.trimmer.Go(func() {
			labels.Trim.Set()
			v.trimIdle()
		})
	}
	return v, nil
}

// reset makes all of the segment a hole.
func (s *segment) reset() {
	s.holes = extent.New(s.size)
	s.backed = extent.New(s.size)
	s.backed.Alloc(s.size)
}

// open looks at the directory and finds out what it can.
func (v *Volume) open() error {
	dir, err := filepath.Abs(v.cfg.Dir)
	if err != nil {
		return err
	}
	v.dir = dir
	info, err := v.cfg.FS.Stat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return errNoDir
	case err != nil:
		return bare(err)
	case !info.IsDir():
		return errNotDir
	}
	removed, err := removeAbandoned(v.cfg.FS, dir)
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
	if err != nil && v.cfg.Persist {
		err = oneline.Join(err, v.leavePersistent())
	}
	return err
}

// checkRoom compares the capacity with what the file system has.
func (v *Volume) checkRoom() error {
	u, err := v.cfg.FS.Usage(v.dir)
	if errors.Is(err, errors.ErrUnsupported) {
		v.warn(causes.System, "the free space of the file system is not known here: a full disk is noticed when it is written")
		return nil
	}
	if err != nil {
		return bare(err)
	}
	v.system = u.FileSystem
	switch {
	case u.Memory || u.FileSystem == overlay && overMemory(v.dir):
		v.warn(causes.MemoryFileSystem, "the directory is on %s: what is spilled there stays in memory", u.FileSystem)
	case u.FileSystem == overlay:
		v.warnOfOverlay()
	}
	v.warnOfFiles()
	if v.cfg.Capacity-v.mu.stays-v.mu.free > u.Free-v.cfg.Reserve {
		return fmt.Errorf("%w: capacity %d bytes; the file system has %d free, of which %d are to stay free",
			tier.ErrNoSpace, v.cfg.Capacity, u.Free, v.cfg.Reserve)
	}
	return nil
}

// probe finds the best kind of file that the file system can: anonymous before
// named, direct before buffered.
func (v *Volume) probe() error {
	if v.cfg.Persist {
		return v.probeNamed(false)
	}
	err := v.probeNamed(true)
	if !cannotAnonymous(err) {
		return err
	}
	if v.own, err = makeOwnDir(v.cfg.FS, v.dir, ownPrefix()); err != nil {
		return bare(err)
	}
	v.warn(causes.NamedFiles, "no anonymous files on %s: spill files have names, in %s; a killed process leaves them to the next", v.system, v.own.path)
	if err := v.probeNamed(false); err != nil {
		return oneline.Join(err, v.own.remove())
	}
	return nil
}

// probeNamed tries files with or without names, direct and then buffered.
func (v *Volume) probeNamed(anonymous bool) error {
	v.anonymous = anonymous
	err := v.probeFile(true)
	if errors.Is(err, syscall.EINVAL) {
		if err = v.probeFile(false); err == nil {
			v.warn(causes.DirectIO, "no direct I/O on %s: transfers go through the page cache, which is slower and takes memory", v.system)
		}
	}
	return err
}

// cannotAnonymous reports whether err is a file system's way to say that it has no
// anonymous files: open(2) names EOPNOTSUPP, and EISDIR where O_TMPFILE is not
// known; EINVAL, after direct I/O was left out, is what some network ones say.
func cannotAnonymous(err error) bool {
	return errors.Is(err, errors.ErrUnsupported) || errors.Is(err, syscall.EISDIR) || errors.Is(err, syscall.EINVAL)
}

// probeFile opens a file, writes and reads a page, and sets what kind of file it is
// if all went well. Some file systems refuse direct I/O only when it is done.
func (v *Volume) probeFile(direct bool) (err error) {
	name := segmentFile(0)
	f, err := v.openSegment(name, direct)
	if err != nil {
		return fmt.Errorf("opening a spill file: %w", bare(err))
	}
	defer func() {
		if e := v.closeSegment(name, f); err == nil {
			err = e
		}
	}()
	at, offset := f.Alignment()
	if at <= 0 || offset <= 0 || at > tier.Page || offset > tier.Page {
		return fmt.Errorf("direct I/O aligned to %d and %d bytes: %w", at, offset, syscall.EINVAL)
	}
	v.direct, v.address, v.offset = f.Direct(), uintptr(at), int64(offset)
	page, back := address.Aligned(tier.Page), address.Aligned(tier.Page)
	for i := range page {
		page[i] = byte(i) ^ 0xa5
	}
	if err := transferAll(f.WriteAt, page, 0, v.offset); err != nil {
		return fmt.Errorf("writing a page: %w", bare(err))
	}
	if err := transferAll(f.ReadAt, back, 0, v.offset); err != nil {
		return fmt.Errorf("reading a page: %w", bare(err))
	}
	if !bytes.Equal(page, back) {
		return errors.New("a page that was written reads differently")
	}
	return nil
}

// forgetKeys ends all use of keys, and of the memory that sealed requests pass through.
func (v *Volume) forgetKeys() error {
	v.sealer.Forget()
	return v.sealed.Unmap()
}

// openSegment opens a new, empty file.
func (v *Volume) openSegment(name string, direct bool) (disk.File, error) {
	if v.anonymous {
		return v.cfg.FS.OpenAnonymous(v.dir, direct)
	}
	path := filepath.Join(v.own.path, name)
	f, err := v.cfg.FS.Create(path, direct)
	if errors.Is(err, fs.ErrExist) { // we made it, because the directory is ours alone, and could not remove it
		if err := v.own.removeFile(name); err != nil {
			return nil, err
		}
		f, err = v.cfg.FS.Create(path, direct)
	}
	if err != nil { // it may have been made nevertheless
		return nil, oneline.Join(err, v.own.removeFile(name))
	}
	return f, nil
}

// closeSegment closes a file and removes its name.
func (v *Volume) closeSegment(name string, f disk.File) error {
	err := bare(f.Close())
	if !v.anonymous {
		err = oneline.Join(err, v.own.removeFile(name))
	}
	return err
}

// bare returns the system's error without the path that the os package puts
// before it, which our messages name themselves.
func bare(err error) error {
	if p, ok := err.(*fs.PathError); ok {
		return p.Err
	}
	return err
}

// Dir returns the directory as it was configured.
func (v *Volume) Dir() string { return v.cfg.Dir }

// Stats returns the volume's figures. The sizes are a consistent cut except for the
// counters of transfers.
func (v *Volume) Stats() disk.Stats {
	s := disk.Stats{
		Dir: v.cfg.Dir, FileSystem: v.system, Direct: v.direct, Anonymous: v.anonymous, Encrypted: v.cfg.Encrypt,
		Request: v.cfg.Request, Depth: v.cfg.Depth, Capacity: v.cfg.Capacity,
		Written: v.written.Load(), Read: v.read.Load(), Fresh: v.fresh.Load(), Given: v.given.Load(),
	}
	p := v.pacer.Stats()
	s.Bandwidth, s.Backlog, s.Writing, s.Ailing = p.Bandwidth, p.Backlog, p.Writing, p.Ailing
	v.mu.Lock()
	defer v.mu.Unlock()
	s.Used = v.mu.used
	s.Backed = v.mu.used + v.mu.free
	for _, seg := range v.mu.segments {
		if seg.file != nil {
			s.Segments++
		}
	}
	s.Warnings = slices.Clone(v.mu.warnings)
	return s
}

// Close ends the volume's goroutines, waits for what was freed, and closes and removes
// all files that nothing is handed out of. Memory that is handed out stays usable,
// on the caller's goroutine alone; the Free of the last of it ends the rest. A
// second Close returns tier.ErrClosed.
func (v *Volume) Close() error {
	v.mu.Lock()
	if v.mu.closed {
		v.mu.Unlock()
		return tier.ErrClosed
	}
	v.mu.closed = true
	settled := make(chan struct{})
	if v.mu.retiring == 0 {
		close(settled)
	} else {
		v.mu.settled = settled
	}
	v.mu.Unlock()
	v.endLife()
	v.helpers.most.Store(0)
	v.trimmer.Wait()
	<-settled
	v.change <- struct{}{} // an Alloc or Trim under way ends; the next finds it closed
	v.mu.Lock()
	v.mu.quiet = true
	var over []uint64 // batches without memory, which no Free ends
	for key, ent := range v.mu.entries {
		if !ent.stays && ent.memories[0].size == 0 {
			over = append(over, key)
		}
	}
	v.mu.Unlock()
	<-v.change
	for _, key := range over {
		v.Forget(key)
	}
	return v.end()
}

// end closes the segments that nothing is handed out of, once the volume is quiet;
// with the last of them it removes the directory of named files. Close and the last
// Frees may meet here: the token lets one finish before the next begins, so that the
// directory is empty when it is removed.
func (v *Volume) end() error {
	v.change <- struct{}{}
	defer func() { <-v.change }()
	type open struct {
		name string
		file disk.File
	}
	var files []open
	v.mu.Lock()
	for _, s := range v.mu.segments {
		if s.file != nil && s.used == 0 {
			files = append(files, open{s.name, s.file})
			s.file = nil
			v.mu.free -= s.backed.FreeBytes()
			s.reset()
		}
	}
	last := v.mu.used == v.mu.stays && !v.mu.ended
	if last {
		v.mu.ended = true
	}
	v.mu.Unlock()
	var err error
	for _, f := range files {
		err = oneline.Join(err, v.closeSegment(f.name, f.file))
	}
	switch {
	case last && v.cfg.Persist:
		err = oneline.Join(err, v.leavePersistent())
	case last && v.own != nil:
		err = oneline.Join(err, v.own.remove())
	}
	if last { // and no record is sealed any more
		err = oneline.Join(err, v.forgetKeys())
	}
	if err != nil {
		return fmt.Errorf("disk: volume %s: closing: %w", v.cfg.Dir, advised(err))
	}
	return nil
}
