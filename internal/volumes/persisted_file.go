package volumes

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"path/filepath"

	"github.com/zeebo/xxh3"

	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// A file that persists. All numbers are little-endian.
//
//	body     the memory, to the end of its last page
//	header   order, file, size u64, salt [32], blocks u32; per block: offset, length, nonce u64,
//	         tag [16] · the meta of Volume.Persist
//	zeros    as far as the tail does not end on a page
//	tail     persistedTail, 1024 bytes
//
// The header is behind the body because its length is not known before the body is written. It is
// sealed as a whole if the volume encrypts, and it never changes. Its XXH3-64 is the file's name.
// The tail contains the place of Volume.Persist, which may change: it is written at once, within one
// page, so that a killed process leaves either the old or the new one. It also has the proof of the
// user's key, so that a wrong key is not taken for damage.

const (
	tailSize  = 1024
	tailMagic = "SPLKEPT5"
)

// maxHeader returns the maximum length of a header behind a body of some length. Five pages for
// each MiB are enough for its checksums and for sealed blocks of one page.
func maxHeader(body int64) int64 { return 16<<20 + body/(1<<20)*5*tier.Page }

// persistedTail is the end of a file that persists.
type persistedTail struct {
	Magic      [8]byte
	Body       int64   // bytes before the header
	Room       int64   // from the header to the end of the file
	Length     int64   // of the header
	Key        uint64  // the header's checksum
	Mark       keyMark // of the key that sealed the header
	HeaderSeal seal
	PlaceSalt  keySalt // of the key that sealed the place
	PlaceSeal  seal
	PlaceSize  uint32
	Place      [tailSize - 8*5 - markSize - saltSize - 2*(8+tagSize) - 4 - 8]byte
	Sum        uint64 // XXH3-64 of what is before it
}

// fixedHeader is the beginning of a header.
type fixedHeader struct {
	Order uint64 // in which headers were written: those of dictionaries before those that need them
	File  uint64 // the number in the file's name while it is a part
	Size  int64
	Salt  keySalt // of the key that sealed the blocks
	Count uint32  // of blocks
}

// bytes returns the tail as it is written, with its checksum.
func (t *persistedTail) bytes() []byte {
	p, _ := binary.Append(make([]byte, 0, tailSize), binary.LittleEndian, t) // a struct of a fixed size
	binary.LittleEndian.PutUint64(p[tailSize-8:], xxh3.Hash(p[:tailSize-8]))
	return p
}

// setPlace sets the place, sealed if s is not nil.
func (t *persistedTail) setPlace(s *sealer, place []byte) error {
	if len(place) > len(t.Place) {
		return fmt.Errorf("the names of its plan and operator are too long: %d bytes, and the limit is %d",
			len(place), len(t.Place))
	}
	if s != nil {
		place, t.PlaceSeal = s.sealText(place, t.placeExtra())
		t.PlaceSalt = s.mark.Salt
	}
	t.PlaceSize = uint32(len(place))
	clear(t.Place[:])
	copy(t.Place[:], place)
	return nil
}

// placeExtra and headerExtra are authenticated with the place and the header. Blocks have no such text,
// so none of the three passes for another.
func (t *persistedTail) placeExtra() []byte {
	return binary.LittleEndian.AppendUint64([]byte("spillway place "), t.Key)
}

var headerExtra = []byte("spillway header of a batch")

// errDamage is matched by the errors of files whose bytes differ from the written ones, except
// those of reading them.
var errDamage = errors.New("damaged")

// errsForeign are the errors of files that another version, or a volume with another key, may have
// written.
var (
	errVersion  = errors.New("it is of another version of Spillway")
	errsForeign = []error{errVersion, disk.ErrKey}
)

func errDamaged(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{errDamage}, args...)...)
}

// foundFile is what the end of a file contains. If it cannot be read, only Key, Size, Room, File and
// Err of Persisted are set.
type foundFile struct {
	Persisted
	number uint64 // in the file's name while it is a part
	tail   *persistedTail
	blocks []sealedBlock // none if nothing is encrypted
	key    *sealKey      // of the blocks; nil if nothing is encrypted
}

// openedFile is a file that was opened for reading.
type openedFile interface {
	io.ReaderAt
	io.Closer
}

// readFiles reads the ends of all files of batches and dictionaries in a directory. Each has its own Err,
// which matches errDamage or errsForeign, with a *disk.KeyError without names, or the file cannot be
// read. If none can be read, and one is of errsForeign, that is the error of the directory.
func (d *ownDir) readFiles(
	c *content, open func(path string) (openedFile, error), s *sealer,
) (all []*foundFile, foreign error) {
	sound := false
	for key, length := range c.keys {
		path := filepath.Join(d.path, persistedName(key, ""))
		var found *foundFile
		f, err := open(path)
		if err == nil {
			found, err = readEnd(f, key, length, s)
			err = join(err, f.Close())
		}
		if err == nil {
			sound = true
		} else {
			err = fmt.Errorf("%s: %w", path, bare(err))
			found = &foundFile{Persisted: Persisted{Size: length, Room: extent.RoundUp(length, tier.Page), Err: err}}
		}
		if isOf(errsForeign, err) {
			foreign = err
		}
		found.Key, found.File = key, path
		all = append(all, found)
	}
	if sound {
		foreign = nil
	}
	return all, foreign
}

func readEnd(f io.ReaderAt, key uint64, length int64, s *sealer) (*foundFile, error) {
	if length < tailSize || length%tier.Page != 0 {
		return nil, errDamaged("its %d bytes are not whole pages with a header", length)
	}
	p, t := make([]byte, tailSize), new(persistedTail)
	if _, err := f.ReadAt(p, length-tailSize); err != nil {
		return nil, err
	}
	_, _ = binary.Decode(p, binary.LittleEndian, t) // it is as long
	switch {
	case t.Sum != xxh3.Hash(p[:tailSize-8]):
		return nil, errDamaged("its last %d bytes are not what was written", tailSize)
	case string(t.Magic[:]) != tailMagic:
		return nil, errVersion
	case t.Key != key:
		return nil, errDamaged("it is the file %016x", t.Key)
	case t.Body < 0 || t.Room < tailSize || t.Body != length-t.Room || t.Length < 0 || t.Length > t.Room-tailSize ||
		t.Length > maxHeader(t.Body) || int(t.PlaceSize) > len(t.Place):
		return nil, errDamaged("a header of %d bytes in %d, behind a body of %d, in a file of %d",
			t.Length, t.Room, t.Body, length)
	}
	if opens, err := s.opens(t.Mark); err != nil {
		return nil, err
	} else if !opens {
		return nil, &disk.KeyError{Sealed: t.Mark.Sealed, Encrypt: s != nil}
	}
	text, place := make([]byte, t.Length), t.Place[:t.PlaceSize]
	if _, err := f.ReadAt(text, t.Body); err != nil {
		return nil, err
	}
	if xxh3.Hash(text) != key {
		return nil, errDamaged("its header is not what was written")
	}
	var err error
	if s != nil {
		text, err = s.openText(text, headerExtra, t.Mark.Salt, t.HeaderSeal)
		if err == nil {
			place, err = s.openText(place, t.placeExtra(), t.PlaceSalt, t.PlaceSeal)
		}
		if err != nil {
			return nil, errDamaged("its header is not what was sealed")
		}
	}
	var h fixedHeader
	r := bytes.NewReader(text)
	if err := binary.Read(r, binary.LittleEndian, &h); err != nil {
		return nil, errDamaged("its header ends early")
	}
	if h.Size < 0 || h.Size > math.MaxInt64/2 || extent.RoundUp(h.Size, tier.Page) != t.Body ||
		int64(h.Count) > int64(r.Len()/binary.Size(sealedBlock{})) {
		return nil, errDamaged("a memory of %d bytes in %d sealed blocks, behind a body of %d", h.Size, h.Count, t.Body)
	}
	blocks := make([]sealedBlock, h.Count)          // that a volume has written, because the header is sealed
	_ = binary.Read(r, binary.LittleEndian, blocks) // they are there
	found := &foundFile{number: h.File, tail: t, blocks: blocks, Persisted: Persisted{
		Meta: text[len(text)-r.Len():], Place: place, Size: h.Size, Room: t.Body + t.Room, order: h.Order,
	}}
	if s != nil {
		found.key, err = s.keyOf(h.Salt)
	}
	return found, err
}
