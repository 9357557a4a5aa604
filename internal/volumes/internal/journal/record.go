package journal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/spillway-db/spillway/internal/volumes/internal/seal"
	"github.com/spillway-db/spillway/tier"
)

// The body of a live or shared frame. Numbers and places are as in manifest.go.
//
//	record   replaces u64 · memories u32 · meta u32 · salts u32 · 0 u32 · shared u64 · salt [32] … · memory … · seal · meta
//	memory   size u64 · pieces u32 · salt u32 · piece … · number u64 · units u32 · 0 u32 · seal …
//	piece    segment u32 · 0 u32 · offset u64 · length u64
//	seal     nonce u64 · tag [16]
//
// shared is the key of the record of what it has in common with others, 0 if that is nothing.
// Without salts nothing is encrypted, and there are neither numbers, units nor seals. Else the
// first salt is that of the volume that wrote the record. With its key the meta is sealed; the
// record's own key and all that is before the seal, except for what the record replaces, are
// authenticated with it. A memory names the salt of the volume that wrote its units; each has its
// seal here, and on the disk is as long as in memory.
//
// What the record replaces is not authenticated because it is left out when the manifest is
// written anew, maybe when the keys are gone. To forge it can only lose what could be removed.
//
// So each record can be opened by itself, except for what it shares, and can be copied as it is: no
// nonce is used for a copy, and keys stay what they are.

const (
	sealSize     = 8 + seal.TagSize
	recordHeader = 32 // what is before the salts
)

// Record says where memories lie, and what their owner says of them.
type Record struct {
	Replaces uint64 // the key of a record; 0: none
	Salts    []seal.Salt
	Memories []Memory
	Seal     seal.Seal // of the meta, if there are salts

	shared uint64
	said   []byte // what the seal is of beside the meta
	meta   []byte // sealed, if there are salts
}

// Memory is a memory, as a manifest names it.
type Memory struct {
	Size   int64
	Pieces []Piece
	Salt   int // which of the record's
	Number uint64
	Seals  []seal.Seal // of its units
}

// Piece is a piece of a memory, as a manifest names it.
type Piece struct {
	Segment  int
	Off, Len int64 // in the segment
}

// Sealed notes how a memory is sealed, if it is.
func (rec *Record) Sealed(m *Memory, key *seal.Key, number uint64, seals []seal.Seal) {
	m.Number, m.Seals = number, seals
	if m.Salt = slices.Index(rec.Salts, key.Salt()); m.Salt < 0 {
		m.Salt = len(rec.Salts)
		rec.Salts = append(rec.Salts, key.Salt())
	}
}

// replacedBy returns what the record of a frame replaces.
func replacedBy(body []byte) uint64 {
	if len(body) < 8 {
		return 0
	}
	return binary.LittleEndian.Uint64(body)
}

// withoutReplaced returns the body of a record that replaces nothing any more.
func withoutReplaced(body []byte) []byte {
	if len(body) < 8 {
		return body
	}
	return append(make([]byte, 8, len(body)), body[8:]...)
}

// append appends the body except for the meta, which is to have n bytes, and its seal.
func (rec *Record) append(p []byte, n int) []byte {
	p = binary.LittleEndian.AppendUint64(p, rec.Replaces)
	p = binary.LittleEndian.AppendUint32(p, uint32(len(rec.Memories)))
	p = binary.LittleEndian.AppendUint32(p, uint32(n))
	p = binary.LittleEndian.AppendUint32(p, uint32(len(rec.Salts)))
	p = binary.LittleEndian.AppendUint32(p, 0)
	p = binary.LittleEndian.AppendUint64(p, rec.shared)
	for _, s := range rec.Salts {
		p = append(p, s[:]...)
	}
	for _, m := range rec.Memories {
		p = binary.LittleEndian.AppendUint64(p, uint64(m.Size))
		p = binary.LittleEndian.AppendUint32(p, uint32(len(m.Pieces)))
		p = binary.LittleEndian.AppendUint32(p, uint32(m.Salt))
		for _, e := range m.Pieces {
			p = binary.LittleEndian.AppendUint32(p, uint32(e.Segment))
			p = binary.LittleEndian.AppendUint32(p, 0)
			p = binary.LittleEndian.AppendUint64(p, uint64(e.Off))
			p = binary.LittleEndian.AppendUint64(p, uint64(e.Len))
		}
		if len(rec.Salts) == 0 {
			continue
		}
		p = binary.LittleEndian.AppendUint64(p, m.Number)
		p = binary.LittleEndian.AppendUint32(p, uint32(len(m.Seals)))
		p = binary.LittleEndian.AppendUint32(p, 0)
		for _, s := range m.Seals {
			p = appendSeal(p, s)
		}
	}
	return p
}

func appendSeal(p []byte, s seal.Seal) []byte {
	return append(binary.LittleEndian.AppendUint64(p, s.Nonce), s.Tag[:]...)
}

func parseSeal(p []byte) seal.Seal {
	return seal.Seal{Nonce: binary.LittleEndian.Uint64(p), Tag: [seal.TagSize]byte(p[8:])}
}

// extra is what the tag of the meta says beside it. It is longer than that of a unit: neither
// passes for the other.
func extra(kind Kind, key uint64, said []byte) []byte {
	name := "spillway record "
	if kind == Shared {
		name = "spillway shared "
	}
	return append(binary.BigEndian.AppendUint64([]byte(name), key), said...)
}

// body returns the record's body, to be framed as kind and key. It is sealed if s is not nil.
func (rec *Record) body(s *seal.Sealer, kind Kind, key uint64, meta []byte) []byte {
	p := rec.append(nil, len(meta))
	if s == nil {
		return append(p, meta...)
	}
	sealed, made := s.SealText(nil, meta, extra(kind, key, p[8:]))
	return append(appendSeal(p, made), sealed...)
}

// errSealed is what is said of a record that was not written so, whatever its checksum says.
var errSealed = errors.New("its record is not what was written")

// open returns the meta of a framed record, and the keys of its salts; none if nothing is sealed.
func (rec *Record) open(s *seal.Sealer, f Frame) (meta []byte, keys []*seal.Key, err error) {
	if (s != nil) != (len(rec.Salts) > 0) {
		return nil, nil, fmt.Errorf("%w (at %d of the manifest): it is encrypted otherwise", errSealed, f.At)
	}
	if s == nil {
		return append([]byte{}, rec.meta...), nil, nil
	}
	for _, salt := range rec.Salts {
		k, err := s.KeyOf(salt)
		if err != nil {
			return nil, nil, err
		}
		keys = append(keys, k)
	}
	if meta, err = keys[0].OpenText(rec.meta, extra(f.Kind, f.Key, rec.said), rec.Seal); err != nil {
		return nil, nil, fmt.Errorf("%w (at %d of the manifest)", errSealed, f.At)
	}
	return meta, keys, nil
}

var errRecord = errors.New("a record that makes no sense")

// ParseRecord reads the body of a frame, which a checksum has found to be what was written. It
// is checked all the same: its writer may have been wrong, and what it says becomes room that is
// handed out.
func ParseRecord(body []byte) (*Record, error) {
	p := body
	if len(p) < recordHeader {
		return nil, errRecord
	}
	rec := &Record{Replaces: binary.LittleEndian.Uint64(p), shared: binary.LittleEndian.Uint64(p[24:])}
	count, metaLen, salts := binary.LittleEndian.Uint32(p[8:]), uint64(binary.LittleEndian.Uint32(p[12:])), uint64(binary.LittleEndian.Uint32(p[16:]))
	if metaLen > uint64(len(p)-recordHeader) {
		return nil, errRecord
	}
	end := len(p) - int(metaLen)
	rec.meta = p[end:]
	if salts > 0 {
		if end -= sealSize; end < recordHeader {
			return nil, errRecord
		}
		rec.Seal = parseSeal(p[end:])
	}
	rec.said, p = body[8:end], p[recordHeader:end]
	if salts*seal.SaltSize > uint64(len(p)) {
		return nil, errRecord
	}
	for range salts {
		rec.Salts = append(rec.Salts, seal.Salt(p))
		p = p[seal.SaltSize:]
	}
	if uint64(count)*16 > uint64(len(p)) {
		return nil, errRecord
	}
	rec.Memories = make([]Memory, count)
	for i := range rec.Memories {
		var err error
		if p, err = rec.Memories[i].parse(p, int(salts)); err != nil {
			return nil, err
		}
	}
	if len(p) != 0 {
		return nil, errRecord
	}
	return rec, nil
}

// parse reads a memory and returns what follows it.
func (m *Memory) parse(p []byte, salts int) (rest []byte, err error) {
	if len(p) < 16 {
		return nil, errRecord
	}
	size, count := binary.LittleEndian.Uint64(p), uint64(binary.LittleEndian.Uint32(p[8:]))
	salt := binary.LittleEndian.Uint32(p[12:])
	p = p[16:]
	if size == 0 || size > math.MaxInt64/2 || count == 0 || count*24 > uint64(len(p)) || salt > 0 && uint64(salt) >= uint64(salts) {
		return nil, errRecord
	}
	m.Size, m.Salt, m.Pieces = int64(size), int(salt), make([]Piece, count)
	left, units := m.Size, int64(0)
	for i := range m.Pieces {
		segment, off, n := binary.LittleEndian.Uint32(p), binary.LittleEndian.Uint64(p[8:]), binary.LittleEndian.Uint64(p[16:])
		p = p[24:]
		last := i == len(m.Pieces)-1
		switch {
		case segment >= 1<<30, n == 0, n > uint64(left), off%tier.Page != 0, off > math.MaxInt64/2,
			!last && n%tier.Page != 0, last && n != uint64(left):
			return nil, errRecord
		}
		units += seal.UnitsIn(m.Size-left, int64(n))
		left -= int64(n)
		m.Pieces[i] = Piece{Segment: int(segment), Off: int64(off), Len: int64(n)}
	}
	if salts == 0 {
		return p, nil
	}
	return m.parseUnits(p, units)
}

// parseUnits reads how a memory of so many units is sealed.
func (m *Memory) parseUnits(p []byte, units int64) (rest []byte, err error) {
	if len(p) < 16 {
		return nil, errRecord
	}
	m.Number = binary.LittleEndian.Uint64(p)
	if n := int64(binary.LittleEndian.Uint32(p[8:])); n != units || n > int64(len(p)-16)/sealSize {
		return nil, errRecord
	}
	p = p[16:]
	m.Seals = make([]seal.Seal, units)
	for u := range m.Seals {
		if m.Seals[u] = parseSeal(p); m.Seals[u].Nonce == seal.Lost {
			return nil, errRecord
		}
		p = p[sealSize:]
	}
	return p, nil
}
