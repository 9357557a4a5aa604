package disk

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"path/filepath"

	"github.com/spillway-db/spillway/tier"
)

// The body of a record of the kinds kept and shared. Numbers and places are as in manifest.go.
//
//	kept     replaces u64 · memories u32 · meta u32 · salts u32 · 0 u32 · shared u64 · salt [32] … · memory … · seal · meta
//	memory   size u64 · pieces u32 · salt u32 · piece … · number u64 · units u32 · 0 u32 · seal …
//	piece    segment u32 · 0 u32 · offset u64 · length u64
//	seal     nonce u64 · tag [16]
//
// shared is the key of the record of what it has in common with others, 0 if that is nothing.
// Without salts nothing is encrypted, and there are neither numbers, units nor seals. Else
// the first salt is that of the volume that wrote the record: with its key the meta is
// sealed, and the record's own key and all that stands before the seal, but for what the
// record replaces, are part of what the tag says. A memory names the salt of the volume
// that wrote its units; each has its seal here, and on the disk is as long as in memory.
// What the record replaces is no part of it because that is left out when the manifest is
// written anew, maybe when the keys are gone; to forge it can only lose what who can
// write there could remove.
//
// So each record can be opened by itself, but for what it shares, and can be copied as
// it is: no nonce is used for a copy, and keys stay what they are.

const (
	sealSize   = 8 + tagSize
	bodyHeader = 32 // what stands before the salts
)

// keptRecord is such a body.
type keptRecord struct {
	replaces uint64
	shared   uint64
	salts    [][saltSize]byte
	memories []keptMemory
	said     []byte // of the body, what the seal is of beside the meta
	seal     seal
	meta     []byte // sealed, if there are salts
}

// keptMemory is a memory, as a manifest names it.
type keptMemory struct {
	size   int64
	pieces []keptPiece
	salt   int    // which of the record's
	number uint64 // see seals
	units  []seal
}

// keptPiece is a piece of a memory, as a manifest names it.
type keptPiece struct {
	segment  int
	off, len int64
}

func replacedBy(body []byte) (uint64, bool) {
	if len(body) < 8 {
		return 0, false
	}
	return binary.LittleEndian.Uint64(body), true
}

// withoutReplaced returns the body of a kept record that replaces nothing any more.
func withoutReplaced(body []byte) []byte {
	if len(body) < 8 {
		return body
	}
	return append(make([]byte, 8, len(body)), body[8:]...)
}

// describe says where memories lie, and how they are sealed. Writes under way end first.
func (v *Volume) describe(es []*Extents) (*keptRecord, error) {
	rec := &keptRecord{memories: make([]keptMemory, len(es))}
	if v.sealer != nil {
		rec.salts = [][saltSize]byte{v.sealer.own.salt}
	}
	for i, e := range es {
		m := &rec.memories[i]
		m.size = e.size
		for _, p := range e.pieces {
			m.pieces = append(m.pieces, keptPiece{segment: p.At.seg.index, off: p.At.off, len: p.Len})
		}
		if e.seals == nil {
			continue
		}
		var err error
		if m.units, err = e.seals.read(v); err != nil {
			return nil, err
		}
		m.number, m.salt = e.seals.number, rec.saltOf(e.seals.key)
	}
	return rec, nil
}

// saltOf returns where the salt of a key stands in the record, and adds it if it must.
func (rec *keptRecord) saltOf(k *volumeKey) int {
	for i, s := range rec.salts {
		if s == k.salt {
			return i
		}
	}
	rec.salts = append(rec.salts, k.salt)
	return len(rec.salts) - 1
}

// read returns the seals as they are once nobody writes. What was lost is an error.
func (s *seals) read(v *Volume) ([]seal, error) {
	h, err := s.hold(v.life, 0, len(s.units), false)
	if err != nil {
		return nil, tier.ErrClosed
	}
	defer s.release(h)
	units := make([]seal, len(s.units))
	copy(units, s.units)
	for u := range units {
		if err := s.whyLost(u); err != nil {
			return nil, err
		}
	}
	return units, nil
}

// append appends the body but for the meta, which is to have n bytes, and its seal.
func (rec *keptRecord) append(p []byte, n int) []byte {
	p = binary.LittleEndian.AppendUint64(p, rec.replaces)
	p = binary.LittleEndian.AppendUint32(p, uint32(len(rec.memories)))
	p = binary.LittleEndian.AppendUint32(p, uint32(n))
	p = binary.LittleEndian.AppendUint32(p, uint32(len(rec.salts)))
	p = binary.LittleEndian.AppendUint32(p, 0)
	p = binary.LittleEndian.AppendUint64(p, rec.shared)
	for _, s := range rec.salts {
		p = append(p, s[:]...)
	}
	for _, m := range rec.memories {
		p = binary.LittleEndian.AppendUint64(p, uint64(m.size))
		p = binary.LittleEndian.AppendUint32(p, uint32(len(m.pieces)))
		p = binary.LittleEndian.AppendUint32(p, uint32(m.salt))
		for _, e := range m.pieces {
			p = binary.LittleEndian.AppendUint32(p, uint32(e.segment))
			p = binary.LittleEndian.AppendUint32(p, 0)
			p = binary.LittleEndian.AppendUint64(p, uint64(e.off))
			p = binary.LittleEndian.AppendUint64(p, uint64(e.len))
		}
		if len(rec.salts) == 0 {
			continue
		}
		p = binary.LittleEndian.AppendUint64(p, m.number)
		p = binary.LittleEndian.AppendUint32(p, uint32(len(m.units)))
		p = binary.LittleEndian.AppendUint32(p, 0)
		for _, s := range m.units {
			p = s.append(p)
		}
	}
	return p
}

func (s seal) append(p []byte) []byte {
	return append(binary.LittleEndian.AppendUint64(p, s.nonce), s.tag[:]...)
}

func parseSeal(p []byte) seal {
	return seal{nonce: binary.LittleEndian.Uint64(p), tag: [tagSize]byte(p[8:])}
}

// recordExtra is what the tag of the meta of a record says beside it. It is longer than
// that of a unit: neither passes for the other.
func recordExtra(kind uint32, key uint64, said []byte) []byte {
	name := "spillway record "
	if kind == kindShared {
		name = "spillway shared "
	}
	return append(binary.BigEndian.AppendUint64([]byte(name), key), said...)
}

// sealRecord returns the body of the record of a kind that is to have a key.
func (v *Volume) sealRecord(rec *keptRecord, kind uint32, key uint64, meta []byte) []byte {
	p := rec.append(nil, len(meta))
	if v.sealer == nil {
		return append(p, meta...)
	}
	made := seal{nonce: v.sealer.nonces.Add(1)}
	nonce, extra := nonceOf(made.nonce), recordExtra(kind, key, p[8:])
	p = made.append(p)
	tag := len(p) - tagSize
	p = v.sealer.own.aead.Seal(p, nonce[:], meta, extra)
	end := len(p) - tagSize
	copy(p[tag:], p[end:])
	return p[:end]
}

// errSealed is what is said of a record that was not written so, whatever its checksum says.
var errSealed = errors.New("its record is not what was written")

// openRecord returns the meta of a record, and the keys of its salts; none if nothing is
// sealed.
func (v *Volume) openRecord(rec *keptRecord, r rawRecord) (meta []byte, keys []*volumeKey, err error) {
	if (v.sealer != nil) != (len(rec.salts) > 0) {
		return nil, nil, fmt.Errorf("%w (at %d of the manifest): it is encrypted otherwise", errSealed, r.at)
	}
	if v.sealer == nil {
		return append([]byte{}, rec.meta...), nil, nil
	}
	for _, salt := range rec.salts {
		k, err := v.sealer.keyOf(salt)
		if err != nil {
			return nil, nil, err
		}
		keys = append(keys, k)
	}
	nonce := nonceOf(rec.seal.nonce)
	meta = append(append(make([]byte, 0, len(rec.meta)+tagSize), rec.meta...), rec.seal.tag[:]...)
	if meta, err = keys[0].aead.Open(meta[:0], nonce[:], meta, recordExtra(r.kind, r.key, rec.said)); err != nil {
		return nil, nil, fmt.Errorf("%w (at %d of the manifest)", errSealed, r.at)
	}
	return meta, keys, nil
}

// checkMark says whether what a manifest speaks of was kept with the volume's key. Where
// it is certain that nothing is kept, no key is needed.
func (v *Volume) checkMark(path string, l log) error {
	if l.mark == nil || len(l.live) == 0 && l.broken == 0 {
		return nil
	}
	if !l.mark.sealed && v.sealer == nil {
		return nil
	}
	if l.mark.sealed && v.sealer != nil {
		proof, err := proofOf(v.sealer.users, l.mark.salt)
		if err != nil || proof == l.mark.proof {
			return err
		}
	}
	return &KeyError{Dir: v.cfg.Dir, Kept: filepath.Base(path), Sealed: l.mark.sealed, Encrypt: v.sealer != nil}
}

var errRecord = errors.New("a record that makes no sense")

// parseKept reads the body of a kept record, which a checksum has found to be what
// was written. It is checked all the same: whoever wrote it may have been wrong, and what
// it says becomes room that is handed out.
func parseKept(body []byte) (*keptRecord, error) {
	p := body
	if len(p) < bodyHeader {
		return nil, errRecord
	}
	rec := &keptRecord{replaces: binary.LittleEndian.Uint64(p), shared: binary.LittleEndian.Uint64(p[24:])}
	count, metaLen, salts := binary.LittleEndian.Uint32(p[8:]), uint64(binary.LittleEndian.Uint32(p[12:])), uint64(binary.LittleEndian.Uint32(p[16:]))
	if metaLen > uint64(len(p)-bodyHeader) {
		return nil, errRecord
	}
	end := len(p) - int(metaLen)
	rec.meta = p[end:]
	if salts > 0 {
		if end -= sealSize; end < bodyHeader {
			return nil, errRecord
		}
		rec.seal = parseSeal(p[end:])
	}
	rec.said, p = body[8:end], p[bodyHeader:end]
	if salts*saltSize > uint64(len(p)) {
		return nil, errRecord
	}
	for range salts {
		rec.salts = append(rec.salts, [saltSize]byte(p))
		p = p[saltSize:]
	}
	if uint64(count)*16 > uint64(len(p)) {
		return nil, errRecord
	}
	rec.memories = make([]keptMemory, count)
	for i := range rec.memories {
		var err error
		if p, err = rec.memories[i].parse(p, int(salts)); err != nil {
			return nil, err
		}
	}
	if len(p) != 0 {
		return nil, errRecord
	}
	return rec, nil
}

// parse reads a memory and returns what follows it.
func (m *keptMemory) parse(p []byte, salts int) (rest []byte, err error) {
	if len(p) < 16 {
		return nil, errRecord
	}
	size, count := binary.LittleEndian.Uint64(p), uint64(binary.LittleEndian.Uint32(p[8:]))
	salt := binary.LittleEndian.Uint32(p[12:])
	p = p[16:]
	if size == 0 || size > math.MaxInt64/2 || count == 0 || count*24 > uint64(len(p)) || salt > 0 && uint64(salt) >= uint64(salts) {
		return nil, errRecord
	}
	m.size, m.salt, m.pieces = int64(size), int(salt), make([]keptPiece, count)
	left, units := m.size, int64(0)
	for i := range m.pieces {
		segment, off, n := binary.LittleEndian.Uint32(p), binary.LittleEndian.Uint64(p[8:]), binary.LittleEndian.Uint64(p[16:])
		p = p[24:]
		last := i == len(m.pieces)-1
		switch {
		case segment >= 1<<30, n == 0, n > uint64(left), off%tier.Page != 0, off > math.MaxInt64/2,
			!last && n%tier.Page != 0, last && n != uint64(left):
			return nil, errRecord
		}
		units += unitsIn(m.size-left, int64(n))
		left -= int64(n)
		m.pieces[i] = keptPiece{segment: int(segment), off: int64(off), len: int64(n)}
	}
	if salts == 0 {
		return p, nil
	}
	return m.parseUnits(p, units)
}

// parseUnits reads how a memory of so many units is sealed.
func (m *keptMemory) parseUnits(p []byte, units int64) (rest []byte, err error) {
	if len(p) < 16 {
		return nil, errRecord
	}
	m.number = binary.LittleEndian.Uint64(p)
	if n := int64(binary.LittleEndian.Uint32(p[8:])); n != units || n > int64(len(p)-16)/sealSize {
		return nil, errRecord
	}
	p = p[16:]
	m.units = make([]seal, units)
	for u := range m.units {
		if m.units[u] = parseSeal(p); m.units[u].nonce == lost {
			return nil, errRecord
		}
		p = p[sealSize:]
	}
	return p, nil
}
