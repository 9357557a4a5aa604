package disk

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"

	"github.com/zeebo/xxh3"

	"github.com/spillway-db/spillway/tier"
)

// A manifest says what is kept in a directory of kept files. All numbers are
// little-endian; everything begins at a multiple of 8 bytes.
//
//	header   "SPILLKPT" · version u32 · 0 u32 · generation u64 · sum u64
//	record   "SPRC" · kind u32 · key u64 · length u64 · sum u64 · length bytes · zeros to a multiple of 8
//	…
//
// A sum is xxh3-64 of what stands before it and, in a record, of the bytes behind it; its
// seed is made of the generation and the place in the file. So no record passes
// for another, wherever a copy of it lies, and after damage the next sound one can
// be looked for at every multiple of 8.
//
//	kept     replaces u64 · memories u32 · meta u32 · memory … · meta
//	memory   size u64 · pieces u32 · 0 u32 · piece …
//	piece    segment u32 · 0 u32 · offset u64 · length u64
//	gone     nothing, or what the record was before: what has the key is not kept any more,
//	         nor what that replaced
//	whole    nothing: everything that was kept when the file was begun stands before
//	         this; no key before was higher than this record's
//
// The file's name holds the generation. A new one is written when most of the old is
// dead, and counts once it is whole; then the old one is removed. So there
// is always a whole one, and of two the younger is right.

const (
	manifestMagic   = "SPILLKPT"
	manifestVersion = 1
	manifestHeader  = 32
	recordMagic     = 'S' | 'P'<<8 | 'R'<<16 | 'C'<<24
	recordHeader    = 32

	kindKept  = 1
	kindGone  = 2
	kindWhole = 3

	// maxRecord bounds what one record may say: a batch of 4 TiB has checksums of
	// 512 MiB.
	maxRecord = 1 << 30
)

var errManifest = errors.New("not a manifest that this version reads")

func seedOf(generation uint64, at int64) uint64 {
	return generation*0x9e3779b97f4a7c15 + uint64(at) // an odd number: no two generations share a seed by chance
}

func appendManifestHeader(p []byte, generation uint64) []byte {
	start := len(p)
	p = append(p, manifestMagic...)
	p = binary.LittleEndian.AppendUint32(p, manifestVersion)
	p = binary.LittleEndian.AppendUint32(p, 0)
	p = binary.LittleEndian.AppendUint64(p, generation)
	return binary.LittleEndian.AppendUint64(p, xxh3.Hash(p[start:]))
}

// checkManifestHeader says what is wrong with the beginning of a file.
func checkManifestHeader(p []byte, generation uint64) error {
	if len(p) < manifestHeader || string(p[:8]) != manifestMagic {
		return errManifest
	}
	if v := binary.LittleEndian.Uint32(p[8:]); v != manifestVersion {
		return fmt.Errorf("%w: version %d, not %d", errManifest, v, manifestVersion)
	}
	if binary.LittleEndian.Uint64(p[24:]) != xxh3.Hash(p[:24]) || binary.LittleEndian.Uint64(p[16:]) != generation {
		return fmt.Errorf("%w: its header is damaged", errManifest)
	}
	return nil
}

// appendRecord appends a record that will begin at the offset at of its file.
func appendRecord(p []byte, generation uint64, at int64, kind uint32, key uint64, body []byte) []byte {
	start := len(p)
	p = binary.LittleEndian.AppendUint32(p, recordMagic)
	p = binary.LittleEndian.AppendUint32(p, kind)
	p = binary.LittleEndian.AppendUint64(p, key)
	p = binary.LittleEndian.AppendUint64(p, uint64(len(body)))
	p = binary.LittleEndian.AppendUint64(p, sumOf(p[start:start+24], body, seedOf(generation, at)))
	p = append(p, body...)
	for len(p)%8 != start%8 {
		p = append(p, 0)
	}
	return p
}

func sumOf(head, body []byte, seed uint64) uint64 {
	return xxh3.HashSeed(body, xxh3.HashSeed(head, seed))
}

// rawRecord is a sound record of a manifest.
type rawRecord struct {
	kind uint32
	key  uint64
	at   int64 // in the file
	n    int64 // with all that belongs to it
	body []byte
}

// parseRecordAt returns the record that p, which stands at an offset of a file, begins
// with; false if that is no sound one.
func parseRecordAt(p []byte, generation uint64, at int64) (rawRecord, bool) {
	if len(p) < recordHeader || binary.LittleEndian.Uint32(p) != recordMagic {
		return rawRecord{}, false
	}
	n := binary.LittleEndian.Uint64(p[16:])
	if n > maxRecord || n > uint64(len(p)-recordHeader) {
		return rawRecord{}, false
	}
	body := p[recordHeader : recordHeader+n]
	if binary.LittleEndian.Uint64(p[24:]) != sumOf(p[:24], body, seedOf(generation, at)) {
		return rawRecord{}, false
	}
	return rawRecord{
		kind: binary.LittleEndian.Uint32(p[4:]), key: binary.LittleEndian.Uint64(p[8:]),
		at: at, n: min(int64(len(p)), (recordHeader+int64(n)+7)&^7), body: body,
	}, true
}

// log is what a manifest says.
type log struct {
	live   map[uint64]rawRecord // of the kind kept, by key
	next   uint64               // a key that no record has
	whole  bool
	broken int64 // bytes that are in no sound record
}

// parseManifest reads a whole file. Its records' bytes are the file's.
func parseManifest(file []byte, generation uint64) (log, error) {
	l := log{live: make(map[uint64]rawRecord), next: 1}
	if err := checkManifestHeader(file, generation); err != nil {
		return l, err
	}
	for at := int64(manifestHeader); at < int64(len(file)); {
		r, ok := parseRecordAt(file[at:], generation, at)
		if !ok {
			n := min(8, int64(len(file))-at)
			l.broken += n
			at += n
			continue
		}
		at += r.n
		if r.key < math.MaxUint64 {
			l.next = max(l.next, r.key+1)
		}
		switch r.kind {
		case kindKept:
			if replaces, ok := replacedBy(r.body); ok {
				delete(l.live, replaces)
			}
			l.live[r.key] = r
		case kindGone:
			if replaces, ok := replacedBy(r.body); ok {
				delete(l.live, replaces)
			}
			delete(l.live, r.key)
		case kindWhole:
			l.whole = true
		}
	}
	return l, nil
}

// endInPlace makes of a record that something is kept one that it is gone: where the file
// cannot grow, because the disk is full, what stands in it can be changed still.
func (k *keptDir) endInPlace(ent *entry) error {
	p := make([]byte, ent.n)
	if err := transferAll(k.file.ReadAt, p, ent.at, 1); err != nil {
		return bare(err)
	}
	r, ok := parseRecordAt(p, k.generation, ent.at)
	if !ok || r.key != ent.key {
		return fmt.Errorf("the record at %d of it is damaged", ent.at)
	}
	gone := appendRecord(nil, k.generation, ent.at, kindGone, ent.key, r.body)
	return bare(transferAll(k.file.WriteAt, gone[:recordHeader], ent.at, 1))
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

// keptPiece is a piece of a memory, as a manifest names it.
type keptPiece struct {
	segment  int
	off, len int64
}

// keptMemory is a memory, as a manifest names it.
type keptMemory struct {
	size   int64
	pieces []keptPiece
}

func appendKept(p []byte, replaces uint64, memories []keptMemory, meta []byte) []byte {
	p = binary.LittleEndian.AppendUint64(p, replaces)
	p = binary.LittleEndian.AppendUint32(p, uint32(len(memories)))
	p = binary.LittleEndian.AppendUint32(p, uint32(len(meta)))
	for _, m := range memories {
		p = binary.LittleEndian.AppendUint64(p, uint64(m.size))
		p = binary.LittleEndian.AppendUint32(p, uint32(len(m.pieces)))
		p = binary.LittleEndian.AppendUint32(p, 0)
		for _, e := range m.pieces {
			p = binary.LittleEndian.AppendUint32(p, uint32(e.segment))
			p = binary.LittleEndian.AppendUint32(p, 0)
			p = binary.LittleEndian.AppendUint64(p, uint64(e.off))
			p = binary.LittleEndian.AppendUint64(p, uint64(e.len))
		}
	}
	return append(p, meta...)
}

var errRecord = errors.New("a record that makes no sense")

// parseKept reads the body of a kept record, which a checksum has found to be what
// was written. It is checked all the same: whoever wrote it may have been wrong, and what
// it says becomes room that is handed out.
func parseKept(p []byte) (memories []keptMemory, meta []byte, err error) {
	if len(p) < 16 {
		return nil, nil, errRecord
	}
	count, metaLen := binary.LittleEndian.Uint32(p[8:]), binary.LittleEndian.Uint32(p[12:])
	p = p[16:]
	if uint64(metaLen) > uint64(len(p)) {
		return nil, nil, errRecord
	}
	meta, p = p[uint64(len(p))-uint64(metaLen):], p[:uint64(len(p))-uint64(metaLen)]
	if uint64(count)*16 > uint64(len(p)) {
		return nil, nil, errRecord
	}
	memories = make([]keptMemory, count)
	for i := range memories {
		if memories[i], p, err = parseMemory(p); err != nil {
			return nil, nil, err
		}
	}
	if len(p) != 0 {
		return nil, nil, errRecord
	}
	return memories, meta, nil
}

func parseMemory(p []byte) (m keptMemory, rest []byte, err error) {
	if len(p) < 16 {
		return m, nil, errRecord
	}
	size, count := binary.LittleEndian.Uint64(p), uint64(binary.LittleEndian.Uint32(p[8:]))
	p = p[16:]
	if size == 0 || size > math.MaxInt64/2 || count == 0 || count*24 > uint64(len(p)) {
		return m, nil, errRecord
	}
	m = keptMemory{size: int64(size), pieces: make([]keptPiece, count)}
	left := m.size
	for i := range m.pieces {
		segment, off, n := binary.LittleEndian.Uint32(p), binary.LittleEndian.Uint64(p[8:]), binary.LittleEndian.Uint64(p[16:])
		p = p[24:]
		last := i == len(m.pieces)-1
		switch {
		case segment >= 1<<30, n == 0, n > uint64(left), off%tier.Page != 0, off > math.MaxInt64/2,
			!last && n%tier.Page != 0, last && n != uint64(left):
			return m, nil, errRecord
		}
		left -= int64(n)
		m.pieces[i] = keptPiece{segment: int(segment), off: int64(off), len: int64(n)}
	}
	return m, p, nil
}

// readAll reads a file of so many bytes.
func readAll(f File, size int64) ([]byte, error) {
	if size > math.MaxInt32*4 {
		return nil, fmt.Errorf("%d bytes are too many", size)
	}
	p := make([]byte, size)
	err := transferAll(f.ReadAt, p, 0, 1)
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return nil, errors.New("shorter than it says")
	}
	return p, bare(err)
}
