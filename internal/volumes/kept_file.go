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
//	body     the first memory, to the end of its last page
//	header   order u64, memories u32; per memory: file u64, size u64, salt [32], number u64, units u32, and of each unit its
//	         seal (nonce u64, tag [16]) · the meta of Volume.Persist
//	zeros    as far as the tail does not end on a page
//	tail     keptTail, 1024 bytes
//
// The header is behind the body because its length is not known before the body is written. It is
// sealed as a whole if the volume encrypts, and it never changes. Its XXH3-64 is the file's name.
// The tail contains the place of Volume.Persist, which may change: it is written at once, within one
// page, so that a killed process leaves either the old or the new one.
//
// A batch whose memories are several has a file for each. The header of the first one lists the
// others, which have no header.

const (
	tailSize  = 1024
	tailMagic = "SPLKEPT1"
	formatTag = "SPLKDIR2"

	// maxHeader bounds the header of a body of length 0; a longer body may have one page more for
	// each MiB, which is twice what its seals and checksums need.
	maxHeader = 16 << 20
)

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

// keptMemory describes one memory in a header.
type keptMemory struct {
	File uint64 // the number in the file's name while it is a part
	Size int64
	Salt seal.Salt // of the key that sealed the units
	// Number and Seals are those of the units; there are none if nothing is encrypted.
	Number uint64
	Seals  []seal.Seal
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
		place, t.PlaceSeal.Seal = s.SealText(nil, place, t.placeExtra())
		t.PlaceSeal.Salt = s.Own().Salt()
	}
	t.PlaceSize = uint32(len(place))
	clear(t.Place[:])
	copy(t.Place[:], place)
	return nil
}

// placeExtra and headerExtra are authenticated with the place and the header. Units have 16 bytes
// there, so none of the three passes for another.
func (t *keptTail) placeExtra() []byte {
	return binary.LittleEndian.AppendUint64([]byte("spillway place "), t.Key)
}

var headerExtra = []byte("spillway header of a batch")

// errDamage is what the errors of files match that are not what was written, other than those of
// reading them.
var errDamage = errors.New("damaged")

func errDamaged(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{errDamage}, args...)...)
}

// readTail reads the tail of a file of some length.
func readTail(f io.ReaderAt, key uint64, length int64) (*keptTail, error) {
	if length < tailSize || length%tier.Page != 0 {
		return nil, errDamaged("its %d bytes are not whole pages with a header", length)
	}
	p := make([]byte, tailSize)
	if _, err := f.ReadAt(p, length-tailSize); err != nil {
		return nil, err
	}
	t := new(keptTail)
	if _, err := binary.Decode(p, binary.LittleEndian, t); err != nil {
		return nil, err
	}
	switch {
	case string(t.Magic[:]) != tailMagic || t.Sum != xxh3.Hash(p[:tailSize-8]):
		return nil, errDamaged("its last %d bytes are not what was written", tailSize)
	case t.Key != key:
		return nil, errDamaged("it is the file %016x", t.Key)
	case t.Body < 0 || t.Room < tailSize || t.Body != length-t.Room || t.Length < 0 || t.Length > t.Room-tailSize ||
		t.Length > maxHeader+t.Body/(1<<20)*tier.Page || int(t.PlaceSize) > len(t.Place):
		return nil, errDamaged("a header of %d bytes in %d, behind a body of %d, in a file of %d",
			t.Length, t.Room, t.Body, length)
	}
	return t, nil
}

// keptHeader is what a file's header and tail say.
type keptHeader struct {
	tail     *keptTail
	order    uint64 // in which headers were written: those of dictionaries before those that need them
	memories []keptMemory
	keys     []*seal.Key // of the memories, if they are sealed
	meta     []byte
	place    []byte
}

// readHeader reads the end of a file. Without a sealer the file must be unencrypted.
func readHeader(f io.ReaderAt, key uint64, length int64, s *seal.Sealer) (*keptHeader, error) {
	t, err := readTail(f, key, length)
	if err != nil {
		return nil, err
	}
	h := &keptHeader{tail: t, meta: make([]byte, t.Length), place: t.Place[:t.PlaceSize]}
	if _, err := f.ReadAt(h.meta, t.Body); err != nil {
		return nil, err
	}
	if xxh3.Hash(h.meta) != key {
		return nil, errDamaged("its header is not what was written")
	}
	if s != nil {
		if h.meta, err = openText(s, h.meta, headerExtra, t.HeaderSeal); err == nil {
			h.place, err = openText(s, h.place, t.placeExtra(), t.PlaceSeal)
		}
		if err != nil {
			return nil, errDamaged("its header is not what was sealed")
		}
	}
	if err := h.parseMemories(); err != nil {
		return nil, err
	}
	if len(h.memories) == 0 || round(h.memories[0].Size) != t.Body {
		return nil, errDamaged("a body of %d bytes is not that of its header", t.Body)
	}
	for _, m := range h.memories {
		if (s != nil && m.Size > 0) != (len(m.Seals) > 0) {
			return nil, errDamaged("a memory of %d bytes with %d seals", m.Size, len(m.Seals))
		}
		if s == nil {
			continue
		}
		k, err := s.KeyOf(m.Salt)
		if err != nil {
			return nil, err
		}
		h.keys = append(h.keys, k)
	}
	return h, nil
}

// takeParts takes the files of further memories off a list of lengths.
func (h *keptHeader) takeParts(parts map[uint64]int64) error {
	for _, m := range h.memories[1:] {
		if n, ok := parts[m.File]; !ok {
			return errDamaged("its file %s is not there", keptName(m.File, partSuffix))
		} else if n != round(m.Size) || n == 0 {
			return errDamaged("its file %s has %d bytes, and it had %d",
				keptName(m.File, partSuffix), n, round(m.Size))
		}
	}
	for _, m := range h.memories[1:] {
		delete(parts, m.File)
	}
	return nil
}

func openText(s *seal.Sealer, text, extra []byte, by sealedBy) ([]byte, error) {
	k, err := s.KeyOf(by.Salt)
	if err != nil {
		return nil, err
	}
	return k.OpenText(text, extra, by.Seal)
}

// memoryHeader is the fixed part of a keptMemory.
type memoryHeader struct {
	File   uint64
	Size   int64
	Salt   seal.Salt
	Number uint64
	Units  uint32
}

// headerText returns a header before it is sealed.
func headerText(order uint64, memories []keptMemory, meta []byte) []byte {
	p := binary.LittleEndian.AppendUint64(nil, order)
	p = binary.LittleEndian.AppendUint32(p, uint32(len(memories)))
	for _, m := range memories {
		fixed := memoryHeader{m.File, m.Size, m.Salt, m.Number, uint32(len(m.Seals))}
		p, _ = binary.Append(p, binary.LittleEndian, fixed)
		p, _ = binary.Append(p, binary.LittleEndian, m.Seals)
	}
	return append(p, meta...)
}

// parseMemories takes the order and the memories off the front of h.meta.
func (h *keptHeader) parseMemories() error {
	r := bytes.NewReader(h.meta)
	var count uint32
	err := errors.Join(binary.Read(r, binary.LittleEndian, &h.order), binary.Read(r, binary.LittleEndian, &count))
	for range count {
		var m memoryHeader
		if err = errors.Join(err, binary.Read(r, binary.LittleEndian, &m)); err != nil {
			break
		}
		units := int64(0)
		if m.Units > 0 {
			units = seal.UnitsIn(0, max(m.Size, 1))
		}
		if m.Size < 0 || m.Size > math.MaxInt64/2 || int64(m.Units) != units ||
			units*(8+seal.TagSize) > int64(r.Len()) {
			return errDamaged("a memory of %d bytes and %d units", m.Size, m.Units)
		}
		seals := make([]seal.Seal, m.Units)
		err = binary.Read(r, binary.LittleEndian, seals)
		h.memories = append(h.memories, keptMemory{m.File, m.Size, m.Salt, m.Number, seals})
	}
	if err != nil {
		return errDamaged("its header ends early")
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

func formatBytes(m seal.Mark) []byte {
	p, _ := binary.Append(nil, binary.LittleEndian, keptFormat{Magic: [8]byte([]byte(formatTag)), Mark: m})
	binary.LittleEndian.PutUint64(p[len(p)-8:], xxh3.Hash(p[:len(p)-8]))
	return p
}

func parseFormat(p []byte) (m seal.Mark, err error) {
	var f keptFormat
	n, err := binary.Decode(p, binary.LittleEndian, &f)
	if err != nil || string(f.Magic[:]) != formatTag || f.Sum != xxh3.Hash(p[:n-8]) {
		return m, fmt.Errorf("its file %q is damaged, or of another version of Spillway", formatName)
	}
	return f.Mark, nil
}
