package disk

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"

	"github.com/zeebo/xxh3"
)

// A manifest says what is kept in a directory of kept files. All numbers are
// little-endian; everything begins at a multiple of 8 bytes.
//
//	header   "SPILLKPT" · version u32 · sealed u32 · generation u64 · salt [32] · proof [32] · sum u64
//	record   "SPRC" · kind u32 · key u64 · length u64 · sum u64 · length bytes · zeros to a multiple of 8
//	…
//
// A sum is xxh3-64 of what stands before it and, in a record, of the bytes behind it; its
// seed is made of the generation and the place in the file. So no record passes
// for another, wherever a copy of it lies, and after damage the next sound one can
// be looked for at every multiple of 8.
//
//	kept     see record.go
//	shared   the same without memories; its meta is what other records have in common, which
//	         they name by its key, and which stands before them
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
	manifestVersion = 3
	manifestHeader  = 96
	recordMagic     = 'S' | 'P'<<8 | 'R'<<16 | 'C'<<24
	recordHeader    = 32

	kindKept   = 1
	kindGone   = 2
	kindWhole  = 3
	kindShared = 4

	// maxRecord bounds what one record may say: a batch of 2 TiB has checksums of
	// 256 MiB, and 768 MiB of seals where it is encrypted.
	maxRecord = 1 << 30
)

var errManifest = errors.New("not a manifest that this version reads")

func seedOf(generation uint64, at int64) uint64 {
	return generation*0x9e3779b97f4a7c15 + uint64(at) // an odd number: no two generations share a seed by chance
}

// keyMark says how what a manifest speaks of is sealed. The proof is derived from the user's
// key and the salt, and tells nothing of either the key or those that seal; so another
// key is known for one before anything is opened with it, or taken for damaged.
type keyMark struct {
	sealed      bool
	salt, proof [saltSize]byte
}

func appendManifestHeader(p []byte, generation uint64, mark keyMark) []byte {
	start := len(p)
	sealed := uint32(0)
	if mark.sealed {
		sealed = 1
	}
	p = append(p, manifestMagic...)
	p = binary.LittleEndian.AppendUint32(p, manifestVersion)
	p = binary.LittleEndian.AppendUint32(p, sealed)
	p = binary.LittleEndian.AppendUint64(p, generation)
	p = append(p, mark.salt[:]...)
	p = append(p, mark.proof[:]...)
	return binary.LittleEndian.AppendUint64(p, xxh3.Hash(p[start:]))
}

// checkVersion says whether a file, of which there may be little, begins as a manifest of
// another version, or as no manifest.
func checkVersion(p []byte) error {
	if len(p) < 12 || string(p[:8]) != manifestMagic {
		return errManifest
	}
	if v := binary.LittleEndian.Uint32(p[8:]); v != manifestVersion {
		return fmt.Errorf("%w: version %d, not %d", errManifest, v, manifestVersion)
	}
	return nil
}

// parseManifestHeader reads the beginning of a file, or says what is wrong with it.
func parseManifestHeader(p []byte, generation uint64) (mark keyMark, err error) {
	if err := checkVersion(p); err != nil {
		return mark, err
	}
	const end = manifestHeader - 8 // of what the sum covers
	if len(p) < manifestHeader || binary.LittleEndian.Uint64(p[end:]) != xxh3.Hash(p[:end]) || binary.LittleEndian.Uint64(p[16:]) != generation {
		return mark, fmt.Errorf("%w: its header is damaged", errManifest)
	}
	return keyMark{
		sealed: binary.LittleEndian.Uint32(p[12:]) != 0,
		salt:   [saltSize]byte(p[24:]), proof: [saltSize]byte(p[24+saltSize:]),
	}, nil
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
	mark   *keyMark             // nil: not even the header was written
	live   map[uint64]rawRecord // of the kind kept, by key
	shared map[uint64]rawRecord // of the kind shared, by key
	next   uint64               // a key that no record has
	whole  bool
	broken int64 // bytes that are in no sound record
}

// parseManifest reads a whole file. Its records' bytes are the file's.
func parseManifest(file []byte, generation uint64) (log, error) {
	l := log{live: make(map[uint64]rawRecord), shared: make(map[uint64]rawRecord), next: 1}
	mark, err := parseManifestHeader(file, generation)
	if err != nil {
		return l, err
	}
	l.mark = &mark
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
		case kindShared:
			l.shared[r.key] = r
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
	if !ok {
		return fmt.Errorf("the record at %d of it is damaged", ent.at)
	}
	gone := appendRecord(nil, k.generation, ent.at, kindGone, ent.key, r.body)
	return bare(transferAll(k.file.WriteAt, gone[:recordHeader], ent.at, 1))
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
