package volumes

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"

	"github.com/zeebo/xxh3"

	"github.com/spillway-db/spillway/internal/volumes/internal/seal"
	"github.com/spillway-db/spillway/tier"
)

// A file that persists. All numbers are little-endian.
//
//	body     the memory, to the end of its last page
//	header   order, file, size u64, salt [32], blocks u32; per block: pages u32, nonce u64 (0: not
//	         written), tag [16] · the meta of Volume.Persist
//	zeros    as far as the tail does not end on a page
//	tail     keptTail, 1024 bytes
//
// The header is behind the body because its length is not known before the body is written. It is
// sealed as a whole if the volume encrypts, and it never changes. Its XXH3-64 is the file's name.
// The tail contains the place of Volume.Persist, which may change: it is written at once, within one
// page, so that a killed process leaves either the old or the new one.

const (
	tailSize  = 1024
	tailMagic = "SPLKEPT3"
	formatTag = "SPLKDIR3"
)

// maxHeader returns the maximum length of a header behind a body of some length. Four pages for each MiB
// are enough for its checksums and for sealed blocks of one page.
func maxHeader(body int64) int64 { return 16<<20 + body/(1<<20)*4*tier.Page }

// sealedBy is what opens a sealed text besides the user's key.
type sealedBy struct {
	Salt seal.Salt
	Seal seal.Seal
}

// keptTail is the end of a file that persists.
type keptTail struct {
	Magic      [8]byte
	Body       int64  // bytes before the header
	Room       int64  // from the header to the end of the file
	Length     int64  // of the header
	Key        uint64 // the header's checksum
	HeaderSeal sealedBy
	PlaceSeal  sealedBy
	PlaceSize  uint32
	Place      [tailSize - 8*5 - 2*(seal.SaltSize+8+seal.TagSize) - 4 - 8]byte
	Sum        uint64 // XXH3-64 of what is before it
}

// fixedHeader is the beginning of a header.
type fixedHeader struct {
	Order uint64 // in which headers were written: those of dictionaries before those that need them
	File  uint64 // the number in the file's name while it is a part
	Size  int64
	Salt  seal.Salt // of the key that sealed the blocks
	Count uint32    // of blocks
}

// bytes returns the tail as it is written, with its checksum.
func (t *keptTail) bytes() []byte {
	p, _ := binary.Append(make([]byte, 0, tailSize), binary.LittleEndian, t) // a struct of a fixed size
	binary.LittleEndian.PutUint64(p[tailSize-8:], xxh3.Hash(p[:tailSize-8]))
	return p
}

// setPlace sets the place, sealed if s is not nil.
func (t *keptTail) setPlace(s *seal.Sealer, place []byte) error {
	if len(place) > len(t.Place) {
		return fmt.Errorf("the names of its plan and operator are too long: %d bytes, and the limit is %d",
			len(place), len(t.Place))
	}
	if s != nil {
		place, t.PlaceSeal.Seal = s.SealText(place, t.placeExtra())
		t.PlaceSeal.Salt = s.Mark().Salt
	}
	t.PlaceSize = uint32(len(place))
	clear(t.Place[:])
	copy(t.Place[:], place)
	return nil
}

// placeExtra and headerExtra are authenticated with the place and the header. Blocks have no such text,
// so none of the three passes for another.
func (t *keptTail) placeExtra() []byte {
	return binary.LittleEndian.AppendUint64([]byte("spillway place "), t.Key)
}

var headerExtra = []byte("spillway header of a batch")

// errDamage is matched by the errors of files whose bytes differ from the written ones, except
// those of reading them.
var errDamage = errors.New("damaged")

func errDamaged(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{errDamage}, args...)...)
}

// keptHeader is the content of a file's header and tail.
type keptHeader struct {
	fixedHeader
	tail   *keptTail    // nil if it cannot be read
	blocks []seal.Block // none if nothing is encrypted
	key    *seal.Key    // of the blocks; nil if nothing is encrypted
	meta   []byte
	place  []byte
}

// openedFile is a file that was opened for reading.
type openedFile interface {
	io.ReaderAt
	io.Closer
}

// readFound reads the end of a file of some length, and closes it. failed is the error of opening it. The
// error of a file that is damaged, or cannot be read, is also in what is returned. Without a sealer the
// file must be unencrypted.
func readFound(
	f openedFile, failed error, path string, key uint64, length int64, s *seal.Sealer,
) (Persisted, *keptHeader, error) {
	h, err := new(keptHeader), failed
	if err == nil {
		h, err = readHeader(f, key, length, s)
		err = join(err, f.Close())
	}
	if err != nil {
		err = fmt.Errorf("%s: %w", path, bare(err))
		return Persisted{Key: key, File: path, Size: length, Room: round(length), Err: err}, new(keptHeader), err
	}
	return Persisted{
		Key:   key,
		File:  path,
		Meta:  h.meta,
		Place: h.place,
		Size:  h.Size,
		Room:  round(h.Size) + h.tail.Room,
		order: h.Order,
	}, h, nil
}

// readHeader reads the end of a file; see readFound.
func readHeader(f io.ReaderAt, key uint64, length int64, s *seal.Sealer) (*keptHeader, error) {
	if length < tailSize || length%tier.Page != 0 {
		return nil, errDamaged("its %d bytes are not whole pages with a header", length)
	}
	p, t := make([]byte, tailSize), new(keptTail)
	if _, err := f.ReadAt(p, length-tailSize); err != nil {
		return nil, err
	}
	_, _ = binary.Decode(p, binary.LittleEndian, t) // it is as long
	switch {
	case string(t.Magic[:]) != tailMagic || t.Sum != xxh3.Hash(p[:tailSize-8]):
		return nil, errDamaged("its last %d bytes are not what was written", tailSize)
	case t.Key != key:
		return nil, errDamaged("it is the file %016x", t.Key)
	case t.Body < 0 || t.Room < tailSize || t.Body != length-t.Room || t.Length < 0 || t.Length > t.Room-tailSize ||
		t.Length > maxHeader(t.Body) || int(t.PlaceSize) > len(t.Place):
		return nil, errDamaged("a header of %d bytes in %d, behind a body of %d, in a file of %d",
			t.Length, t.Room, t.Body, length)
	}
	h := &keptHeader{tail: t, meta: make([]byte, t.Length), place: t.Place[:t.PlaceSize]}
	if _, err := f.ReadAt(h.meta, t.Body); err != nil {
		return nil, err
	}
	if xxh3.Hash(h.meta) != key {
		return nil, errDamaged("its header is not what was written")
	}
	var err error
	if s != nil {
		h.meta, err = s.OpenText(h.meta, headerExtra, t.HeaderSeal.Salt, t.HeaderSeal.Seal)
		if err == nil {
			h.place, err = s.OpenText(h.place, t.placeExtra(), t.PlaceSeal.Salt, t.PlaceSeal.Seal)
		}
		if err != nil {
			return nil, errDamaged("its header is not what was sealed")
		}
	}
	if err := h.parse(); err != nil {
		return nil, err
	}
	switch {
	case round(h.Size) != t.Body:
		return nil, errDamaged("a body of %d bytes is not that of its header", t.Body)
	case (s != nil && h.Size > 0) != (len(h.blocks) > 0):
		return nil, errDamaged("a memory of %d bytes with %d sealed blocks", h.Size, len(h.blocks))
	case s != nil:
		h.key, err = s.KeyOf(h.Salt)
	}
	return h, err
}

// keptBlock is a seal.Block, or with nonce 0 pages that were not written.
type keptBlock struct {
	Pages uint32
	Seal  seal.Seal
}

// headerText returns a header before it is sealed.
func headerText(fixed fixedHeader, blocks []seal.Block, meta []byte) []byte {
	var kept []keptBlock
	end := int64(0)
	for _, b := range blocks {
		if b.Off > end {
			kept = append(kept, keptBlock{Pages: uint32((b.Off - end) / tier.Page)})
		}
		kept = append(kept, keptBlock{uint32(b.Len / tier.Page), b.Seal})
		end = b.Off + b.Len
	}
	fixed.Count = uint32(len(kept))
	p, _ := binary.Append(nil, binary.LittleEndian, fixed)
	p, _ = binary.Append(p, binary.LittleEndian, kept)
	return append(p, meta...)
}

// parse takes what is before the meta off the front of h.meta. It allocates no more than the header has
// bytes. A header with blocks is sealed, so they are what a volume has written.
func (h *keptHeader) parse() error {
	r := bytes.NewReader(h.meta)
	if err := binary.Read(r, binary.LittleEndian, &h.fixedHeader); err != nil {
		return errDamaged("its header ends early")
	}
	if h.Size < 0 || h.Size > math.MaxInt64/2 || int64(h.Count) > int64(r.Len()/binary.Size(keptBlock{})) {
		return errDamaged("a memory of %d bytes in %d sealed blocks", h.Size, h.Count)
	}
	blocks := make([]keptBlock, h.Count)
	_ = binary.Read(r, binary.LittleEndian, blocks) // they are there
	off := int64(0)
	for _, b := range blocks {
		n := int64(b.Pages) * tier.Page
		if b.Seal.Nonce != 0 {
			h.blocks = append(h.blocks, seal.Block{Off: off, Len: n, Seal: b.Seal})
		}
		off += n
	}
	h.meta = h.meta[len(h.meta)-r.Len():]
	return nil
}

// keptFormat is the content of a directory's file "format". It has the proof of the user's key, so
// that a wrong key is not taken for damage.
type keptFormat struct {
	Magic [8]byte
	Mark  seal.Mark
	Sum   uint64
}

// formatSize is the length of a keptFormat in the file.
var formatSize = binary.Size(keptFormat{})

func formatBytes(m seal.Mark) []byte {
	p, _ := binary.Append(nil, binary.LittleEndian, keptFormat{Magic: [8]byte([]byte(formatTag)), Mark: m})
	binary.LittleEndian.PutUint64(p[formatSize-8:], xxh3.Hash(p[:formatSize-8]))
	return p
}

// readFormat reads the file "format" of a directory, and closes it. failed is the error of opening it.
func readFormat(f openedFile, failed error) (seal.Mark, error) {
	var format keptFormat
	err := failed
	if err == nil {
		p := make([]byte, formatSize)
		_, err = f.ReadAt(p, 0)
		err = join(err, f.Close())
		_, _ = binary.Decode(p, binary.LittleEndian, &format)
		if err == nil && (string(format.Magic[:]) != formatTag || format.Sum != xxh3.Hash(p[:formatSize-8])) {
			err = errors.New("it is damaged, or of another version of Spillway")
		}
	}
	if err != nil {
		err = fmt.Errorf("its file %q: %w", formatName, bare(err))
	}
	return format.Mark, err
}
